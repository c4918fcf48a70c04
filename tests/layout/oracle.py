# SPDX-License-Identifier: Apache-2.0
"""What a layout means, in numpy: the whole model's KV as arrays, and each rank's page cut from it.

Nothing here uses runs or offsets; a page is built by slicing and transposing, so that a mistake in
the derivation of runs cannot be in here as well.
"""

import ctypes

import numpy as np

from kvtier.layout.pages import LatentShape
from kvtier.layout.plan import LayerPage


class Memory:
    """Bytes at an address, with a guard pattern around them that must never change."""

    GUARD = 64

    def __init__(self, size, fill=0xEE, shift=0):
        self.raw = np.full(size + 2 * self.GUARD + shift, fill, dtype=np.uint8)
        self.start = self.GUARD + shift
        self.bytes = self.raw[self.start : self.start + size]
        self.fill = fill
        self.address = self.bytes.ctypes.data

    def guards_intact(self):
        edges = np.concatenate([self.raw[: self.start], self.raw[self.start + len(self.bytes) :]])
        return bool((edges == self.fill).all())


def truth(shape, blocks, rng):
    """Every byte of the model's KV for `blocks` blocks."""
    if isinstance(shape, LatentShape):
        return rng.integers(0, 256, (blocks, shape.block_tokens, shape.row_bytes), dtype=np.uint8)
    size = (blocks, shape.num_kv_heads, shape.block_tokens)
    return (
        rng.integers(0, 256, (*size, shape.key_bytes), dtype=np.uint8),
        rng.integers(0, 256, (*size, shape.value_bytes), dtype=np.uint8),
    )


def heads_of(shape, tp, rank):
    """Heads a rank holds: spread evenly, or each on several neighbouring ranks."""
    return np.array_split(np.arange(max(tp, shape.num_kv_heads)), tp)[rank] // max(
        1, tp // shape.num_kv_heads
    )


def local_parts(shape, values, tp, rank):
    """{part: (blocks, page bytes)} of one rank."""
    if isinstance(shape, LatentShape):
        return {"kv": values.reshape(len(values), -1)}
    mine = heads_of(shape, tp, rank)
    k, v = (x[:, mine] for x in values)
    if shape.order == "NHD":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    flat = lambda x: np.ascontiguousarray(x).reshape(len(x), -1)  # noqa: E731 - two words, used below
    if shape.kv == "packed":
        return {"kv": flat(np.concatenate([k, v], axis=-1))}
    if shape.kv == "split":
        return {"kv": np.concatenate([flat(k), flat(v)], axis=1)}
    return {"k": flat(k), "v": flat(v)}


def canonical_page(shape, values):
    """(blocks, canonical bytes): head tile after head tile."""
    if isinstance(shape, LatentShape):
        return values.reshape(len(values), -1)
    k, v = values
    if shape.tile == "opaque" and shape.kv != "packed":
        tile = np.concatenate([x.reshape(*x.shape[:2], -1) for x in (k, v)], axis=-1)
    else:
        tile = np.concatenate([k, v], axis=-1)
    return tile.reshape(len(k), -1)


class Rank:
    """One rank's accelerator memory: strided, padded pages of several layers."""

    def __init__(self, layers, num_blocks, tp, rank, padding=0, shift=0):
        self.layers, self.tp, self.rank = layers, tp, rank
        self.num_blocks = num_blocks
        self.memories = {}
        self.pages = []
        for name, shape in layers:
            parts = ["k", "v"] if getattr(shape, "kv", "") == "apart" else ["kv"]
            for part in parts:
                mapping = (
                    shape.mapping(tp, rank)
                    if isinstance(shape, LatentShape)
                    else shape.mapping(tp, rank, part)
                )
                stride = mapping.local_bytes + padding
                memory = Memory(stride * num_blocks, shift=shift)
                self.memories[name, part] = memory
                self.pages.append(
                    LayerPage(name, memory.address, stride, num_blocks, mapping, memory)
                )

    def views(self):
        """{(layer, part): (blocks, page bytes)}, without padding."""
        return {
            (page.layer, part): memory.bytes.reshape(self.num_blocks, -1)[
                :, : page.mapping.local_bytes
            ]
            for page, ((_, part), memory) in zip(self.pages, self.memories.items(), strict=True)
        }

    def fill(self, values, block_ids):
        """Put blocks of the truth at `block_ids`."""
        views = self.views()
        for name, shape in self.layers:
            for part, data in local_parts(shape, values[name], self.tp, self.rank).items():
                views[name, part][block_ids] = data

    def expect(self, values, block_ids):
        """AssertionError unless exactly `block_ids` hold the truth, and the rest is untouched."""
        views = self.views()
        others = np.setdiff1d(np.arange(self.num_blocks), block_ids)
        for name, shape in self.layers:
            for part, data in local_parts(shape, values[name], self.tp, self.rank).items():
                np.testing.assert_array_equal(views[name, part][block_ids], data)
                assert (views[name, part][others] == 0xEE).all()
        for page, memory in zip(self.pages, self.memories.values(), strict=True):
            assert memory.guards_intact()
            padding = memory.bytes.reshape(self.num_blocks, -1)[:, page.mapping.local_bytes :]
            assert (padding == 0xEE).all()


def read(address, size):
    """Bytes at an address."""
    return ctypes.string_at(address, size)
