# SPDX-License-Identifier: Apache-2.0
"""A tier that fails on cue, for tests of whatever stands above tiers.

``ScriptedTier`` keeps chunks in memory like the example tier and asks its ``Script`` before each
call: wait for an event, hang for good, end with an outcome, damage the bytes. A test in the same
process reaches the script by the name in the options; scripts live in a table for as long as the
test holds them.
"""

from __future__ import annotations

import asyncio
import builtins
import threading
import time
import weakref
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from kvtier.errors import ConfigError, TierLostError
from kvtier.tiers.base import Slot, Tier, TierContext
from kvtier.types import Outcome, Presence

OPERATIONS = ("open", "exists", "store", "load", "contents")


class Gate:
    """Something a call waits at. Open unless closed; usable from any thread."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = threading.Semaphore(0)
        """Released once for each call that has come to the closed gate."""

    def close(self) -> None:
        """Calls wait here from now on."""
        self._open.clear()

    def open(self) -> None:
        """Let all go on."""
        self._open.set()

    async def passed(self) -> None:
        """Wait while the gate is closed; can be cancelled."""
        if self._open.is_set():
            return
        self.waiting.release()
        while not self._open.is_set():  # noqa: ASYNC110 - opened from another thread
            await asyncio.sleep(0.001)


class Script:
    """What a ``ScriptedTier`` is to do, and what it has done.

    Parameters
    ----------
    name : str
        Value of the tier's option ``script``.
    """

    _known: ClassVar[weakref.WeakValueDictionary[str, Script]] = weakref.WeakValueDictionary()

    def __init__(self, name: str) -> None:
        self.name = name
        self.chunks: dict[bytes, tuple[bytes, int]] = {}
        """Payload and CRC by key; survives the tier, like a disk."""
        self.by_namespace: dict[bytes, dict[bytes, tuple[bytes, int]]] = {}
        """The same, by namespace digest, of tiers with the option ``namespaced``."""
        self.gates = {operation: Gate() for operation in OPERATIONS}
        self.outcomes: dict[str, list[Outcome]] = {operation: [] for operation in OPERATIONS}
        """Outcomes of the next calls, one a call; then all goes well."""
        self.always: dict[str, Outcome] = {}
        """Outcome of every call."""
        self.raises: dict[str, BaseException] = {}
        """Raised by every call."""
        self.stubborn: set[str] = set()
        """Calls at a closed gate that do not heed cancellation, like a hung system call."""
        self.damage: bytes | None = None
        """Written over the start of every loaded payload."""
        self.pending: set[bytes] = set()
        """Keys answered PENDING."""
        self.seconds_per_byte = 0.0
        self.calls: list[tuple[str, tuple[bytes, ...]]] = []
        self.running: dict[str, int] = dict.fromkeys(OPERATIONS, 0)
        self.peak: dict[str, int] = dict.fromkeys(OPERATIONS, 0)
        Script._known[name] = self

    @classmethod
    def find(cls, name: str) -> Script:
        """The script of that name. ConfigError if no test holds one."""
        script = cls._known.get(name)
        if script is None:
            raise ConfigError(f"there is no script {name!r} in this process")
        return script


class ScriptedOptions(msgspec.Struct, frozen=True):
    """Configuration keys of the scripted tier."""

    script: str
    medium: str = "STORAGE"
    namespaced: bool = False
    """Chunks of one namespace are not found in another."""
    private: bool = False
    """It tells what it holds."""


class ScriptedTier(Tier):
    """Chunks in the script's memory, with the faults it asks for."""

    type: ClassVar[str] = "scripted"
    options_type: ClassVar[builtins.type[msgspec.Struct]] = ScriptedOptions

    @property
    def script(self) -> Script:
        """The test's script."""
        return Script.find(self.options.script)

    @property
    def chunks(self) -> dict[bytes, tuple[bytes, int]]:
        """What this tier can see."""
        if not self.options.namespaced:
            return self.script.chunks
        return self.script.by_namespace.setdefault(self.env.namespace_digest, {})

    async def _begin(self, operation: str, keys: Sequence[bytes] = ()) -> Outcome | None:
        script = self.script
        script.calls.append((operation, tuple(keys)))
        script.running[operation] += 1
        script.peak[operation] = max(script.peak[operation], script.running[operation])
        try:
            gate = script.gates[operation].passed()
            if operation in script.stubborn:
                await _stubborn(gate)
            else:
                await gate
        except BaseException:
            script.running[operation] -= 1
            raise
        if operation in script.raises:
            script.running[operation] -= 1
            raise script.raises[operation].with_traceback(None)
        if operation in script.always:
            return script.always[operation]
        return script.outcomes[operation].pop(0) if script.outcomes[operation] else None

    def _end(self, operation: str) -> None:
        self.script.running[operation] -= 1

    async def open(self) -> None:
        outcome = await self._begin("open")
        self._end("open")
        if outcome is not None and not outcome.ok:
            raise TierLostError(outcome.name)

    async def exists(self, keys: Sequence[bytes], ctx: TierContext) -> list[Presence]:
        outcome = await self._begin("exists", keys)
        self._end("exists")
        if outcome is not None and not outcome.ok:
            raise TierLostError(outcome.name)
        script = self.script
        return [
            Presence.PENDING
            if key in script.pending
            else Presence.PRESENT
            if key in self.chunks
            else Presence.ABSENT
            for key in keys
        ]

    async def store(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        outcome = await self._begin("store", [item.key for item in items])
        try:
            if outcome is not None:
                return [outcome] * len(items)
            script = self.script
            for item in items:
                if script.seconds_per_byte:
                    await asyncio.sleep(script.seconds_per_byte * item.length)
                assert item.crc is not None
                self.chunks[item.key] = (bytes(item.view), item.crc)
            return [Outcome.DONE] * len(items)
        finally:
            self._end("store")

    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        outcome = await self._begin("load", [item.key for item in items])
        try:
            if outcome is not None:
                return [outcome] * len(items)
            script = self.script
            outcomes = []
            for item in items:
                found = self.chunks.get(item.key)
                if found is None:
                    outcomes.append(Outcome.MISSING)
                    continue
                item.view[:], item.crc = found
                if script.damage is not None:
                    item.view[: len(script.damage)] = script.damage
                outcomes.append(Outcome.DONE)
            return outcomes
        finally:
            self._end("load")

    async def contents(self) -> list[bytes] | None:
        if not self.options.private:
            return None
        outcome = await self._begin("contents")
        self._end("contents")
        if outcome is not None and not outcome.ok:
            raise TierLostError(outcome.name)
        return list(self.chunks)

    async def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.chunks.pop(key, None)

    async def aclose(self, deadline: float) -> None:
        # The "medium" is the script's and stays.
        return None


async def _stubborn(gate: object) -> None:
    """Wait for `gate` whatever happens, then be cancelled if that was asked for."""
    task = asyncio.ensure_future(gate)  # type: ignore[call-overload]  # a coroutine
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def wait_until(condition: object, seconds: float = 10.0) -> None:
    """Poll ``condition()`` until it is true; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    assert callable(condition)
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {seconds:g} seconds")
        time.sleep(0.001)
