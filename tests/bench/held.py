# SPDX-License-Identifier: Apache-2.0
"""Tiers that a test holds at a gate, wherever they run: in a thread of the test or in a child.

``HeldTier`` keeps chunks as files in a folder; while the folder has a file ``<operation>.held``,
calls of that operation wait, after having made ``<operation>.here``; those of certain keys only, if
the file names some. ``HungFiles`` is the file tier
with every write of a chunk hanging in its system call, until bytes are written to a fifo.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from kvtier._core import fileio
from kvtier.tiers.base import Slot, Tier, TierContext, TierEnv
from kvtier.tiers.fs.options import FsOptions
from kvtier.tiers.fs.tier import FsTier
from kvtier.types import Outcome, Presence

MODULE = "tests.bench.held"


class HeldOptions(msgspec.Struct, frozen=True):
    """Configuration keys."""

    folder: str


class HeldTier(Tier):
    """Chunks in files, and gates."""

    type: ClassVar[str] = "held"
    options_type: ClassVar[type[msgspec.Struct]] = HeldOptions

    @property
    def _folder(self) -> Path:
        return Path(self.options.folder)

    async def _gate(self, operation: str, keys: Sequence[bytes]) -> None:
        held = self._folder / f"{operation}.held"
        try:
            only = held.read_text().split()
        except FileNotFoundError:
            return
        if only and not any(key.hex() in only for key in keys):
            return
        (self._folder / f"{operation}.here").touch()
        while held.exists():
            await asyncio.sleep(0.002)

    async def open(self) -> None:
        return None

    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        await self._gate("exists", keys)
        return [Presence((self._folder / key.hex()).exists()) for key in keys]

    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        await self._gate("store", [item.key for item in items])
        for item in items:
            assert item.crc is not None
            part = self._folder / f"{item.key.hex()}.part"
            part.write_bytes(item.crc.to_bytes(4, "big") + item.view)
            os.rename(part, self._folder / item.key.hex())
        return [Outcome.DONE] * len(items)

    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        for item in items:
            data = (self._folder / item.key.hex()).read_bytes()
            item.crc = int.from_bytes(data[:4], "big")
            item.view[:] = data[4:]
        # All bytes are in host memory, and nobody has compared them with anything yet.
        await self._gate("load", [item.key for item in items])
        return [Outcome.DONE] * len(items)

    async def aclose(self, deadline: float) -> None:
        return None


class HungFilesOptions(FsOptions, frozen=True, kw_only=True):
    """Those of the file tier, and the gate."""

    gate: str
    """A fifo; each write of a chunk takes one byte of it first."""


class HungFiles(FsTier):
    """The file tier over a medium that answers no write once the tier is open."""

    type: ClassVar[str] = "hung-files"
    options_type = HungFilesOptions
    options: HungFilesOptions

    def __init__(self, name: str, options: HungFilesOptions, env: TierEnv) -> None:
        super().__init__(name, options, env, faults=fileio.Faults())

    async def open(self) -> None:
        await super().open()
        assert self._faults is not None
        # For writing too, so that a reader never meets the end of the file.
        gate = os.open(self.options.gate, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, gate)  # a call that hangs holds the tier
        self._faults.block("write", gate)
