# SPDX-License-Identifier: Apache-2.0
"""Damage to single chunks of host memory, done where their bytes lie and undone again.

A part of the probe that runs inside vLLM's worker, with one rank. It finds a chunk by its key in
the region's own table, writes to its slot, and knows nothing of the copy plans. Keys come as hex.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier._core.slots import SlotTable
from kvtier.types import GroupGeometry, key_group

Bytes = npt.NDArray[np.uint8]


class Damage:
    """Mixed into the probe."""

    def kvt_payloads(self, keys: list[str]) -> list[Bytes]:
        """Views of the slots of chunks, payload alone."""
        region = self.kvt_worker().region  # type: ignore[attr-defined]
        geometry = region.geometry
        table = SlotTable(region.records, region.table, geometry.num_slots)
        found = []
        for key in map(bytes.fromhex, keys):
            slot = table.find(key)
            assert slot >= 0, f"chunk {key.hex()} is not in host memory"
            size = geometry.groups[key_group(key)].payload_bytes
            found.append(np.frombuffer(region.slot_view(slot, size), dtype=np.uint8))
        return found

    def kvt_remember(self, keys: list[str]) -> None:
        """Keep what these chunks hold now; ``stale`` puts it back."""
        copies = {key: view.copy() for key, view in zip(keys, self.kvt_payloads(keys), strict=True)}
        vars(self).setdefault("kvt_remembered", {}).update(copies)

    def kvt_spoil(self, kind: str, keys: list[str]) -> None:
        """Damage chunks until ``kvt_mend``.

        ``flip``: a high bit of one value in the last block. ``heads``: two heads of the last block
        change places. ``layers``: two layers do, of one chunk or of two chunks in groups of their
        own. ``shift``: the last block of the chunks holds what the block before it does.
        ``exchange``: two chunks change places. ``stale``: the chunk is as it was remembered.
        """
        views = self.kvt_payloads(keys)
        vars(self)["kvt_whole"] = {key: view.copy() for key, view in zip(keys, views, strict=True)}
        groups = [self._kvt_group(key) for key in keys]
        blocks = [
            block
            for view, group in zip(views, groups, strict=True)
            for block in view.reshape(group.blocks_per_chunk, group.block_bytes)
        ]
        if kind == "flip":
            # Of a number of two or four bytes the one with the exponent; far enough behind to be in
            # V of the last head, because a K that is beyond all bounds may only hide its token.
            blocks[-1][len(blocks[-1]) * 15 // 64 * 4 + 3] ^= 0x40
        elif kind == "heads":
            for page in groups[-1].pages:
                view = blocks[-1][page.offset_bytes :][: page.size_bytes]
                for first, second in self._kvt_heads(view, page.layer, groups[-1]):
                    swap(first, second)
        elif kind == "layers" and len(keys) == 1:
            for block in blocks:
                first, second = (
                    block[page.offset_bytes :][: page.size_bytes] for page in groups[0].pages[:2]
                )
                swap(first, second)
        elif kind in ("layers", "exchange"):
            first, second = views
            swap(first, second)
        elif kind == "shift":
            before, last = list(pairwise(blocks))[-1]
            last[:] = before
        elif kind == "stale":
            for key, view in zip(keys, views, strict=True):
                view[:] = vars(self)["kvt_remembered"][key]
        else:
            raise ValueError(kind)
        changed = [
            key
            for key, view in zip(keys, views, strict=True)
            if not np.array_equal(view, vars(self)["kvt_whole"][key])
        ]
        assert changed, f"{kind} has changed nothing"

    def kvt_mend(self) -> None:
        """Undo the last ``kvt_spoil``."""
        whole = vars(self).pop("kvt_whole")
        for view, copy in zip(self.kvt_payloads(list(whole)), whole.values(), strict=True):
            view[:] = copy

    def kvt_turn_weights(self, rows: int) -> None:
        """Give every token the embedding of another one, as other weights do."""
        # lazy: only inside a vLLM worker.
        import torch

        # vLLM multiplies with packed copies of its matrices; the embeddings are read as they are.
        weight = self.model_runner.get_model().model.embed_tokens.weight  # type: ignore[attr-defined]
        weight.data.copy_(torch.roll(weight.data, rows, 0))

    def _kvt_group(self, key: str) -> GroupGeometry:
        groups = self.kvt_worker().region.geometry.groups  # type: ignore[attr-defined]
        return groups[key_group(bytes.fromhex(key))]  # type: ignore[no-any-return]

    def _kvt_heads(
        self, page: Bytes, layer: str, group: GroupGeometry
    ) -> list[tuple[Bytes, Bytes]]:
        """The first two heads of a page."""
        # lazy: only inside a vLLM worker.
        from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

        config: Any = self.vllm_config  # type: ignore[attr-defined]
        context = config.compilation_config.static_forward_context
        spec = context[layer].get_kv_cache_spec(config)
        if isinstance(spec, MambaSpec):
            # The state of the convolution, then a matrix for each head.
            before, heads = (
                prod(shape) * dtype.itemsize
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            )
            page = page[before : before + heads]
            parts = spec.shapes[1][0]
        elif isinstance(spec, MLAAttentionSpec):
            # One latent head: the first two quarters of each token's row instead.
            rows = page.reshape(group.block_tokens, -1)
            quarter = rows.shape[1] // 4
            return [(row[:quarter], row[quarter : 2 * quarter]) for row in rows]
        else:
            parts = spec.num_kv_heads
        tile = len(page) // parts
        return [(page[:tile], page[tile : 2 * tile])]


def swap(first: Bytes, second: Bytes) -> None:
    """Two pieces of memory change places."""
    kept = first.copy()
    first[:] = second
    second[:] = kept
