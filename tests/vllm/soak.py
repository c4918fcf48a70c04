# SPDX-License-Identifier: Apache-2.0
"""Many conversations at once through one engine, with aborts and stops at random.

Runs in the engine's process, on a ``Driver``. Everything random comes from one seed; what a turn
asks for depends on its conversation and number alone, so a turn that is asked again is the same.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from tests.vllm.driver import Driver

BLOCK_TOKENS = 128

MOST_TOKENS = 960
"""Of a prompt, so that the answer fits into a model length of 1024."""


@dataclass
class Conversation:
    """One user: each turn's prompt is the last one, its answer, and something new."""

    number: int
    seed: int
    prompt: list[int] = field(default_factory=list)
    turn: int = 0

    def begin(self) -> None:
        """The first turn; eight conversations share its first one or two blocks."""
        shared = random.Random(f"{self.seed} {self.number % 8}")
        self.prompt = [shared.randrange(3, 1000) for _ in range(shared.randrange(130, 300))]
        self.turn = 0
        self._say()

    def _say(self) -> None:
        mine = random.Random(f"{self.seed} {self.number} {self.turn}")
        self.prompt += [mine.randrange(3, 1000) for _ in range(mine.randrange(60, 240))]
        if mine.random() < 0.5:
            # The answer needs one block more, which is not free: somebody is preempted.
            missing = -(len(self.prompt) + mine.randrange(1, 6)) % BLOCK_TOKENS
            self.prompt += [mine.randrange(3, 1000) for _ in range(missing)]
        self.max_tokens = mine.choice([1, 4, 8, 24])
        # Of a thousand tokens twenty end the answer: a third of the long ones end early.
        self.stop = [mine.randrange(3, 1000) for _ in range(20)] if mine.random() < 0.5 else None

    def go_on(self, answer: list[int]) -> None:
        """The answer has come; the next turn, or all over again."""
        self.prompt = [*self.prompt, *answer]
        self.turn += 1
        self._say()
        if self.turn == 4 or len(self.prompt) > MOST_TOKENS:
            self.begin()


def soak(
    driver: Driver, seed: int, span: float, conversations: int, at_once: int, bound: float
) -> dict[str, Any]:
    """Conversations for `span` seconds, then the end of those under way.

    Parameters
    ----------
    at_once : int
        Requests in the engine at the same time.
    bound : float
        Seconds within which every request ends.

    Returns
    -------
    dict
        ``answers``: what was asked and answered, in order; and counts.
    """
    rng = random.Random(seed)
    everybody = [Conversation(number, seed) for number in range(conversations)]
    for one in everybody:
        one.begin()
    idle = list(everybody)
    running: dict[str, tuple[Conversation, float]] = {}
    answers: list[dict[str, Any]] = []
    seen: set[int] = set()
    asked = aborted = steps = 0
    longest = 0.0
    started = time.monotonic()
    while running or time.monotonic() < started + span:
        now = time.monotonic()
        while len(running) < at_once and idle and now < started + span:
            # From the half that has waited longer, so that everybody has a turn soon.
            one = idle.pop(rng.randrange((len(idle) + 1) // 2))
            seen.add(one.number)
            name = f"c{one.number}-{asked}"
            asked += 1
            running[name] = (one, now)
            driver.add(name, one.prompt, one.max_tokens, one.stop)
        if running and rng.random() < 0.01:
            name = rng.choice(sorted(running))
            driver.abort(name)
            idle.append(running.pop(name)[0])  # asked again some time
            aborted += 1
        for name, answer in driver.step().items():
            one, since = running.pop(name)
            longest = max(longest, time.monotonic() - since)
            asked_for = {"prompt": one.prompt, "max_tokens": one.max_tokens, "stop": one.stop}
            answers.append(asked_for | answer)
            one.go_on(answer["tokens"])
            idle.append(one)
        steps += 1
        if steps % 50 == 0:
            driver.kvtier.check()
        late = [name for name, (_, since) in running.items() if now - since > bound]
        assert not late, f"{late} have not ended within {bound} s: {driver.state()}"
    return {
        "answers": answers,
        "asked": asked,
        "aborted": aborted,
        "steps": steps,
        "longest": longest,
        "preemptions": driver.preemptions,
        "conversations": len(seen),
    }
