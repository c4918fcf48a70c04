# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of the file tier."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvtier.options import Bytes, Directory, Ratio

Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]

MIN_FREE_PART = 0.02
_MODES = {"user": 0o600, "group": 0o660, "all": 0o666}


class Upkeep(msgspec.Struct, frozen=True, kw_only=True):
    """Times and bounds of the housekeeping. Nobody configures them; tests shorten them."""

    touch_seconds: int = 600
    """A loaded file gets a new access time when its last one is older."""
    stale_seconds: int = 3600
    """Age at which a temporary file of another host counts as left behind."""
    rescan_seconds: float = 600.0
    """Time between two walks over the directory, which see what others wrote and removed."""
    retry_seconds: float = 5.0
    """How long writes pause after "disk full" or "read-only"; then one store tries again."""
    max_quarantined: int = 16
    """Corrupt files kept for inspection, as ``*.bad``; the oldest go first."""


class FsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a tier of type ``fs``.

    Raises
    ------
    ValueError
        If values do not fit together.
    """

    root_dir: Directory
    """Directory of all namespaces; made when it is not there. May be shared by many instances."""
    read_threads: Threads = 32
    """Loads at the same time. Small files need depth: 32 readers of 64 KiB are half again as fast
    as 16 on an NVMe device."""
    write_threads: Threads = 16
    """Stores at the same time; more of them only wait for each other inside the filesystem."""
    direct: Literal["auto", "on", "off"] = "auto"
    """O_DIRECT: when the directory proves to support it, always (refuse otherwise), or never."""
    fsync: bool = False
    """Sync file and directory before a chunk counts as stored. Only a power failure needs it: a
    file that was torn by one fails its checksum and is not used."""
    preallocate: bool = False
    """Reserve the space of a file before writing it, where the filesystem can."""
    private: bool = False
    """Only this instance uses `root_dir`: absence is then known without asking, so that a new
    prompt waits for no answer."""
    access: Literal["user", "group", "all"] = "user"
    """Who may read and write files and directories, before the umask: modes 0600, 0660 or 0666
    (directories also x). Instances of several users that share a directory need a common group."""

    capacity_bytes: Bytes | None = None
    """Most that the files below `root_dir` may take, of all instances together; None is no limit.
    Kept within a 32nd of it for each other instance that writes."""
    high_watermark: Ratio = 0.95
    """Part of the capacity at which eviction starts."""
    low_watermark: Ratio = 0.85
    """Part of the capacity at which eviction ends."""
    min_free_bytes: Bytes | None = None
    """Free space of the filesystem that is left to others; None is 2 % of its size."""

    def __post_init__(self) -> None:
        if not self.root_dir:
            raise ValueError("root_dir is empty, give a directory")
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"low_watermark {self.low_watermark} is above high_watermark {self.high_watermark}"
            )

    def guard_bytes(self, size_bytes: int) -> int:
        """Free space that stays free on a filesystem of this size."""
        if self.min_free_bytes is not None:
            return self.min_free_bytes
        return int(MIN_FREE_PART * size_bytes)

    @property
    def file_mode(self) -> int:
        """Mode of new files."""
        return _MODES[self.access]

    @property
    def directory_mode(self) -> int:
        """Mode of new directories: x wherever a file has r."""
        return self.file_mode | (self.file_mode & 0o444) >> 2
