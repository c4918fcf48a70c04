# SPDX-License-Identifier: Apache-2.0
"""The model's world with workers in processes of their own: they make the region, copy, and die.

What the scheduler knows of a copy is the ranks' lines in the region, as in vLLM's manager. A worker
that is killed ends no copy any more; a while later the model server ends and starts again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvtier._core.slots import WRITING
from kvtier.engine.engine import Engine
from kvtier.host.region import Region
from kvtier.types import GroupGeometry, key_group
from tests.driven import Child
from tests.engine.process_world import ProcessWorld
from tests.engine.rig import CHUNK, Rig, prepare
from tests.engine.worker import RANKS, groups_of
from tests.engine.world import AUDIT_EVERY, Read, SizedWorld, World, Write

CHECKS_WITHOUT = 60
"""So long the model server goes on after the death of a worker."""


class Remote:
    """A worker, from here."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.child = Child("tests.engine.worker", str(rank))
        self._owed = 1  # answers, the first of them that it is there

    def tell(self, do: str, **arguments: Any) -> None:
        """Without waiting; a dead one hears nothing."""
        with contextlib.suppress(BrokenPipeError):
            self.child.send(do, **arguments)
            self._owed += 1

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer. ``ChildEnded`` from a dead one."""
        self.tell(do, **arguments)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """To what it was told last."""
        answer: dict[str, Any] = {}
        while self._owed:
            answer = self.child.receive()
            self._owed -= 1
            assert "error" not in answer, answer
        return answer


class Workers(World):
    """Copies run in other processes, one for each rank."""

    def __init__(self, *arguments: Any, **config: Any) -> None:
        self.workers: dict[int, Remote] = {}
        self.deaths = 0
        self.given_up = 0
        """Chunks that a dead worker had not written to their end."""
        self.failed_chunks = 0
        self.worker_audits = 0
        super().__init__(*arguments, **config)

    def make_groups(self) -> Sequence[GroupGeometry]:
        return groups_of([size * CHUNK for size in self.sizes])

    @contextlib.contextmanager
    def make_rig(self) -> Iterator[Rig]:
        self._next = 0
        """Number of the next transfer."""
        self._failed: set[int] = set()
        self.dead: Remote | None = None
        self._checks_left = CHECKS_WITHOUT
        config, geometry = prepare(**self._settings)
        name = f"model-{os.getpid()}-{os.urandom(8).hex()}"
        for rank in range(RANKS):
            if rank not in self.workers:
                self.workers[rank] = Remote(rank)
        for worker in self.workers.values():
            worker.tell(
                "join",
                name=name,
                chunk_bytes=[size * CHUNK for size in self.sizes],
                capacity_bytes=geometry.num_slots * geometry.slot_bytes,
            )
        starts = {rank: worker.answer() for rank, worker in self.workers.items()}
        held = ("fds", "threads", "mappings")
        self.at_start = {rank: {name: one[name] for name in held} for rank, one in starts.items()}
        region = Region.attach(name)
        engine = Engine(config, region, own_region=True)
        try:
            engine.open()
            yield Rig(engine, region)
            engine.check()
        finally:
            engine.close()
            for rank, worker in self.workers.items():
                left, before = worker.ask("leave"), starts[rank]["before"]
                assert left == before, f"rank {rank} keeps {left}, at first {before}"
        assert not os.path.exists(region.path)

    # What a scheduler does.

    def reserve(self, number: int, length: int) -> None:
        before = len(self.writes)
        super().reserve(number, length)
        for write in self.writes[before:]:
            write.first = self._number(len(write.keys))
            write.chunks = self._chunks(write)
            for worker in self.workers.values():
                worker.tell("begin", number=write.first, chunks=write.chunks, epoch=write.epoch)

    def _number(self, count: int) -> int:
        first, self._next = self._next, self._next + count
        return first

    def _chunks(self, one: Write | Read) -> list[tuple[str, int, int]]:
        """Group by group, as the numbers of their transfers go."""
        found = zip(one.keys, one.slots.tolist(), one.generations.tolist(), strict=True)
        return [
            (name.hex(), slot, generation)
            for name, slot, generation in sorted(found, key=lambda chunk: key_group(chunk[0]))
        ]

    def _end_oldest(self, good: bool) -> bool:
        # In order: a number is finished when all before it are.
        for write in sorted([*self.orphans, *self.writes], key=lambda write: write.first):
            if not write.told:
                write.told, write.good = True, good
                for worker in self.workers.values():
                    worker.tell("end", number=write.first, good=good)
                return True
        return False

    def end_write(self, good: bool) -> None:
        self._end_oldest(good)
        self.collect()

    def end_orphan(self) -> None:
        """Its end comes in its turn."""
        self.collect()

    def collect(self) -> None:
        """What all ranks have finished is committed, aborted or given back."""
        region = self.one.region
        done = region.finished_by_all()
        for rank in range(RANKS):
            self._failed.update(region.failures(rank))
        for write in [one for one in self.writes if one.last <= done]:
            self.writes.remove(write)
            self._end(write)
        for write in [one for one in self.orphans if one.last <= done]:
            self.orphans.remove(write)
            assert self.engine.release(write.slots, write.generations) == len(write.keys)
            assert self.engine.release(write.slots, write.generations) == 0
            self.engine.finish_request(write.context)

    def _end(self, write: Write) -> None:
        assert write.told, "published by all, though nobody was told to end it"
        names = [bytes.fromhex(name) for name, _, _ in write.chunks]
        failed = [name for i, name in enumerate(names) if write.first + i in self._failed]
        first_group = key_group(names[0])
        assert failed == [n for n in names if not write.good and key_group(n) == first_group]
        self.failed_chunks += len(failed)
        good = [name for name in write.keys if name not in failed]
        assert self.engine.abort(failed, write.context) == len(failed)
        assert self.engine.commit(good, write.context) == good
        assert self.engine.commit(write.keys, write.context) == []
        self.engine.finish_request(write.context)

    def compare(self, read: Read) -> None:
        chunks, number = self._chunks(read), self._number(1)
        for worker in self.workers.values():
            worker.tell("load", number=number, chunks=chunks, epoch=read.epoch)
        for worker in self.workers.values():
            different = worker.answer()["different"]
            assert not different, f"wrong bytes for {different} on rank {worker.rank}"

    # What goes wrong.

    def kill_worker(self, rank: int) -> None:
        """Whatever it is doing. The others, the owner and the service go on."""
        if self.dead is not None:
            return
        self.dead = worker = self.workers.pop(rank)
        assert worker.child.kill() == -signal.SIGKILL
        worker.child.end()
        self.deaths += 1
        assert self.one.region.unsigned() == [rank]

    def _give_up(self) -> None:
        """The model server ends without a worker: what is not finished never will be."""
        while self._end_oldest(good=True):
            pass
        for worker in self.workers.values():
            worker.ask("report")  # it has ended its parts, and writes no more
        self.collect()
        for write in self.writes:
            self.given_up += len(write.keys)
            assert self.engine.abort(write.keys, write.context) == len(write.keys)
            assert not any(self.engine._index.lookup(name) for name in write.keys)
            self.engine.finish_request(write.context)
        for write in self.orphans:
            assert self.engine.release(write.slots, write.generations) == len(write.keys)
            self.engine.finish_request(write.context)
        self.writes, self.orphans = [], []

    # What must be true.

    def check(self) -> None:
        super().check()
        index = self.engine._index
        for write in self.writes:
            # Until its last rank has published, no chunk is READY, whoever has died.
            assert {index.lookup(name) for name in write.keys} == {WRITING}

    def watch(self) -> None:
        super().watch()
        if self._checks % AUDIT_EVERY == 0:
            self.audit_workers()
        if self.dead is not None:
            self._checks_left -= 1
            if not self._checks_left:
                self.reopen()

    def audit_workers(self) -> None:
        """Compare what each of them says it holds and sees with what is known here."""
        totals = self.engine.cache.slots.totals()
        untold = [write.first for write in (*self.orphans, *self.writes) if not write.told]
        expected = {
            "wrong": [],
            "jobs": 0,
            "begun": sorted(untold),
            # What nobody but the owner changes, as each of them sees it.
            "seen": {name: totals[name] for name in ("owner_pins", "writing")},
        }
        for rank, worker in self.workers.items():
            got = worker.ask("report")
            for name, what in {**self.at_start[rank], **expected}.items():
                assert got[name] == what, f"{name} of rank {rank}: {got[name]}, should be {what}"
            self.worker_audits += 1

    def end_all(self) -> None:
        if self.dead is not None:
            self._give_up()
        ends = time.monotonic() + 10.0
        while self.writes or self.orphans:
            assert time.monotonic() < ends, "copies do not end"
            self.end_write(good=True)
            self.step()
        super().end_all()
        self.audit_workers()

    def close(self) -> None:
        try:
            super().close()
        finally:
            for worker in self.workers.values():
                worker.child.end()
        assert {worker.child.process.returncode for worker in self.workers.values()} == {0}


class SizedWorkers(Workers, SizedWorld):
    """Beside a service in a thread, with chunks of three sizes."""


class ProcessWorkers(Workers, ProcessWorld):
    """Beside a service in a process."""
