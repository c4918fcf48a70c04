# SPDX-License-Identifier: Apache-2.0
"""Instances in processes of their own that stop, die and come back at every step of a push.

In each case the survivor holds nothing for the other one after a bounded time, its scheduler does
not wait, every place lent is where its owner takes it to be, no byte is wrong, and without a
restart of the survivor pushes begin again.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiers.p2p.taker import TAKE_SECONDS
from tests.tiers.p2p.hooked import GIVER_STEPS, TAKER_STEPS
from tests.tiers.p2p.peers import (
    BACK_SECONDS,
    HEAL_SECONDS,
    LEASE_SECONDS,
    LOAD_SECONDS,
    SILENCE_SECONDS,
    Peer,
    check_calls,
    checked,
    comes,
    nothing_more,
    quiet,
    running,
    side_by_side,
    state_of,
    until,
)
from tests.tiers.p2p.proxy import HERE, Proxy
from tests.tiers.p2p.rig import free_port

SOAK_SECONDS = float(os.environ.get("KVTIER_SOAK_SECONDS", "4"))
ISOLATIONS = ("thread", "process")
IN_HANDSHAKE = ("Hello", "Proof", "Challenge", "Welcome")
GIVER_SLOTS = 64
TAKER_SLOTS = 512
"""It keeps what it has loaded itself in each case, and has room for what is pushed then."""
TAKER_KEEPS = TAKER_SLOTS // 32
"""Free for promotions."""
PART = 8
"""Chunks stored at a time."""


class Pair:
    """An instance with little memory and one with much."""

    def __init__(self, folder: Path, isolation: str, **options: Any) -> None:
        folder.mkdir()
        more: dict[str, Any] = {"isolation": isolation, **options}
        self.taker = Peer(folder, "taker", slots=TAKER_SLOTS, **more)
        self.giver = Peer(
            folder,
            "giver",
            slots=GIVER_SLOTS,
            peers=[self.taker.address],
            guest_ratio=0.0,
            **more,
        )
        self._next = 1000

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Both run, and end in good order if nothing has failed."""
        with running(self.giver, self.taker):
            self.settle()
            yield
            for one in (self.giver, self.taker):
                assert one.close() == {"error": "", "left": []}

    def fresh(self, count: int) -> list[int]:
        """Chunks that nobody has yet."""
        self._next += count
        return list(range(self._next - count, self._next))

    def press(self, parts: int = 12) -> list[int]:
        """Have the giver store more than it has room for."""
        numbers = []
        for _ in range(parts):
            part = self.fresh(PART)
            self.giver.do("store", numbers=part)
            numbers += part
            time.sleep(0.03)  # for its steps
        return numbers

    def settle(self, *survivors: Peer) -> None:
        """All is well again: what is pushed comes back, nothing is held, nobody has waited."""
        self.pushes()
        for one in (self.giver, self.taker):
            quiet(one, BACK_SECONDS)
        balanced(self.taker)
        check_calls(*survivors)

    def pushes(self) -> None:
        """Until what the giver has no room for comes back to it, and is there for the taker."""
        end = time.monotonic() + HEAL_SECONDS
        while True:
            numbers = self.press()[:PART]
            if self.giver.load(numbers)["ready"] == PART:
                break
            assert time.monotonic() < end, (
                f"pushed chunks do not come back: {self.giver.log} {self.taker.log}"
            )
        comes(self.taker, numbers, peer=[self.giver.address, "", 0.0])

    def reach(self, victim: Peer, step: str) -> int:
        """Have the giver store until `victim` has come to an armed step: its process."""
        end = time.monotonic() + HEAL_SECONDS
        while not (pid := victim.is_at(step)):
            stored = self.giver.begin("store", numbers=self.fresh(PART))
            while not victim.is_at(step) and not self.giver.has_said(stored):
                assert time.monotonic() < end, f"never at {step}: {self.giver.log} {self.taker.log}"
                time.sleep(0.002)
            time.sleep(0.02)
        until(lambda: state_of(pid) in "TZX", 5.0, f"{victim.name} stands at {step}")
        return pid

    def case(self, step: str, action: str, chance: random.Random) -> None:
        """One of them stops or dies at `step`."""
        victim, survivor = (
            (self.giver, self.taker) if step in GIVER_STEPS else (self.taker, self.giver)
        )
        if step.endswith(IN_HANDSHAKE):
            self.taker.forget_sessions()
        victim.arm(step, action)
        pid = self.reach(victim, step)
        began_at = time.monotonic()
        if action == "stop":
            # Short, longer than a silence, longer than a lease.
            time.sleep(chance.choice([0.1, 1.5 * SILENCE_SECONDS, 1.5 * LEASE_SECONDS]))
            if time.monotonic() > began_at + SILENCE_SECONDS:
                quiet(survivor, BACK_SECONDS)
                balanced(self.taker, survivor)
            if survivor is self.giver:
                self.press(2)  # goes on by itself
            os.kill(pid, signal.SIGCONT)
        elif pid == victim.process.pid:
            victim.kill()
            quiet(survivor, BACK_SECONDS)
            balanced(self.taker, survivor)
            victim.start()
        victim.do("rest")
        self.settle(survivor)
        print(f"{step} {action}: {time.monotonic() - began_at:.1f} s", flush=True)


def balanced(taker: Peer, one: Peer | None = None) -> None:
    """Where `one` is the taker: the places that it has lent are those that its service has, and
    nothing is done with any of them."""
    if one not in (None, taker):
        return

    def same() -> bool:
        said = taker.audit()
        return bool(
            said["up"] and said["lent"] == said["peer_guest_slots"] and not taker.state()["in_use"]
        )

    until(same, BACK_SECONDS, f"places lent by {taker.name}: {taker.audit()} {taker.state()}")


@pytest.mark.slow
@pytest.mark.fault("H03", "K07", "K08", "L13", "L14", "P02", "P17", "P19")
def test_every_step(tmp_path: Path) -> None:
    """Stopped and killed at each step, on each side, with the service in a thread and in a process
    of its own: a pair of instances for each, side by side."""

    def work(case: tuple[Sequence[str], str]) -> None:
        steps, isolation = case
        side = "giver" if steps is GIVER_STEPS else "taker"
        chance = random.Random(f"{isolation} {side}")
        pair = Pair(tmp_path / f"{side}-{isolation}", isolation)
        survivor = pair.taker if side == "giver" else pair.giver
        with pair.running():
            before = checked(survivor)
            for step in steps:
                for action in ("stop", "kill"):
                    pair.case(step, action, chance)
            nothing_more(before, survivor)

    side_by_side(work, [(s, i) for s in (GIVER_STEPS, TAKER_STEPS) for i in ISOLATIONS])


@pytest.mark.slow
@pytest.mark.fault("K07", "K08", "P02", "P17")
def test_random_moments(tmp_path: Path) -> None:
    """Pushes all the time, and now and then one of the two stops, dies, or loses its service."""
    seed = int(time.time())
    print(f"seed {seed}")
    side_by_side(
        lambda isolation: random_moments(tmp_path / isolation, isolation, seed), ISOLATIONS
    )


def random_moments(folder: Path, isolation: str, seed: int) -> None:
    chance = random.Random(f"{seed} {isolation}")
    pair = Pair(folder, isolation)
    faults = 0
    with pair.running():
        end = time.monotonic() + SOAK_SECONDS
        while time.monotonic() < end:
            victim = chance.choice([pair.giver, pair.taker])
            action = chance.choice(["stop", "kill", "service"][: 2 + (isolation == "process")])
            numbers = pair.press(chance.randrange(1, 12))
            time.sleep(chance.random() * chance.choice([0.001, 0.02]))
            faults += 1
            if action == "stop":
                victim.signal(signal.SIGSTOP)
                time.sleep(chance.random() * 1.5)
                victim.signal(signal.SIGCONT)
            elif action == "kill":
                victim.kill()
                victim.start()
            else:
                for pid in victim.services():
                    os.kill(pid, signal.SIGKILL)
                time.sleep(chance.random())
            # Whatever there is has the right bytes.
            pair.giver.load(numbers[chance.randrange(len(numbers)) :])
            for one in (pair.giver, pair.taker):
                one.do("rest")
            if chance.random() < 0.3:
                pair.settle(pair.giver, pair.taker)
        pair.settle(pair.giver, pair.taker)
    print(f"{faults} faults")
    assert faults


@pytest.mark.fault("L14", "P17")
def test_memory_that_is_wanted_while_a_push_hangs(tmp_path: Path) -> None:
    """The giver stops in the middle of being read: the taker's owner has its memory back all the
    same, at once but for what is being read, and that after a silence."""
    side_by_side(lambda isolation: wanted(tmp_path / isolation, isolation), ISOLATIONS)


def wanted(folder: Path, isolation: str) -> None:
    pair = Pair(folder, isolation)
    with pair.running():
        pair.giver.arm("owner-in-read", "stop")
        pid = pair.reach(pair.giver, "owner-in-read")
        own = list(range(TAKER_SLOTS - TAKER_KEEPS))
        for start in range(0, len(own), PART):
            # That may be lent, with room for these, and for those that are kept free.
            most = TAKER_SLOTS - start - PART - TAKER_KEEPS
            until(
                lambda most=most: pair.taker.audit()["lent"] <= most,
                BACK_SECONDS,
                f"no more than {most} slots are lent",
            )
            pair.taker.do("store", numbers=own[start : start + PART])
        balanced(pair.taker)
        said = pair.taker.loaded(pair.taker.begin("load", numbers=own))
        assert said["ready"] == len(own)
        check_calls(pair.taker)
        os.kill(pid, signal.SIGCONT)
        pair.giver.do("rest")
        # Nobody has room now; what is dropped is dropped, and nothing waits.
        pair.press()
        check_calls(pair.giver, pair.taker)
        pair.taker.do("forget")
        pair.settle(pair.giver, pair.taker)


@pytest.mark.fault("H03", "L14", "P11", "P21")
def test_the_network_between_them(tmp_path: Path) -> None:
    """Nothing passes any more, and nobody is told; or connections end; or bytes do not pass."""
    side_by_side(lambda how: network(tmp_path / how, how), ("hold", "cut", "data"))


def network(folder: Path, how: str) -> None:
    pair = Pair(folder, "thread")
    giver, taker = pair.giver, pair.taker
    data_ports = free_port(), free_port()
    for one, data_port in zip((giver, taker), data_ports, strict=True):
        one.options["data_port"] = data_port
    giver.options.update(advertise_host=HERE, host="127.0.0.1", peers=[f"{HERE}:{taker.port}"])
    with Proxy([giver.port, taker.port, *data_ports]) as proxy, pair.running():
        before = checked(giver, taker)
        for step in ("", "owner-at-Push", "reader-after-Lend", "reader-in-read"):
            if step:
                taker.arm(step, "stop")
                pid = pair.reach(taker, step)
            if how == "cut":
                proxy.cut()
            else:
                proxy.hold(*(data_ports if how == "data" else ()))
            if step:
                os.kill(pid, signal.SIGCONT)
                taker.do("rest")
            pair.press(4)
            for one in (giver, taker):
                quiet(one, BACK_SECONDS + TAKE_SECONDS)
            balanced(taker)
            # It costs nobody anything that goes on.
            giver.do("forget")
            assert giver.load(pair.press(4)[-PART:])["seconds"] < LOAD_SECONDS
            proxy.let()
            pair.settle(giver, taker)
        nothing_more(before, giver, taker)
