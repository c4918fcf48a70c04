# SPDX-License-Identifier: Apache-2.0
"""A stand-in model server: continuous batching over the stand-in accelerator, in real time.

It calls kvtier's engine as vLLM's scheduler does: answers in at the start of a step, finished
copies committed, stores offered, waiting requests looked up and admitted, messages out at the end
of the scheduling. Then the step's modelled compute passes in real time, while copies and tiers run.
What stands in for the kernels (filling new blocks with their bytes) has to fit into that time; what
does not is reported as the generator's own overhead.

Owns the accelerator's pool, the waiting and running requests, and the copy stream. One thread.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec

from kvtier.bench.accelerator import BlockPool, PagedBuffer
from kvtier.bench.clock import Clock
from kvtier.bench.copies import CopyJob, CopyStream, Piece
from kvtier.bench.costs import CostModel, Decode, Prefill
from kvtier.bench.drivers import EngineLike, Generations, Slots
from kvtier.bench.pattern import Pattern
from kvtier.bench.workload import Request, Source
from kvtier.errors import InternalError, KVTierError
from kvtier.types import Lookup, RequestContext, make_key

_P = ParamSpec("_P")
_T = TypeVar("_T")

IDLE_SECONDS = 0.02
"""Longest pause of a step without work; finished copies and the tiers' answers end it."""


class StuckError(KVTierError):
    """Nothing moved for a long time: a lookup or a copy that never ends."""


class State(enum.Enum):
    WAITING = 0
    LOADING = 1
    RUNNING = 2


class Limits(msgspec.Struct, frozen=True):
    """How a step is made."""

    step_tokens: int = 8192
    """Prompt tokens that one step computes at most."""
    decode_tokens: int = 8
    """Tokens that a request decodes in one step: one step stands for that many of the server's."""
    stuck_seconds: float = 30.0


class Finished(msgspec.Struct, frozen=True):
    """What became of one request. Times are seconds since the start of the run."""

    request_id: str
    turn: int
    intended_start: float
    first_token: float
    end: float
    prompt_tokens: int
    output_tokens: int
    accelerator_tokens: int
    """Of the prompt, found in the accelerator."""
    loaded_tokens: int
    """Loaded through host memory."""
    sources: dict[str, int]
    """Chunks of those by the tier that they came from; "host" if they were there."""
    computed_tokens: int
    deferred_seconds: float
    """Time between the first and the last answer "not yet" of its lookups."""

    @property
    def first_token_seconds(self) -> float:
        """Time to first token, from the intended start."""
        return self.first_token - self.intended_start


class StepTimes(msgspec.Struct):
    """Where the scheduler thread's time went, in seconds."""

    steps: int = 0
    model: float = 0.0
    """Modelled compute."""
    engine: float = 0.0
    """Inside kvtier's calls."""
    scheduling: float = 0.0
    """The generator's own bookkeeping, outside kvtier's calls and the compute."""
    overrun: float = 0.0
    """Compute that took longer than modelled: bytes filled too slowly, late wake-ups."""
    idle: float = 0.0
    """Nothing to compute: waiting for requests, copies or tiers."""
    pending: float = 0.0
    """Time during which at least one request waited for an answer or bytes of a tier."""


class _Live:
    """One request between its start and its end."""

    __slots__ = (
        "accelerator_tokens", "blocks", "computed", "copies", "ctx", "deferred_at",
        "deferred_until", "first_token", "generated", "keys", "loaded_tokens", "offered",
        "over", "request", "sources", "state",
    )  # fmt: skip

    def __init__(self, request: Request, keys: list[bytes], ctx: RequestContext) -> None:
        self.request = request
        self.keys = keys
        """One for each full chunk of the prompt."""
        self.ctx = ctx
        self.state = State.WAITING
        self.blocks: list[int] = []
        self.computed = 0
        """Tokens whose KV is in the accelerator."""
        self.accelerator_tokens = 0
        self.loaded_tokens = 0
        self.sources: dict[str, int] = {}
        """Loaded chunks by the tier that they came from."""
        self.generated = 0
        self.offered = 0
        """Chunks already offered to kvtier."""
        self.copies = 0
        """Stores in flight."""
        self.first_token: float | None = None
        self.deferred_at: float | None = None
        self.deferred_until = 0.0
        self.over = False
        """The answer is complete; only stores may still be in flight."""


class _Load(msgspec.Struct):
    live: _Live
    slots: Slots
    generations: Generations
    end_tokens: int


class _Store(msgspec.Struct):
    live: _Live
    keys: list[bytes]
    blocks: list[int]


class StandIn:
    """The model server.

    Parameters
    ----------
    buffer : PagedBuffer
    pattern : Pattern
    costs : CostModel
    limits : Limits
    source : Source
    clock : Clock
    engine : EngineLike, optional
        kvtier; without one the accelerator's prefix cache is all there is.
    stream : CopyStream, optional
        Goes with `engine`; already open, closed by its owner after ``run``.
    on_step : callable, optional
        Called after each step with this object and the seconds since the start.
    """

    def __init__(
        self,
        buffer: PagedBuffer,
        pattern: Pattern,
        costs: CostModel,
        limits: Limits,
        source: Source,
        clock: Clock,
        engine: EngineLike | None = None,
        stream: CopyStream | None = None,
        on_step: Callable[[StandIn, float], None] | None = None,
    ) -> None:
        if (engine is None) != (stream is None):
            raise InternalError("engine and copy stream go together")
        self._buffer = buffer
        self._shape = buffer.shape
        self._pattern = pattern
        self._costs = costs
        self._limits = limits
        self._source = source
        self._clock = clock
        self._engine = engine
        self._stream = stream
        self._on_step = on_step
        self._start = 0.0
        self._waiting: deque[_Live] = deque()
        self._pending_since: float | None = None
        self._loading = 0
        self._running: list[_Live] = []
        self._offers: list[_Live] = []
        """Requests with chunks that became complete in the last step."""
        self.pool = BlockPool(buffer.num_blocks)
        self.finished: list[Finished] = []
        self.times = StepTimes()
        self.chunks_offered = 0
        self.chunks_accepted = 0
        """Chunks that kvtier did not have and took; the others were there, or found no slot."""
        self.stopped = False

    def stop(self) -> None:
        """End after this step; what was measured stays. May be called from a signal handler."""
        self.stopped = True

    @property
    def wall_seconds(self) -> float:
        """Seconds since the start."""
        return self._clock.now() - self._start

    def run(self) -> None:
        """Serve all requests of the source, or until `stop`.

        Raises
        ------
        StuckError
            If nothing moved for ``limits.stuck_seconds``.
        """
        self._start = self._clock.now()
        if self._engine is not None and self._stream is not None:
            self._engine.on_message(self._stream.wake)
        moved = 0.0
        while not self.stopped and len(self.finished) < self._source.total:
            now = self.wall_seconds
            progress = self._step()
            if progress:
                moved = self.wall_seconds
            elif self.wall_seconds - moved > self._limits.stuck_seconds:
                due = self._source.next_start()
                if due is None or due < now:
                    raise StuckError(self._describe(self._limits.stuck_seconds))
            if self._on_step is not None:
                self._on_step(self, self.wall_seconds)
        self._drain()

    def _describe(self, seconds: float) -> str:
        return (
            f"nothing moved for {seconds:g} seconds: {len(self._waiting)} requests waiting, "
            f"{self._loading} loading, {len(self._running)} running, "
            f"{len(self.finished)} of {self._source.total} finished"
        )

    def _step(self) -> bool:
        """One scheduler step; False if it did nothing."""
        begin = self._clock.now()
        if self._pending_since is not None:
            self.times.pending += begin - self._pending_since
            self._pending_since = None
        engine_before = self.times.engine
        if self._engine is not None:
            self._call(self._engine.poll)
        progress = self._collect()
        self._offer_stores()
        progress |= self._accept(begin - self._start)
        prefills, decodes = self._schedule()
        if self._engine is not None:
            self._call(self._engine.end_step)
        scheduled = self._clock.now()
        self.times.steps += 1
        engine = self.times.engine - engine_before
        self.times.scheduling += scheduled - begin - engine
        if not prefills and not decodes:
            self._idle(scheduled)
            return progress
        cost = self._costs.step_seconds(
            [Prefill(tokens, live.computed) for live, tokens in prefills],
            [Decode(tokens, live.computed) for live, tokens in decodes],
        )
        for live, tokens in (*prefills, *decodes):
            self._fill(live, tokens)
        self._clock.sleep_until(scheduled + cost)
        self.times.model += cost
        computed = self._clock.now()
        self.times.overrun += max(0.0, computed - scheduled - cost)
        self._update(prefills, decodes)
        self.times.scheduling += self._clock.now() - computed
        return True

    def _idle(self, since: float) -> None:
        due = self._source.next_start()
        limit = IDLE_SECONDS
        if due is not None:
            limit = min(limit, max(0.0, self._start + due - since))
        if self._stream is not None:
            self._stream.wait(limit)
        else:
            self._clock.sleep_until(since + limit)
        self.times.idle += self._clock.now() - since

    def _call(self, function: Callable[_P, _T], *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        """One of kvtier's calls, on its account."""
        begin = self._clock.now()
        try:
            return function(*arguments, **keywords)
        finally:
            self.times.engine += self._clock.now() - begin

    def _collect(self) -> bool:
        """Finished copies: loaded requests can run, stored chunks are committed."""
        if self._stream is None or self._engine is None:
            return False
        jobs = self._stream.collect()
        for job in jobs:
            if job.error is not None:
                raise job.error
            if isinstance(job.owner, _Load):
                self._loaded(job.owner)
            else:
                store: _Store = job.owner
                live = store.live
                self._call(self._engine.commit, store.keys, live.ctx)
                self.pool.release(store.blocks)
                live.copies -= 1
                self._retire(live)
        return bool(jobs)

    def _loaded(self, load: _Load) -> None:
        assert self._engine is not None
        live = load.live
        self._call(self._engine.unpin, load.slots, load.generations, live.ctx)
        tokens = self._shape.block_tokens
        for i in range(live.computed // tokens, load.end_tokens // tokens):
            self.pool.register(live.blocks[i], live.request.block_hashes[i])
        live.loaded_tokens = load.end_tokens - live.computed
        live.computed = load.end_tokens
        live.state = State.RUNNING
        self._loading -= 1
        self._running.append(live)

    def _offer_stores(self) -> None:
        """Chunks completed by the last step go to host memory."""
        if self._engine is None or self._stream is None:
            return
        for live in self._offers:
            complete = min(live.computed, live.request.prompt_tokens) // self._shape.chunk_tokens
            keys = live.keys[live.offered : complete]
            if not keys:
                continue
            reservation = self._call(self._engine.reserve, keys, live.ctx)
            positions = {key: i for i, key in enumerate(keys, live.offered)}
            live.offered = complete
            present = len(set(reservation.keys))
            self.chunks_offered += len(keys)
            self.chunks_accepted += present
            if not present:
                continue
            pieces = []
            blocks = []
            per_chunk = self._shape.blocks_per_chunk
            for key, slot in zip(reservation.keys, reservation.slots.tolist(), strict=True):
                for index in range(per_chunk):
                    number = positions[key] * per_chunk + index
                    block_hash = live.request.block_hashes[number]
                    blocks.append(live.blocks[number])
                    pieces.append(Piece(live.blocks[number], slot, index, block_hash))
            self.pool.acquire(blocks)
            live.copies += 1
            owner = _Store(live, list(reservation.keys), blocks)
            self._stream.submit(CopyJob(False, live.request.request_id, pieces, owner))
        for live in self._offers:
            if live.over:
                self.pool.release(list(reversed(live.blocks)))
                live.blocks = []
                self._retire(live)
        self._offers = []

    def _retire(self, live: _Live) -> None:
        """The last thing kvtier hears of a request, when nothing of it is in flight."""
        if live.over and not live.copies and not live.blocks and self._engine is not None:
            self._call(self._engine.finish_request, live.ctx)

    def _accept(self, now: float) -> bool:
        requests = self._source.take(now)
        for request in requests:
            per_chunk = self._shape.blocks_per_chunk
            chunks = request.prompt_tokens // self._shape.chunk_tokens
            keys = [make_key(request.block_hashes[(i + 1) * per_chunk - 1]) for i in range(chunks)]
            positions = {key: (i + 1) * self._shape.chunk_tokens for i, key in enumerate(keys)}
            live = _Live(request, keys, RequestContext(request.request_id, positions=positions))
            if self._engine is not None:
                self._call(self._engine.on_new_request, live.ctx)
            self._waiting.append(live)
        return bool(requests)

    def _schedule(self) -> tuple[list[tuple[_Live, int]], list[tuple[_Live, int]]]:
        """Which tokens this step computes: (prompt tokens, answer tokens) by request."""
        self._admit()
        budget = self._limits.step_tokens
        prefills = []
        decodes = []
        for live in self._running:
            left = live.request.prompt_tokens - live.computed
            if left <= 0:
                todo = live.request.output_tokens - live.generated
                decodes.append((live, min(todo, self._limits.decode_tokens)))
            elif budget:
                tokens = min(left, budget)
                budget -= tokens
                prefills.append((live, tokens))
        return prefills, decodes

    def _admit(self) -> None:
        """Waiting requests, first come first served; those whose chunks are on their way are
        passed over until a later step."""
        deferred = []
        while self._waiting:
            live = self._waiting.popleft()
            outcome = self._try_admit(live)
            if outcome is None:
                self._waiting.appendleft(live)
                break
            if not outcome:
                deferred.append(live)
        self._waiting.extendleft(reversed(deferred))
        if deferred:
            self._pending_since = self._clock.now()

    def _try_admit(self, live: _Live) -> bool | None:
        """True: admitted. False: not yet, its chunks are on their way. None: no room."""
        shape, request = self._shape, live.request
        # At least one token has to be computed, so that there is something to sample from.
        usable = (request.prompt_tokens - 1) // shape.block_tokens
        cached = self.pool.match(request.block_hashes[:usable])
        hit_tokens = len(cached) * shape.block_tokens
        first_chunk = hit_tokens // shape.chunk_tokens
        last_chunk = (request.prompt_tokens - 1) // shape.chunk_tokens
        ready = 0
        if self._engine is not None and last_chunk > first_chunk:
            wanted = live.keys[first_chunk:last_chunk]
            ready, state = self._call(self._engine.lookup_batch, wanted, live.ctx)
            if state in (Lookup.HIT_PENDING, Lookup.RETRY):
                now = self.wall_seconds
                live.deferred_at = now if live.deferred_at is None else live.deferred_at
                live.deferred_until = now
                return False
        total = -(-(request.prompt_tokens + request.output_tokens) // shape.block_tokens)
        fresh = self.pool.take(cached, total - len(cached))
        if fresh is None:
            return None
        live.blocks = cached + fresh
        live.computed = live.accelerator_tokens = hit_tokens
        if not ready:
            live.state = State.RUNNING
            self._running.append(live)
            return True
        self._load(live, first_chunk, first_chunk + ready)
        return True

    def _load(self, live: _Live, first_chunk: int, end_chunk: int) -> None:
        assert self._engine is not None
        assert self._stream is not None
        keys = live.keys[first_chunk:end_chunk]
        for key in keys:
            source = self._engine.source(key, live.ctx)
            live.sources[source] = live.sources.get(source, 0) + 1
        slots, generations = self._call(self._engine.pin, keys, live.ctx)
        per_chunk = self._shape.blocks_per_chunk
        pieces = []
        for chunk, slot in zip(range(first_chunk, end_chunk), slots.tolist(), strict=True):
            for index in range(per_chunk):
                number = chunk * per_chunk + index
                if number * self._shape.block_tokens < live.computed:
                    continue
                block_hash = live.request.block_hashes[number]
                pieces.append(Piece(live.blocks[number], slot, index, block_hash))
        live.state = State.LOADING
        self._loading += 1
        owner = _Load(live, slots, generations, end_chunk * self._shape.chunk_tokens)
        self._stream.submit(CopyJob(True, live.request.request_id, pieces, owner))

    def _fill(self, live: _Live, tokens: int) -> None:
        """What the kernels would have done: blocks that become full get their bytes."""
        size = self._shape.block_tokens
        for i in range(live.computed // size, (live.computed + tokens) // size):
            block_hash = live.request.block_hashes[i]
            self._pattern.fill(self._buffer.block(live.blocks[i]), block_hash)
            self.pool.register(live.blocks[i], block_hash)

    def _update(self, prefills: list[tuple[_Live, int]], decodes: list[tuple[_Live, int]]) -> None:
        now = self.wall_seconds
        for live, tokens in prefills:
            live.computed += tokens
            if live.computed == live.request.prompt_tokens:
                live.first_token = now
                live.generated = min(1, live.request.output_tokens)
            self._offers.append(live)
        for live, tokens in decodes:
            live.computed += tokens
            live.generated += tokens
        for live, _tokens in (*prefills, *decodes):
            if live.first_token is not None and live.generated >= live.request.output_tokens:
                self._finish(live, now)

    def _finish(self, live: _Live, now: float) -> None:
        request = live.request
        live.over = True
        self._running.remove(live)
        if self._engine is None:
            self.pool.release(list(reversed(live.blocks)))
            live.blocks = []
        elif live not in self._offers:
            self._offers.append(live)
        assert live.first_token is not None
        deferred = 0.0 if live.deferred_at is None else live.deferred_until - live.deferred_at
        self.finished.append(
            Finished(
                request_id=request.request_id,
                turn=request.turn,
                intended_start=request.intended_start,
                first_token=live.first_token,
                end=now,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                accelerator_tokens=live.accelerator_tokens,
                loaded_tokens=live.loaded_tokens,
                sources=live.sources,
                computed_tokens=request.prompt_tokens
                - live.accelerator_tokens
                - live.loaded_tokens,
                deferred_seconds=deferred,
            )
        )
        self._source.done(request, now)

    def _drain(self) -> None:
        """Nothing of this run stays in flight: every job comes back, every pin is given back."""
        if self._engine is None or self._stream is None:
            return
        self._call(self._engine.poll)
        deadline = self._clock.now() + self._limits.stuck_seconds
        self._offer_stores()
        while self._stream.outstanding:
            if not self._stream.wait(0.1) and self._clock.now() > deadline:
                raise StuckError("copies did not end")
            self._collect()
        for live in (*self._waiting, *self._running):
            self._call(self._engine.finish_request, live.ctx)
        self._call(self._engine.end_step)
