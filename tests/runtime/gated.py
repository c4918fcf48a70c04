# SPDX-License-Identifier: Apache-2.0
"""A tier that a child process can import, and that a test in another process holds at a gate.

Chunks are files in a folder. Before each call it looks for a fifo ``<operation>.gate`` there: it
writes a byte to ``<operation>.here`` and waits, in a thread, until it can read one from the gate.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from kvtier.errors import ConfigError
from kvtier.tiers.base import Slot, Tier, TierContext
from kvtier.types import Outcome, Presence


class GatedOptions(msgspec.Struct, frozen=True):
    """Configuration keys."""

    folder: str


class GatedTier(Tier):
    """Files, and gates."""

    type: ClassVar[str] = "gated"
    options_type: ClassVar[type[msgspec.Struct]] = GatedOptions

    def _path(self, key: bytes) -> Path:
        return Path(self.options.folder, key.hex())

    def _has(self, name: str) -> bool:
        return Path(self.options.folder, name).exists()

    async def _gate(self, operation: str) -> None:
        if self._has(f"{operation}.gate"):
            await asyncio.get_running_loop().run_in_executor(None, self._wait, operation)

    def _wait(self, operation: str) -> None:
        folder = Path(self.options.folder)
        (folder / f"{operation}.here").write_bytes(b"x")
        with open(folder / f"{operation}.gate", "rb") as gate:
            gate.read(1)

    async def open(self) -> None:
        folder = Path(self.options.folder)
        (folder / "child.json").write_text(json.dumps(describe_process()))
        if (folder / "wrong").exists():
            raise ConfigError("folder: is wrong; take another one")
        if (folder / "open.gate").exists():
            self._wait("open")  # on the loop: the service hangs as a whole

    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        await self._gate("exists")
        if self._has("hang"):
            time.sleep(3600)
        return [Presence(self._path(key).exists()) for key in keys]

    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        await self._gate("store")
        for item in items:
            assert item.crc is not None
            part = self._path(item.key).with_suffix(".part")
            part.write_bytes(item.crc.to_bytes(4, "big") + item.view)
            os.rename(part, self._path(item.key))
        return [Outcome.DONE] * len(items)

    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        for item in items:
            item.view[:100] = b"\xee" * 100  # half a load, as a kill would leave it
        await self._gate("load")
        for item in items:
            data = self._path(item.key).read_bytes()
            item.crc = int.from_bytes(data[:4], "big")
            item.view[:] = data[4:]
        return [Outcome.DONE] * len(items)

    async def aclose(self, deadline: float) -> None:
        return None


def describe_process() -> dict[str, Any]:
    """What a service's process looks like from inside."""
    return {
        "pid": os.getpid(),
        "environment": dict(os.environ),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "policy": os.sched_getscheduler(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_IGN,
        "argv": Path("/proc/self/cmdline").read_bytes().decode().split("\0")[:-1],
        "fds": {
            fd: os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        },
    }
