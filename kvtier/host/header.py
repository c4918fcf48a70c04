# SPDX-License-Identifier: Apache-2.0
"""The header of a region: what it is, whether it is ready, and how far each rank has come.

Owns no state beyond views of the mapped file. Any thread; each word has one writer. A file is laid
out as header page, meta (msgpack), a line of 1024 bytes for each rank, slot records, key table,
slots. All offsets follow from the meta, by one function, so nothing is stored twice.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from kvtier import __version__
from kvtier._core.slots import RECORD_BYTES, table_bytes
from kvtier._core.words import Words
from kvtier.errors import ConfigError, InternalError
from kvtier.namespace import namespace_digest
from kvtier.types import PAGE_BYTES, Geometry

FORMAT = 2
BUILDING = 0
READY = 1
FAILED = 2

STATE_WORD = 2
AVAILABLE_WORD = 3
FRAMES_WORD = 4
"""Frames that the tier service has begun to send to the owner since its start."""
LINE_BYTES = 1024
RING_ENTRIES = 120
MAX_RANKS = 4096

_MAGIC = b"kvtierRG"
_FIXED = struct.Struct("<8sII")  # magic, format, bytes of the meta; then words 2 to 4
_VERSION = slice(64, 96)
_FAILURE = slice(256, PAGE_BYTES)
_PAYLOAD_ALIGNMENT = 2 << 20  # huge pages; the gap is a hole in the file and takes no memory


class Meta(msgspec.Struct, frozen=True):
    """What must agree between everybody who maps a region."""

    name: str
    ranks: int
    geometry: Geometry
    namespace: dict[str, str]
    digest: bytes


class Layout(msgspec.Struct, frozen=True):
    """Offsets and sizes in bytes, relative to the start of the file."""

    lines: int
    records: int
    records_bytes: int
    table: int
    table_bytes: int
    payload: int
    payload_bytes: int

    @property
    def head_bytes(self) -> int:
        """Everything before the slots that needs memory."""
        return self.table + self.table_bytes

    @property
    def total_bytes(self) -> int:
        """Length of the file; the gap before the slots takes no memory."""
        return self.payload + self.payload_bytes


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def make_layout(meta: Meta, encoded_bytes: int) -> Layout:
    """Layout of a region whose meta takes `encoded_bytes`."""
    lines = _align(PAGE_BYTES + encoded_bytes, PAGE_BYTES)
    records = _align(lines + meta.ranks * LINE_BYTES, PAGE_BYTES)
    records_bytes = meta.geometry.num_slots * RECORD_BYTES
    table = _align(records + records_bytes, PAGE_BYTES)
    size = _align(table_bytes(meta.geometry.num_slots), PAGE_BYTES)
    return Layout(
        lines=lines,
        records=records,
        records_bytes=records_bytes,
        table=table,
        table_bytes=size,
        payload=_align(table + size, _PAYLOAD_ALIGNMENT),
        payload_bytes=meta.geometry.num_slots * meta.geometry.slot_bytes,
    )


def make_meta(name: str, ranks: int, geometry: Geometry, namespace: Mapping[str, str]) -> Meta:
    """Checked meta of a region.

    Raises
    ------
    ConfigError
        If ranks or geometry cannot be.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"a region has 1 to {MAX_RANKS} ranks, got {ranks}")
    if not geometry.groups:
        raise ConfigError("a region needs at least one KV cache group")
    if geometry.num_slots < 1:
        raise ConfigError(f"a region has at least one slot, got {geometry.num_slots}")
    largest = max(geometry.payload_bytes)
    if geometry.slot_bytes % PAGE_BYTES or geometry.slab_bytes < largest or largest < 1:
        raise ConfigError(
            f"slot_bytes is a multiple of {PAGE_BYTES}, and slab_slots of them hold the largest "
            f"chunk ({largest} bytes), got {geometry.slot_bytes} and {geometry.slab_slots}"
        )
    if geometry.num_slots % geometry.slab_slots:
        raise ConfigError(
            f"a region has whole slabs: {geometry.num_slots} slots are no multiple of "
            f"{geometry.slab_slots}"
        )
    fields = dict(namespace)
    return Meta(name, ranks, geometry, fields, namespace_digest(fields))


def encode(meta: Meta) -> bytes:
    """Bytes of `meta` as they stand in the file."""
    return msgspec.msgpack.encode(meta)


def write_header(fd: int, encoded: bytes) -> None:
    """Header page and meta, in state BUILDING. Written, not mapped: no memory is an OSError."""
    page = bytearray(PAGE_BYTES)
    _FIXED.pack_into(page, 0, _MAGIC, FORMAT, len(encoded))
    page[_VERSION] = __version__.encode()[:32].ljust(32, b"\0")
    os.pwrite(fd, page + encoded, 0)


def write_state(fd: int, state: int) -> None:
    """Set the state word; the caller holds the exclusive lock."""
    os.pwrite(fd, struct.pack("<q", state), STATE_WORD * 8)


def write_available(fd: int, slots: int) -> None:
    """Set the slots that have memory, in whole slabs, while nobody has mapped the file."""
    os.pwrite(fd, struct.pack("<q", slots), AVAILABLE_WORD * 8)


def write_failure(fd: int, message: str) -> None:
    """Leave the reason for those who wait for this file, before its name goes."""
    text = message.encode()[: _FAILURE.stop - _FAILURE.start - 1]
    os.pwrite(fd, text + b"\0", _FAILURE.start)
    write_state(fd, FAILED)


def read_state(fd: int) -> int:
    """State of the file behind `fd`; BUILDING as long as nothing is written."""
    raw = os.pread(fd, 8, STATE_WORD * 8)
    return int(struct.unpack("<q", raw)[0]) if len(raw) == 8 else BUILDING


def read_failure(fd: int) -> str:
    """What ``write_failure`` left."""
    raw = os.pread(fd, _FAILURE.stop - _FAILURE.start, _FAILURE.start)
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def read_meta(fd: int, path: str) -> tuple[Meta, Layout]:
    """Meta and layout of a READY region.

    Raises
    ------
    ConfigError
        If the file is none of kvtier's, or of another version.
    """
    page = os.pread(fd, PAGE_BYTES, 0)
    if len(page) < PAGE_BYTES or page[:8] != _MAGIC:
        raise ConfigError(f"{path} is no region of kvtier: remove it")
    _, version_of_format, size = _FIXED.unpack_from(page)
    version = page[_VERSION].rstrip(b"\0").decode(errors="replace")
    if (version_of_format, version) != (FORMAT, __version__):
        raise ConfigError(
            f"{path} was made by kvtier {version} (format {version_of_format}), this is kvtier "
            f"{__version__} (format {FORMAT}): run the same version everywhere"
        )
    try:
        meta = msgspec.msgpack.decode(os.pread(fd, size, PAGE_BYTES), type=Meta)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{path} has a damaged header ({exc}): remove it") from exc
    layout = make_layout(meta, size)
    actual = os.fstat(fd).st_size
    if actual != layout.total_bytes:
        raise ConfigError(
            f"{path} has {actual} bytes where its header wants {layout.total_bytes}: remove it"
        )
    return meta, layout


def first_difference(mine: Any, theirs: Any, where: str = "") -> str | None:
    """The first field in which two values differ, with both; None if they are equal."""
    if mine == theirs:
        return None
    if isinstance(mine, msgspec.Struct) and isinstance(theirs, msgspec.Struct):
        mine, theirs = msgspec.structs.asdict(mine), msgspec.structs.asdict(theirs)
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in dict.fromkeys((*mine, *theirs)):
            inner = f"{where}.{name}" if where else str(name)
            if name not in mine:
                return f"{inner}: absent here, {theirs[name]!r} in the region"
            if name not in theirs:
                return f"{inner}: {mine[name]!r} here, absent in the region"
            found = first_difference(mine[name], theirs[name], inner)
            if found:
                return found
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        if len(mine) != len(theirs):
            return f"{where}: {len(mine)} here, {len(theirs)} in the region"
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            found = first_difference(one, other, f"{where}[{index}]")
            if found:
                return found
    return f"{where}: {mine!r} here, {theirs!r} in the region"


class RankLine:
    """One rank's line: signature, finished transfers, and a ring of the failed ones.

    The writer (the rank's process) appends failures in rising order and before it moves the
    finished count past them, so a reader that takes the count first never misses one. The ring is
    written over when its reader sleeps; the reader then takes all it cannot rule out as failed.
    """

    _SIGNED, _PID, _FINISHED, _FAILED, _RING = 0, 1, 2, 3, 8

    def __init__(self, line: memoryview) -> None:
        self._words = Words(line)

    def signed_by(self) -> int | None:
        """Process id of the signer, as it sees itself; None if the rank has not signed."""
        return self._words.load(self._PID) if self._words.load(self._SIGNED) else None

    def sign(self, pid: int) -> None:
        """Say that the rank has checked and is ready."""
        self._words.store(self._PID, pid)
        self._words.store(self._SIGNED, 1)

    def finished(self) -> int:
        """Highest contiguous finished transfer, -1 for none."""
        return self._words.load(self._FINISHED) - 1

    def advance(self, finished: int, failed: bool) -> None:
        """Move on by one transfer."""
        if finished != self.finished() + 1:
            raise InternalError(f"transfer {finished} does not follow {self.finished()}")
        if failed:
            count = self._words.load(self._FAILED)
            self._words.store(self._RING + count % RING_ENTRIES, finished)
            self._words.store(self._FAILED, count + 1)
        self._words.store(self._FINISHED, finished + 1)

    def failures(self, reader: FailureReader) -> list[int]:
        """Failed transfers since `reader` last asked; see the class about a ring written over."""
        finished = self.finished()
        written = self._words.load(self._FAILED)
        first = max(reader.taken, written - RING_ENTRIES)
        found = [
            self._words.load(self._RING + index % RING_ENTRIES) for index in range(first, written)
        ]
        # Entries below this were written over, or may be right now, while they were read.
        safe = self._words.load(self._FAILED) + 1 - RING_ENTRIES
        if safe <= reader.taken:
            reader.taken = written
        else:
            reader.overflows += 1
            found = found[max(0, safe - first) :]
            stop = finished + 1
            if found:
                # The ring is in rising order: what was lost lies below the first that is left.
                stop = found[0]
                reader.taken = written
            found = [*range(reader.settled + 1, stop), *found]
        reader.settled = max(finished, reader.settled, *found[-1:])
        return found


class FailureReader:
    """How far one reader has come in one rank's ring."""

    def __init__(self) -> None:
        self.taken = 0
        """Failures read so far, by their count."""
        self.settled = -1
        """Transfers up to here have been answered for."""
        self.overflows = 0
        """Times that the ring had been written over."""
