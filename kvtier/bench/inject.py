# SPDX-License-Identifier: Apache-2.0
"""Damage on purpose, to prove that the comparison of bytes can fail.

Each kind damages one stored chunk in `EVERY`, in host memory and before it is committed, so that no
checksum of a tier can see it: only the comparison in the accelerator's buffer is left to find it.
``flip-file`` damages the tier's files instead, behind its back: there the tier's own check has to
find it, so that no wrong byte arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvtier.bench.copies import Damage
from kvtier.bench.pattern import Shape, Words

EVERY = 8
KINDS = ("flip", "swap-heads", "swap-layers", "stale", "flip-file")


def _flip(chunk: Words) -> None:
    # One bit, somewhere in the middle.
    chunk.reshape(-1)[chunk.size // 3] ^= 1 << 17


def _swap_heads(chunk: Words, heads: int) -> None:
    pages = chunk.reshape(chunk.shape[0], chunk.shape[1], heads, -1)
    pages[0, 0, [0, 1]] = pages[0, 0, [1, 0]]


def _swap_layers(chunk: Words) -> None:
    chunk[0, [0, 1]] = chunk[0, [1, 0]]


def make_damage(kind: str | None, shape: Shape) -> Damage | None:
    """What `CopyStream` calls on each stored chunk for `kind`, or None."""
    changes: dict[str, Callable[[Words], None]] = {
        "flip": _flip,
        "swap-heads": lambda chunk: _swap_heads(chunk, shape.heads),
        "swap-layers": _swap_layers,
    }
    change = changes.get(kind or "")
    if change is None:
        return None

    def damage(chunk: Words, number: int) -> bool:
        if number % EVERY:
            return False
        change(chunk)
        return True

    return damage


def make_skip(kind: str | None) -> Callable[[int], bool] | None:
    """For ``stale``: which stores leave the slot as it was."""
    if kind != "stale":
        return None
    return lambda number: number % EVERY == 0


def flip_file(path: Path) -> None:
    """Flip one bit in the middle of a file's first quarter (payload, not trailer)."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 4)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))
