# SPDX-License-Identifier: Apache-2.0
"""A scripted tier in another process: its faults and its chunks are files in a folder.

The test's side is ``FiledFaults``, the tier's ``FiledTier``. Fault files: ``<operation>.<word>``,
with the word ``closed`` (calls wait while it is there), ``stubborn`` (and do not heed
cancellation), ``always`` (an outcome), ``raise`` (an error), ``once-<n>`` (the outcome of one call,
which takes the file away); and ``damage``, ``slow`` and ``pending`` (keys) for all operations.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from kvtier.testing.faults import OPERATIONS, Gate, Script, ScriptedOptions, ScriptedTier
from kvtier.tiers.base import Slot, TierContext, TierEnv
from kvtier.types import Outcome

ERRORS: dict[str, BaseException] = {"eio": OSError(5, "eio"), "bug": ZeroDivisionError()}


class FiledOptions(ScriptedOptions, frozen=True, kw_only=True):
    """Configuration keys."""

    folder: str


class _FileGate(Gate):
    """Closed while a file is there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    async def passed(self) -> None:
        while self._path.exists():
            await asyncio.sleep(0.001)


class _Chunks(dict[bytes, tuple[bytes, int]]):
    """Payload and CRC of each key, in files: they outlive a process that is killed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        return (self._folder / key.hex()).exists()

    def get(self, key: bytes, default: object = None) -> tuple[bytes, int] | None:  # type: ignore[override]
        try:
            data = (self._folder / key.hex()).read_bytes()
        except FileNotFoundError:
            return None
        return data[4:], int.from_bytes(data[:4], "big")

    def __setitem__(self, key: bytes, value: tuple[bytes, int]) -> None:
        payload, crc = value
        part = self._folder / f"{key.hex()}.{os.getpid()}.part"
        part.write_bytes(crc.to_bytes(4, "big") + payload)
        part.rename(self._folder / key.hex())

    def pop(self, key: bytes, default: object = None) -> None:  # type: ignore[override]
        (self._folder / key.hex()).unlink(missing_ok=True)


class FiledTier(ScriptedTier):
    """The scripted tier, told what to do by files."""

    type: ClassVar[str] = "filed"
    options_type: ClassVar[type[msgspec.Struct]] = FiledOptions

    def __init__(self, name: str, options: FiledOptions, env: TierEnv) -> None:
        super().__init__(name, options, env)
        self._folder = Path(options.folder)
        self._script = Script(options.script)
        for operation in OPERATIONS:
            self._script.gates[operation] = _FileGate(self._folder / f"{operation}.closed")
        self._chunks = _Chunks(self._folder / f"chunks-{env.namespace_digest.hex()[:16]}")

    @property
    def script(self) -> Script:
        return self._script

    @property
    def chunks(self) -> dict[bytes, tuple[bytes, int]]:
        return self._chunks

    def _read(self, name: str) -> str | None:
        # The test may take it away at any time.
        try:
            return (self._folder / name).read_text()
        except FileNotFoundError:
            return None

    def _see(self, operation: str) -> None:
        """Bring the script up to date for a call."""
        script = self._script
        script.calls.clear()
        script.stubborn = {one for one in OPERATIONS if self._read(f"{one}.stubborn") is not None}
        script.damage = None if self._read("damage") is None else b"\xff\x00\xff"
        script.seconds_per_byte = float(self._read("slow") or 0.0)
        script.pending = {bytes.fromhex(key) for key in (self._read("pending") or "").split()}
        always, error = self._read(f"{operation}.always"), self._read(f"{operation}.raise")
        script.always = {} if always is None else {operation: Outcome(int(always))}
        script.raises = {} if error is None else {operation: ERRORS[error]}
        script.outcomes[operation].clear()
        for path in sorted(self._folder.glob(f"{operation}.once-*")):
            with contextlib.suppress(FileNotFoundError):
                outcome = Outcome(int(path.read_text()))
                path.unlink()
                script.outcomes[operation].append(outcome)
                break

    async def _begin(self, operation: str, keys: Sequence[bytes] = ()) -> Outcome | None:
        self._see(operation)
        return await super()._begin(operation, keys)

    async def load(self, items: Sequence[Slot], ctx: TierContext) -> list[Outcome]:
        for item in items:
            item.view[: item.length // 2] = b"\xee" * (item.length // 2)  # as a kill may leave it
        return await super().load(items, ctx)


class FiledFaults:
    """Makes and removes the fault files of one tier.

    Parameters
    ----------
    parent : Path
        Where the tier's folder is made.
    name : str
        Of the tier.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self.name = name
        self.folder = folder = parent / name
        self._number = 0
        folder.mkdir(parents=True, exist_ok=True)

    def tier(self) -> dict[str, object]:
        """Configuration of the tier."""
        return {
            "type": "FiledTier",
            "module_path": "tests.engine.filed",
            "name": self.name,
            "script": self.name,
            "folder": str(self.folder),
        }

    def _put(self, name: str, text: str = "") -> None:
        part = self.folder / f"new-{name}"
        part.write_text(text)
        part.rename(self.folder / name)

    def fault(self, operation: str, kind: str, outcome: Outcome, keys: Sequence[bytes]) -> None:
        """One of the kinds of fault that the model knows."""
        match kind:
            case "outcome":
                self._number += 1
                self._put(f"{operation}.once-{self._number:06}", str(int(outcome)))
            case "always":
                self._put(f"{operation}.always", str(int(outcome)))
            case "raise":
                self._put(f"{operation}.raise", "eio")
            case "bug":
                self._put(f"{operation}.raise", "bug")
            case "hang":
                self._put(f"{operation}.closed")
            case "stubborn":
                self._put(f"{operation}.stubborn")
                self._put(f"{operation}.closed")
            case "damage":
                self._put("damage")
            case "slow":
                self._put("slow", repr(0.002 / 8192))
            case "pending":
                self._put("pending", "\n".join(key.hex() for key in keys))

    def heal(self) -> None:
        """No faults from now on."""
        for path in self.folder.iterdir():
            if path.is_file():
                path.unlink(missing_ok=True)
