# SPDX-License-Identifier: Apache-2.0
"""Where requests come from: conversations in a closed loop, or a recorded trace in an open loop.

Owns the list of what is still to be sent. Runs on the generator's one thread; times are seconds
since the start of the run, and nothing here reads a clock. Everything follows from the arguments,
so two strategies get exactly the same requests.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from kvtier.bench.pattern import Shape
from kvtier.errors import ConfigError

HASH_BYTES = 16
TRACE_BLOCK_TOKENS = 512
TOKEN_IDS = (10, 1000)
"""Token ids of prompts, from the first on, below the second: every model's vocabulary has them, and
its special tokens are elsewhere, or few."""


class Request(msgspec.Struct, frozen=True):
    """One request, with the hashes of the full blocks of its prompt and its answer."""

    request_id: str
    intended_start: float
    """Seconds since the start of the run; latency counts from here."""
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[bytes, ...]
    conversation: int = 0
    turn: int = 0


class Source(Protocol):
    """What the driver draws requests from."""

    total: int
    """Requests in all."""

    def take(self, now: float) -> list[Request]:
        """Requests to be sent by `now`, each given once."""

    def done(self, request: Request, now: float) -> None:
        """The answer of `request` is complete."""

    def next_start(self) -> float | None:
        """When the next one becomes due by itself; None if only an answer brings one, or none is
        left."""

    def tokens(self, request: Request) -> list[int]:
        """Token ids of the request's prompt, for a real engine."""


def token_ids(count: int, seed: int, *names: object) -> list[int]:
    """`count` token ids that follow from the rest."""
    rng = np.random.default_rng(int.from_bytes(block_hash(seed, "tokens", *names), "little"))
    ids: list[int] = rng.integers(*TOKEN_IDS, count).tolist()
    return ids


def block_hash(seed: int, *names: object) -> bytes:
    """Hash of one block, from whatever tells its tokens (and all tokens before it) apart."""
    text = ":".join(str(name) for name in (seed, *names))
    return hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).digest()


class MultiTurn:
    """Closed loop: each conversation sends its next turn when the last answer is complete.

    Turn t has a prompt of ``first_prompt_tokens + t * turn_tokens`` tokens, which begins with all
    of turn t - 1 (its prompt and its answer, so the answer counts towards `turn_tokens`). A turn
    that would exceed `max_in_flight` waits, outside the server, for its place; the one that became
    ready first goes first.

    Parameters
    ----------
    conversations : int
    shape : Shape
    first_prompt_tokens, turn_tokens, output_tokens : int
    turns : int
        Turns after the first prompt.
    max_in_flight : int
    seed : int
    """

    def __init__(
        self,
        conversations: int,
        shape: Shape,
        first_prompt_tokens: int = 12_000,
        turn_tokens: int = 4_000,
        turns: int = 8,
        output_tokens: int = 32,
        max_in_flight: int = 64,
        seed: int = 0,
    ) -> None:
        if output_tokens > turn_tokens:
            raise ConfigError(
                f"--output-tokens {output_tokens} is more than --turn-tokens {turn_tokens}: "
                "a turn's tokens begin with the last answer"
            )
        self.total = conversations * (turns + 1)
        self.in_flight = 0
        self._seed = seed
        self._turns = turns
        self._first = first_prompt_tokens
        self._turn = turn_tokens
        self._output = output_tokens
        self._limit = max_in_flight
        final = first_prompt_tokens + turns * turn_tokens + output_tokens
        blocks = final // shape.block_tokens
        self._block_tokens = shape.block_tokens
        self._hashes = [
            tuple(block_hash(seed, "conversation", number, i) for i in range(blocks))
            for number in range(conversations)
        ]
        self._ready = deque((number, 0) for number in range(conversations))
        self._due: list[Request] = []
        self._admit(0.0)

    def final_tokens(self) -> int:
        """Context of one conversation after its last answer."""
        return self._first + self._turns * self._turn + self._output

    def take(self, now: float) -> list[Request]:
        taken, self._due = self._due, []
        return taken

    def done(self, request: Request, now: float) -> None:
        self.in_flight -= 1
        if request.turn < self._turns:
            self._ready.append((request.conversation, request.turn + 1))
        self._admit(now)

    def _admit(self, now: float) -> None:
        while self._ready and self.in_flight < self._limit:
            number, turn = self._ready.popleft()
            prompt = self._first + turn * self._turn
            self.in_flight += 1
            self._due.append(
                Request(
                    request_id=f"c{number}t{turn}",
                    intended_start=now,
                    prompt_tokens=prompt,
                    output_tokens=self._output,
                    block_hashes=self._hashes[number][
                        : (prompt + self._output) // self._block_tokens
                    ],
                    conversation=number,
                    turn=turn,
                )
            )

    def next_start(self) -> float | None:
        return None

    def tokens(self, request: Request) -> list[int]:
        """A turn's begin with the last turn's; the last answer's place is taken by ids that every
        run has there, whatever was answered."""
        ids = token_ids(self.final_tokens(), self._seed, "conversation", request.conversation)
        return ids[: request.prompt_tokens]


class TraceRow(msgspec.Struct, frozen=True):
    """One line of a trace, as published with Mooncake."""

    timestamp: float
    """Milliseconds since the start."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    """One for each block of 512 tokens, the last one perhaps partial; equal ids mean equal
    prefixes."""


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The first `limit` rows of a JSON-lines trace.

    Raises
    ------
    ConfigError
        With the line's number, if a row is not a request or contradicts itself.
    """
    decoder = msgspec.json.Decoder(TraceRow)
    rows: list[TraceRow] = []
    last = 0.0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(rows) >= limit:
                    break
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    row = decoder.decode(line)
                except msgspec.DecodeError as exc:
                    raise ConfigError(f"{where}: {exc}") from exc
                if row.input_length < 1 or row.output_length < 0:
                    raise ConfigError(
                        f"{where}: input_length must be at least 1 and output_length at least 0, "
                        f"got {row.input_length} and {row.output_length}"
                    )
                wanted = -(-row.input_length // TRACE_BLOCK_TOKENS)
                if len(row.hash_ids) != wanted:
                    raise ConfigError(
                        f"{where}: {row.input_length} tokens are {wanted} blocks of "
                        f"{TRACE_BLOCK_TOKENS}, but there are {len(row.hash_ids)} hash_ids"
                    )
                if row.timestamp < last:
                    raise ConfigError(
                        f"{where}: timestamp {row.timestamp:g} is before the last one, {last:g}"
                    )
                last = row.timestamp
                rows.append(row)
    except OSError as exc:
        raise ConfigError(f"trace {path}: {exc.strerror}") from exc
    if not rows:
        raise ConfigError(f"trace {path} holds no request")
    return rows


class TraceReplay:
    """Open loop: requests start at their time stamps, however long earlier ones take.

    Parameters
    ----------
    rows : sequence of TraceRow
    shape : Shape
        Its block must divide 512 tokens.
    speedup : float
        How many times faster than recorded.
    max_tokens : int
        Requests with a longer context are left out and counted in `skipped`.
    """

    def __init__(
        self,
        rows: Sequence[TraceRow],
        shape: Shape,
        speedup: float,
        max_tokens: int,
        seed: int = 0,
    ) -> None:
        if TRACE_BLOCK_TOKENS % shape.block_tokens:
            raise ConfigError(
                f"--block-tokens {shape.block_tokens} does not divide the trace's blocks of "
                f"{TRACE_BLOCK_TOKENS} tokens"
            )
        self._shape = shape
        self._seed = seed
        fitting = [row for row in rows if row.input_length + row.output_length <= max_tokens]
        self.skipped = len(rows) - len(fitting)
        if not fitting:
            raise ConfigError(
                f"all {len(rows)} requests of the trace are longer than the {max_tokens} tokens "
                "that the accelerator holds; give it more with --accelerator"
            )
        self._rows = fitting
        origin = fitting[0].timestamp
        self._due = deque(
            ((row.timestamp - origin) / 1000 / speedup, number, row)
            for number, row in enumerate(fitting)
        )
        self.total = len(fitting)

    def take(self, now: float) -> list[Request]:
        taken = []
        while self._due and self._due[0][0] <= now:
            start, number, row = self._due.popleft()
            taken.append(self._request(start, number, row))
        return taken

    def _request(self, start: float, number: int, row: TraceRow) -> Request:
        tokens = self._shape.block_tokens
        split = TRACE_BLOCK_TOKENS // tokens
        hashes = []
        for i in range((row.input_length + row.output_length) // tokens):
            if (i + 1) * tokens <= row.input_length:
                hashes.append(block_hash(self._seed, "trace", row.hash_ids[i // split], i % split))
            else:
                # The answer is nobody else's prefix.
                hashes.append(block_hash(self._seed, "answer", number, i))
        return Request(
            request_id=f"r{number}",
            intended_start=start,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            block_hashes=tuple(hashes),
            conversation=number,
        )

    def done(self, request: Request, now: float) -> None:
        return None

    def next_start(self) -> float | None:
        return self._due[0][0] if self._due else None

    def tokens(self, request: Request) -> list[int]:
        ids: list[int] = []
        for block in self._rows[request.conversation].hash_ids:
            ids += token_ids(TRACE_BLOCK_TOKENS, self._seed, "trace", block)
        return ids[: request.prompt_tokens]
