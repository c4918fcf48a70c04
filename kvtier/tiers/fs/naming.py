# SPDX-License-Identifier: Apache-2.0
"""Names of directories, chunk files and temporary files, and whose a temporary file is.

Owns no state. Layout below the root::

    <model>-<first 12 hex digits of the namespace digest>/   kvtier.namespace.directory_name
        namespace.json
        ab/<hash>_<group>.kv                             a whole chunk
        ab/<hash>_<group>.kv.<owner>.<counter>.tmp       one being written
        ab/<hash>_<group>.kv.bad                         one found corrupt

One level of 256 directories, named by the hash's first byte: a directory costs as much to make as a
file, and with two levels nearly every chunk of a new namespace makes one of its own. Filesystems
index large directories; ten million chunks are 40,000 names in each.

An owner is ``<host>-<pid>-<start time>-<instance>``: host is a digest of boot id and pid namespace,
so a process number is only ever looked up where it means something; the start time tells a process
from a later one with its number.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

import msgspec

from kvtier.types import key_group, key_hash, make_key

NAMESPACE_FILE = "namespace.json"
CONTROL_DIRECTORY = ".kvtier"
"""Below the root: what instances tell each other about the space they use."""

_NAMESPACE_DIRECTORY = re.compile(r"[A-Za-z0-9._-]+-[0-9a-f]{12}")
_CHUNK = re.compile(r"((?:[0-9a-f]{2}){1,36})_(0|[1-9][0-9]{0,9})\.kv")
_OWNER = re.compile(r"([0-9a-f]{12})-([0-9]+)-([0-9]+)-([0-9a-f]+)")
_TEMPORARY = re.compile(rf".+\.kv\.({_OWNER.pattern})\.[0-9a-f]+\.tmp")


class Owner(msgspec.Struct, frozen=True):
    """The process, and the tier in it, that a temporary file belongs to."""

    host: str
    pid: int
    start: int
    """Start time of the process, in clock ticks since boot."""
    instance: str

    def __str__(self) -> str:
        return f"{self.host}-{self.pid}-{self.start}-{self.instance}"

    def is_dead(self, host: str) -> bool:
        """Whether this is a process of `host` (the caller's) that has ended."""
        return self.host == host and _start_time(self.pid) != self.start


def this_owner() -> Owner:
    """Owner for a tier of this process; every call gives a new instance."""
    pid = os.getpid()
    start = _start_time(pid)
    return Owner(_host(), pid, 0 if start is None else start, secrets.token_hex(4))


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:12]


def _start_time(pid: int) -> int | None:
    """Start time of a process; None when there is none (a zombie has ended too)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command may contain spaces and parentheses; the fields after it do not.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def temporary_owner(name: str) -> Owner | None:
    """Owner of a temporary file by its name; None for anything else."""
    return parse_owner(match[1]) if (match := _TEMPORARY.fullmatch(name)) else None


def parse_owner(text: str) -> Owner | None:
    """Inverse of ``str(owner)``."""
    match = _OWNER.fullmatch(text)
    return Owner(match[1], int(match[2]), int(match[3]), match[4]) if match else None


def is_namespace_directory(name: str) -> bool:
    """Whether a directory below the root looks like one of ours."""
    return _NAMESPACE_DIRECTORY.fullmatch(name) is not None


def chunk_path(key: bytes) -> str:
    """Path of a chunk below its namespace's directory (the same as in ``fileio.h``)."""
    digits = key_hash(key).hex()
    return f"{digits[:2]}/{digits}_{key_group(key)}.kv"


def chunk_key(name: str) -> bytes | None:
    """Key of a chunk by its file name; None for anything else."""
    match = _CHUNK.fullmatch(name)
    if match is None or int(match[2]) >= 1 << 32:
        return None
    return make_key(bytes.fromhex(match[1]), int(match[2]))
