# SPDX-License-Identifier: Apache-2.0
"""The shared host memory: header, slot records, key table and slots in one file on tmpfs.

A ``Region`` is one handle; it owns a share of this process's mapping of the file and, in the
creator, the thread that reserves memory. Any thread, except that one rank's transfers are published
by one process. Invariants: whoever maps the file holds a shared lock on it; a slot is handed out
only with memory behind it; a forked child's handle refuses use.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping

from kvtier._core.words import Words
from kvtier.errors import ClosedError, ConfigError, InternalError
from kvtier.host import files, header, numa, space
from kvtier.host.mapping import MAPPED_FILES, MappedFile
from kvtier.host.opening import POLL_SECONDS, build, join, pause, sweep_or_refuse
from kvtier.host.populate import Populator
from kvtier.types import Geometry

__all__ = ["MAX_PENDING", "Region", "sweep"]

sweep = files.sweep

TAKEOVER_SECONDS = 5.0
"""Time for the last processes of an earlier start to end and free their memory."""

MAX_PENDING = 65536
"""Transfers that may be finished out of order before one is missing for good."""


class Region:
    """A handle on a shared region. Made by ``create``, ``attach`` or ``from_fd``.

    Attributes
    ----------
    name, path : str
    geometry : Geometry
    namespace : dict of str to str
    namespace_digest : bytes
    ranks : int
    is_creator : bool
        Whether this handle made the file; only it may populate.
    """

    def __init__(self, mapped: MappedFile, *, is_creator: bool, step_bytes: int) -> None:
        meta = mapped.meta
        self.name = meta.name
        self.path = mapped.path
        self.geometry: Geometry = meta.geometry
        self.namespace: dict[str, str] = meta.namespace
        self.namespace_digest: bytes = meta.digest
        self.ranks = meta.ranks
        self.is_creator = is_creator
        self._step_bytes = step_bytes
        self._mapped: MappedFile | None = mapped
        self._pid = mapped.pid
        self._known_slots = 0
        self._readers = [header.FailureReader() for _ in range(meta.ranks)]
        # At interpreter exit too, so that a normal end leaves no file.
        self._finalizer = weakref.finalize(self, MAPPED_FILES.release, mapped)

    @classmethod
    def create(
        cls,
        name: str,
        geometry: Geometry,
        namespace: Mapping[str, str],
        ranks: int,
        *,
        directory: str = "/dev/shm",
        timeout_seconds: float = 30.0,
        step_bytes: int = space.STEP_BYTES,
        system: space.SystemFiles = space.SystemFiles(),  # noqa: B008 (frozen)
    ) -> Region:
        """Make the region, or join it when another rank has made it.

        Leftovers of dead processes in `directory` are removed first. A region of an earlier start
        that has died while other processes (its tier service) still hold it gets some seconds to
        go, then loses its name to this one; they keep their memory until they close it.

        Parameters
        ----------
        name : str
            1 to 255 bytes, the same for all ranks and different for each instance.
        geometry : Geometry
        namespace : mapping of str to str
        ranks : int
            How many are going to sign.
        directory : str
            On tmpfs.
        timeout_seconds : float
            Longest wait for another creator, or for an earlier start to end.
        step_bytes : int
            Memory reserved at once; the first step before this returns.
        system : SystemFiles
            Where the limits of memory are read.

        Raises
        ------
        ConfigError
            If the region does not fit (wanted, free or limit, and where that stands), differs from
            the one that is there (the field with both values), or is not ready in time.
        """
        meta = header.make_meta(name, ranks, geometry, namespace)
        path = files.region_path(directory, name)
        deadline = time.monotonic() + timeout_seconds
        takeover_at = time.monotonic() + min(TAKEOVER_SECONDS, timeout_seconds / 2)
        sweep_or_refuse(directory)
        why = "it was removed again and again"
        while True:
            fd = files.open_existing(path)
            if fd is None:
                mapped = build(meta, directory, path, step_bytes, system)
            else:
                mapped, why = join(fd, path, deadline, takeover_at=takeover_at)
            if mapped is not None:
                break
            pause(deadline, f"cannot join the region {path} after {timeout_seconds} s: {why}")
        region = cls(mapped, is_creator=fd is None, step_bytes=step_bytes)
        difference = header.first_difference(meta, mapped.meta)
        if difference is not None:
            region.close()
            raise ConfigError(f"the region {path} differs from what this rank has: {difference}")
        return region

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        directory: str = "/dev/shm",
        timeout_seconds: float = 30.0,
        signed: bool = True,
    ) -> Region:
        """Open a region that others make, once it is ready.

        Parameters
        ----------
        name, directory : str
            As given to ``create``.
        timeout_seconds : float
        signed : bool
            Also wait until every rank has signed.

        Raises
        ------
        ConfigError
            If that does not happen in time; the message says what is missing.
        """
        path = files.region_path(directory, name)
        deadline = time.monotonic() + timeout_seconds
        while True:
            fd = files.open_existing(path)
            why = "no rank has made it (a rank on another host cannot share its memory)"
            if fd is not None:
                mapped, why = join(fd, path, deadline)
                if mapped is not None:
                    region = cls(mapped, is_creator=False, step_bytes=space.STEP_BYTES)
                    missing = region._await_signatures(deadline) if signed else []
                    if not missing:
                        return region
                    region.close()
                    why = (
                        f"ranks {', '.join(map(str, missing))} of {region.ranks} have not signed "
                        "(they are still starting, have failed, or run on another host)"
                    )
            pause(deadline, f"cannot attach to the region {path} after {timeout_seconds} s: {why}")

    def _await_signatures(self, deadline: float) -> list[int]:
        """Ranks without a signature at the deadline, or when the region came to an end."""
        mapped = self._use()
        while (missing := self.unsigned()) and time.monotonic() < deadline:
            if not mapped.creator_lives() or not files.is_linked(mapped.fd):
                break
            time.sleep(POLL_SECONDS)
        return missing

    @classmethod
    def from_fd(cls, fd: int) -> Region:
        """Open the region behind a descriptor that this process inherited.

        Takes a descriptor and a shared lock of its own; `fd` stays the caller's, to be closed.
        Works when the file has lost its name.
        """
        link = f"/proc/self/fd/{fd}"
        own = os.open(link, os.O_RDWR | os.O_CLOEXEC)
        try:
            name = header.read_meta(own, link)[0].name
        except BaseException:
            os.close(own)
            raise
        # Only the folder of the link can be trusted: a file made without a name keeps its first
        # one ("#123 (deleted)") in /proc.
        path = files.region_path(os.path.dirname(os.readlink(link)), name)
        mapped, why = join(own, path, time.monotonic(), named=False)
        if mapped is None:
            raise ConfigError(f"descriptor {fd} is no region that can be used: {why}")
        return cls(mapped, is_creator=False, step_bytes=space.STEP_BYTES)

    def fileno(self) -> int:
        """Descriptor of the file, for ``pass_fds`` and ``from_fd``; it stays this region's."""
        return self._use().fd

    @property
    def records(self) -> memoryview:
        """Slot records, writable, 64 bytes a slot, aligned to a page."""
        mapped = self._use()
        return mapped.view(mapped.layout.records, mapped.layout.records_bytes)

    @property
    def table(self) -> memoryview:
        """Key table, writable, aligned to a page."""
        mapped = self._use()
        return mapped.view(mapped.layout.table, mapped.layout.table_bytes)

    @property
    def payload(self) -> memoryview:
        """All slots, writable. Above ``available_slots`` there may be no memory: do not touch."""
        mapped = self._use()
        return mapped.view(mapped.layout.payload, mapped.layout.payload_bytes)

    @property
    def base_address(self) -> int:
        """Address of slot 0 in this process, aligned to a page."""
        mapped = self._use()
        return mapped.address + mapped.layout.payload

    def slot_view(self, slot: int, length: int) -> memoryview:
        """Writable view of the first `length` bytes from `slot` on.

        Raises
        ------
        IndexError
            If the slot has no memory yet, or the length goes beyond its slab.
        """
        mapped = self._use()
        self._check_slot(slot)
        geometry = self.geometry
        size = (geometry.slab_slots - slot % geometry.slab_slots) * geometry.slot_bytes
        if not 0 <= length <= size:
            raise IndexError(f"length {length} where a chunk has at most {size} bytes")
        return mapped.view(mapped.layout.payload + slot * geometry.slot_bytes, length)

    def slot_address(self, slot: int) -> int:
        """Address of `slot` in this process. IndexError as for ``slot_view``."""
        self._check_slot(slot)
        return self.base_address + slot * self.geometry.slot_bytes

    def area(self, group: int) -> tuple[int, int, int, int]:
        """Where chunks of `group` may lie in this process (``Geometry.area``)."""
        return self.geometry.area(group, self.base_address)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self._known_slots:
            self._known_slots = self.available_slots
            if not 0 <= slot < self._known_slots:
                raise IndexError(
                    f"slot {slot}: {self._known_slots} of {self.geometry.num_slots} have memory"
                )

    @property
    def available_slots(self) -> int:
        """Slots whose memory is reserved, in whole slabs, in all processes."""
        return self._words().load(header.AVAILABLE_WORD)

    @property
    def service_frames(self) -> int:
        """Frames that the tier service has begun to send since its start."""
        return self._words().load(header.FRAMES_WORD)

    @service_frames.setter
    def service_frames(self, count: int) -> None:
        self._words().store(header.FRAMES_WORD, count)

    def populate(self, on_available: Callable[[int], None]) -> None:
        """Reserve the rest of the memory in a thread, step by step. Creator only, once.

        Parameters
        ----------
        on_available : callable
            Called on that thread after each step with the slots available in total; never if the
            first step, which ``create`` took, was all.
        """
        mapped = self._use()
        if not self.is_creator:
            raise ConfigError(f"only the rank that made {self.path} populates it")
        if mapped.populator is not None:
            raise ConfigError(f"{self.path} is being populated already")
        words = self._words()
        geometry = self.geometry
        layout = mapped.layout

        def reserved(size: int) -> None:
            words.store(header.AVAILABLE_WORD, geometry.slots_in(size))
            on_available(geometry.slots_in(size))

        mapped.populator = Populator(
            mapped.fd,
            layout.payload,
            min(self._step_bytes, layout.payload_bytes),
            layout.payload_bytes,
            self._step_bytes,
            numa.nodes_for(self.ranks),
            reserved,
            self.path,
        )
        mapped.populator.start()

    def sign(self, rank: int) -> None:
        """Say that `rank` has checked the region and is ready. Again through this process: no-op.

        Raises
        ------
        ConfigError
            If another process has signed for that rank.
        """
        mapped = self._use()
        line = self._line(rank)
        with mapped.lock:
            if rank in mapped.signed:
                return
            signer = line.signed_by()
            # The lock tells that the signer lives, across pid namespaces too.
            if signer is not None or not files.lock_byte(mapped.fd, rank):
                raise ConfigError(
                    f"rank {rank} of the region {self.path} has been signed for by process "
                    f"{signer}: each rank needs a number, and each instance a name, of its own"
                )
            line.sign(os.getpid())
            mapped.signed.add(rank)

    def unsigned(self) -> list[int]:
        """Ranks that have not signed, or have died since."""
        mapped = self._use()
        return [rank for rank in range(self.ranks) if not mapped.signer_lives(rank)]

    def publish(self, rank: int, transfer: int) -> None:
        """Transfer `transfer` of `rank` has finished; numbers start at 0, order does not matter.

        What this thread saw written before is visible to whoever sees the transfer finished.

        Raises
        ------
        InternalError
            If it was published before, or far ahead of one that is missing.
        """
        self._finish(rank, transfer, failed=False)

    def fail(self, rank: int, transfer: int) -> None:
        """Transfer `transfer` has finished without its bytes being right; else as ``publish``."""
        self._finish(rank, transfer, failed=True)

    def _finish(self, rank: int, transfer: int, *, failed: bool) -> None:
        mapped = self._use()
        line = self._line(rank)
        with mapped.lock:
            if rank not in mapped.signed:
                raise ConfigError(f"rank {rank} publishes without having signed {self.path}")
            pending = mapped.pending.setdefault(rank, {})
            following = line.finished() + 1
            if transfer < following or transfer in pending:
                raise InternalError(f"rank {rank} published transfer {transfer} twice")
            if transfer > following and len(pending) >= MAX_PENDING:
                raise InternalError(
                    f"rank {rank}: {MAX_PENDING} transfers wait for transfer {following}"
                )
            pending[transfer] = failed
            while following in pending:
                line.advance(following, pending.pop(following))
                following += 1

    def finished(self, rank: int) -> int:
        """Highest transfer of `rank` up to which all have finished; -1 for none."""
        return self._line(rank).finished()

    def finished_by_all(self) -> int:
        """Highest transfer up to which all have finished on every rank; -1 for none."""
        return min(line.finished() for line in self._use().lines)

    def failures(self, rank: int) -> list[int]:
        """Failed transfers of `rank`, rising, each told once to this handle.

        Ask after ``finished``: every failure up to what that said is then among the answers so
        far. When more than 119 have come since the last call, those that can no longer be named
        stand for their whole interval: good transfers may be among them, no failed one is left out.
        """
        return self._line(rank).failures(self._readers[rank])

    @property
    def failure_overflows(self) -> int:
        """Calls of ``failures`` that had to answer with an interval."""
        return sum(reader.overflows for reader in self._readers)

    def _line(self, rank: int) -> header.RankLine:
        lines = self._use().lines
        if not 0 <= rank < len(lines):
            raise ConfigError(f"rank {rank} of a region for {len(lines)} ranks")
        return lines[rank]

    def close(self) -> None:
        """Give the share of the mapping up. Idempotent.

        Waits for the step of population in progress. The file goes with its last holder. Views that
        are still in use keep the memory (not the file) until they go. In a forked child: nothing.
        """
        if self._pid != os.getpid():
            self._finalizer.detach()
            return
        mapped, self._mapped = self._mapped, None
        if mapped is not None and self.is_creator and mapped.populator is not None:
            mapped.populator.stop()
        self._finalizer()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _use(self) -> MappedFile:
        mapped = self._mapped
        if mapped is None:
            raise ClosedError(f"the region {self.path} is closed")
        if mapped.forked:
            raise ClosedError(
                f"the region {self.path} was opened before this process was forked; "
                "a forked child does not have its memory: attach again"
            )
        return mapped

    def _words(self) -> Words:
        words = self._use().words
        if words is None:
            raise ClosedError(f"the region {self.path} is closed")
        return words
