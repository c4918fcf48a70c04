# SPDX-License-Identifier: Apache-2.0
"""Every KV cache kind that vLLM knows: what docs/vllm.md says of it is what happens.

The configuration is vLLM's own, made from specs of the real class; the round trip goes through the
real worker and manager. No engine runs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"

Specs = Callable[[Any, int], Mapping[str, Any]]
"""Specs by layer; arguments are ``vllm.v1.kv_cache_interface`` and the tensor-parallel size."""


class Kind(msgspec.Struct, frozen=True):
    """A spec class and what becomes of it."""

    name: str
    word: str
    """As in docs/vllm.md."""
    specs: Specs
    options: dict[str, Any] = {}
    """For ``tests.vllm.ranks``."""
    message: str = ""
    """Of a refusal."""
    windows: tuple[int | None, ...] = (None,)
    blocks: int = 2
    """Blocks a chunk."""

    def __str__(self) -> str:
        return f"{self.name}-{self.word}"


def heads(tp: int, **more: Any) -> dict[str, Any]:
    """Four KV heads over `tp` ranks."""
    # lazy: torch takes seconds, and only tests in vLLM need it.
    import torch

    shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": max(1, 4 // tp), "head_size": 32}
    return shape | {"dtype": torch.bfloat16} | more


def rows(width: int = 64, **more: Any) -> dict[str, Any]:
    """Latent rows: one head, the same on all ranks."""
    return heads(4, head_size=width, max_tp_shards=1, **more)


def state(block_tokens: int = 16, page: int | None = None) -> dict[str, Any]:
    """Convolution and state of Mamba-2."""
    import torch  # lazy: as above

    return {
        "block_size": block_tokens,
        "shapes": ((3, 40), (2, 8, 16)),
        "dtypes": (torch.bfloat16, torch.float32),
        "mamba_cache_mode": "align",
        "page_size_padded": page,
    }


def uint8(**more: Any) -> dict[str, Any]:
    """Packed rows: opaque bytes."""
    import torch  # lazy: as above

    return rows(**more) | {"dtype": torch.uint8}


def hisparse(config: Any) -> None:
    """Around the indexer's group, which the configuration has, what HiSparse has besides: its
    source in host memory, and two groups for what of it is on the accelerator."""
    from vllm.v1 import kv_cache_interface as kv  # lazy: as above

    (indexer,) = config.kv_cache_groups
    indexer.role = kv.KVCacheGroupRole.HISPARSE_INDEXER
    source = kv.KVCacheGroupSpec(
        ["s"],
        kv.MLAAttentionSpec(**rows()),
        role=kv.KVCacheGroupRole.HISPARSE_SOURCE,
        host_resident=True,
    )
    hot = kv.HiSparseHotSpec(block_size=16, page_size=4096, blocks_per_request=2)
    resident = kv.HiSparseResidentSpec(block_size=16, page_size=4096)
    config.kv_cache_groups = [
        source,
        indexer,
        kv.KVCacheGroupSpec(["s.resident"], resident, enable_kv_transfer=False),
        kv.KVCacheGroupSpec(["s.hot"], hot, enable_kv_transfer=False),
    ]
    config.hisparse_host_num_blocks = 8


EXACT, NAMESPACED, REFUSED = "exact", "namespaced", "refused"
UNREGISTERED = "Unsupported KV cache spec type for layer a"
LEFT_OUT = r"kvtier needs all KV cache groups .*, vLLM offers groups \[1\] only"
NOTHING = "KV offloading found no eligible cache groups"

KINDS = [
    Kind(
        "FullAttentionSpec",
        EXACT,
        lambda kv, tp: dict.fromkeys("ab", kv.FullAttentionSpec(**heads(tp))),
    ),
    Kind(  # a scale for each token and head lies beside the values
        "FullAttentionSpec",
        NAMESPACED,
        lambda kv, tp: {
            "a": kv.FullAttentionSpec(
                **heads(tp, state_content_bytes=136),
                kv_quant_mode=kv.KVQuantMode.INT8_PER_TOKEN_HEAD,
            )
        },
    ),
    Kind(
        "RSWASpec",
        EXACT,
        lambda kv, tp: {"a": kv.RSWASpec(**heads(tp), rswa_window=64)},
    ),
    Kind(
        "SinkFullAttentionSpec",
        EXACT,
        lambda kv, tp: {"a": kv.SinkFullAttentionSpec(**heads(tp), sink_len=4)},
    ),
    Kind(
        "MLAAttentionSpec",
        EXACT,
        lambda kv, tp: dict.fromkeys("ab", kv.MLAAttentionSpec(**rows())),
    ),
    Kind(  # one row for four tokens
        "MLAAttentionSpec",
        NAMESPACED,
        lambda kv, tp: {"a": kv.MLAAttentionSpec(**rows(), tokens_per_state=4)},
    ),
    Kind(
        "HiddenStateCacheSpec",
        EXACT,
        lambda kv, tp: {"a": kv.HiddenStateCacheSpec(**rows(256))},
    ),
    Kind(
        "SlidingWindowSpec",
        EXACT,
        lambda kv, tp: {
            "a": kv.SlidingWindowSpec(**heads(tp), sliding_window=64),
            "b": kv.FullAttentionSpec(**heads(tp)),
        },
        windows=(2, None),
    ),
    Kind(
        "SlidingWindowMLASpec",
        NAMESPACED,
        lambda kv, tp: {"a": kv.SlidingWindowMLASpec(**rows(), sliding_window=64)},
        windows=(2,),
    ),
    Kind(  # replayed after a hit instead
        "SlidingWindowMLASpec",
        REFUSED,
        lambda kv, tp: {
            "a": kv.SlidingWindowMLASpec(**rows(), sliding_window=64, bounded_replay=True)
        },
        message=NOTHING,
    ),
    Kind(
        "ChunkedLocalAttentionSpec",
        EXACT,
        lambda kv, tp: {
            "a": kv.ChunkedLocalAttentionSpec(**heads(tp), attention_chunk_size=64),
            "b": kv.FullAttentionSpec(**heads(tp)),
        },
        windows=(2, None),
    ),
    Kind(
        "MambaSpec",
        NAMESPACED,
        lambda kv, tp: {
            "a": kv.MambaSpec(**state(page=8192 // tp)),
            "b": kv.FullAttentionSpec(**heads(tp)),
        },
        windows=(1, None),
    ),
    Kind(
        "UniformTypeKVCacheSpecs",
        EXACT,
        lambda kv, tp: {
            "a": kv.MLAAttentionSpec(**rows()),
            "b": kv.MLAAttentionSpec(**rows(20), cache_role=kv.SparseCacheRole.INDEXER),
        },
    ),
    Kind(  # the pages of all layers side by side in each block
        "UniformTypeKVCacheSpecs",
        NAMESPACED,
        lambda kv, tp: {
            "a": kv.MLAAttentionSpec(**rows()),
            "b": kv.MLAAttentionSpec(**rows(20), cache_role=kv.SparseCacheRole.INDEXER),
        },
        options={"layout": "BLHNC"},
    ),
    Kind(
        "CircularBufferSpec",
        REFUSED,
        lambda kv, tp: {"a": kv.CircularBufferSpec(**rows())},
        message=NOTHING,
    ),
    Kind(
        "CrossAttentionSpec",
        REFUSED,
        lambda kv, tp: {"a": kv.CrossAttentionSpec(**heads(tp))},
        message="layer a: kvtier cannot offload KV of class CrossAttentionSpec",
    ),
    Kind(
        "EncoderOnlyAttentionSpec",
        REFUSED,
        lambda kv, tp: {"a": kv.EncoderOnlyAttentionSpec(**heads(tp))},
        message=UNREGISTERED,
    ),
    Kind(
        "HiSparseHotSpec",
        REFUSED,
        lambda kv, tp: {"a": kv.MLAAttentionSpec(**rows())},
        options={"alter": hisparse},
        message=LEFT_OUT,
    ),
    Kind(
        "HiSparseResidentSpec",
        REFUSED,
        lambda kv, tp: {"a": kv.MLAAttentionSpec(**rows())},
        options={"alter": hisparse},
        message=LEFT_OUT,
    ),
    Kind(
        "AttentionSpec",
        REFUSED,
        lambda kv, tp: {"a": kv.AttentionSpec(**heads(tp))},
        message=UNREGISTERED,
    ),
    Kind(
        "KVCacheSpec",
        REFUSED,
        lambda kv, tp: {"a": kv.KVCacheSpec(block_size=16)},
        message=UNREGISTERED,
    ),
]


def deepseek_v4(kv: Any, tp: int) -> dict[str, Any]:
    """Compressed latent rows, windows of latent rows, indexer, and the compressors' states."""
    import torch  # lazy: as above

    packed = {"state_content_bytes": 73, "alignment": 72, "model_version": "deepseek_v4"}
    floats = {"dtype": torch.float32, "alignment": 72}
    specs: dict[str, Any] = {}
    for layer in range(4):
        name = f"model.layers.{layer}.attn"
        ratio = 4 if layer % 2 == 0 else 32
        specs[f"{name}.swa_cache"] = kv.SlidingWindowMLASpec(
            **uint8(block_size=16, sliding_window=32, **packed)
        )
        specs[name] = kv.MLAAttentionSpec(**uint8(block_size=64, tokens_per_state=ratio, **packed))
        specs[f"{name}.compressor"] = kv.SlidingWindowMLASpec(
            **rows(64, block_size=4 if ratio == 4 else 8, sliding_window=2 * ratio) | floats
        )
        if ratio == 4:
            specs[f"{name}.indexer.k_cache"] = kv.MLAAttentionSpec(
                **uint8(width=33, block_size=64, tokens_per_state=4, alignment=72)
            )
            specs[f"{name}.indexer.compressor"] = kv.SlidingWindowMLASpec(
                **rows(16, block_size=4, sliding_window=8) | floats
            )
    return specs


def glm_53(kv: Any, tp: int) -> dict[str, Any]:
    """Sparse latent rows and the indexer of every other layer."""
    specs: dict[str, Any] = {}
    for layer in range(4):
        name = f"model.layers.{layer}.self_attn"
        leads = layer % 2 == 0
        specs[f"{name}.attn"] = kv.MLAAttentionSpec(
            **uint8(state_content_bytes=82, is_index_group_leader=leads)
        )
        if leads:
            specs[f"{name}.indexer.k_cache"] = kv.MLAAttentionSpec(
                **uint8(width=17, cache_role=kv.SparseCacheRole.INDEXER)
            )
    return specs


def glm_53_flash(kv: Any, tp: int) -> dict[str, Any]:
    """The same with pooled indexer keys, and the ring of those that are not pooled yet."""
    specs = glm_53(kv, tp)
    for name in [name for name in specs if name.endswith("k_cache")]:
        specs[name] = kv.MLAAttentionSpec(**uint8(width=17, tokens_per_state=4))
        specs[name.replace("k_cache", "tail_cache")] = kv.CircularBufferSpec(
            **heads(2, head_size=16, head_size_v=0, block_size=8, dcp_sharded=False)
        )
    return specs


def nemotron_3(kv: Any, tp: int) -> dict[str, Any]:
    """Mamba-2 in most layers, attention in some; vLLM pads the states to the attention's pages."""
    attention = kv.FullAttentionSpec(**heads(tp))
    specs = {f"m{layer}": kv.MambaSpec(**state(page=8192 // tp)) for layer in range(7)}
    return specs | {f"a{layer}": attention for layer in range(2)}


def sizes_apart(kv: Any, tp: int) -> dict[str, Any]:
    """Blocks of 4, 64 and 3,584 tokens."""
    return {
        "w": kv.SlidingWindowSpec(**heads(tp, block_size=4), sliding_window=64),
        "a": kv.FullAttentionSpec(**heads(tp, block_size=64)),
        "m": kv.MambaSpec(**state(3584)),
    }


SETS = {
    "deepseek_v4": (deepseek_v4, {"layout": "BLHNC", "block_size": 64}, (2, 2, None, 2, 8)),
    "glm_53": (glm_53, {}, (None,)),
    "glm_53_flash": (glm_53_flash, {"layout": "BLHNC"}, (None,)),
    "nemotron_3": (nemotron_3, {}, (1, 1, 1, 1, None)),
    "sizes_apart": (sizes_apart, {"layout": "BLHNC", "block_size": 64}, (16, None, 1)),
}
PORTABLE = {"glm_53"}


def documented() -> list[tuple[str, str]]:
    """Class and word of each row of the table."""
    return re.findall(r"^\| `(\w+)`[^|]*\| (\w+) \|", DOCUMENT.read_text(), re.MULTILINE)


@pytest.mark.fault("U06")
def test_every_class_of_the_installed_vllm_is_listed() -> None:
    from vllm.v1 import kv_cache_interface as kv  # lazy: as above

    classes = {
        name
        for name, value in vars(kv).items()
        if inspect.isclass(value) and issubclass(value, kv.KVCacheSpec)
    }
    assert {name for name, _ in documented()} == classes


def test_what_is_listed_is_tested() -> None:
    assert len(KINDS) == len(set(map(str, KINDS)))
    assert {(kind.name, kind.word) for kind in KINDS} == set(documented())


def scheduled(made: Any) -> tuple[int | None, ...]:
    """Windows in chunks as vLLM's scheduler walks them."""
    return tuple(group.sliding_window_size_in_chunks for group in made.scheduled.kv_group_configs)


def round_trip(made: Any, specs: Mapping[str, Any]) -> None:
    """Two chunks of each group leave their blocks and come back to others, byte for byte."""
    rng = np.random.default_rng(1)
    # Of recurrent state vLLM moves one block a chunk, the state at its end.
    moved = [
        1 if getattr(specs[names[0]], "mamba_cache_mode", "") == "align" else made.blocks_per_chunk
        for names in made.groups
    ]
    # Ranks that take turns at writing have the same bytes; ranks with areas of their own need not.
    replicated = {
        name
        for name, spec in specs.items()
        if getattr(spec, "max_tp_shards", None) == 1 and made.workers[0].pages.portable
    }
    groups = range(len(made.groups))
    keys, taken, back = [], [], []
    free = iter(range(1, 1 << 20))
    for group in groups:
        keys += [made.key(group, number) for number in range(2)]
        taken.append([next(free) for _ in range(2 * moved[group])])
    for group in groups:
        back.append([next(free) for _ in range(2 * moved[group])][::-1])
    beside = next(free)
    written: dict[tuple[int, str, int], Any] = {}
    for rank in range(made.parallel.world):
        for group, blocks in enumerate(taken):
            for name in made.groups[group]:
                for place, block in enumerate(blocks):
                    content = rng.integers(0, 256, made.block(rank, name, block).shape, np.uint8)
                    if rank and name in replicated:
                        content = written[0, name, place]
                    made.put(rank, name, block, content)
                    written[rank, name, place] = content
    slots = made.store(keys, taken)
    assert len(set(slots)) == len(keys)
    made.wipe(0x5A)
    made.load(keys, back)
    seen = 0
    for rank in range(made.parallel.world):
        for group, blocks in enumerate(back):
            for name in made.groups[group]:
                for place, block in enumerate(blocks):
                    np.testing.assert_array_equal(
                        made.block(rank, name, block), written[rank, name, place]
                    )
                    seen += 1
                # What nobody asked for is as it was.
                for block in (taken[group][0], beside):
                    assert (made.block(rank, name, block) == 0x5A).all()
    assert seen == len(written) > 0


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.word != REFUSED], ids=str)
def test_a_kind_comes_back_byte_for_byte(kind: Kind, tp: int) -> None:
    from vllm.v1 import kv_cache_interface as kv  # lazy: as above

    from tests.vllm.ranks import Parallel, ranks

    specs = kind.specs(kv, tp)
    options = {"extra": {"blocks_per_chunk": kind.blocks}} | kind.options
    with ranks(specs, Parallel(tp), **options) as made:
        held = [group.kv_cache_spec for group in made.cache_configs[0].kv_cache_groups]
        classes = {type(spec).__name__ for spec in [*specs.values(), *held]}
        assert kind.name in classes
        geometry = made.region.geometry
        assert tuple(group.window_chunks for group in geometry.groups) == kind.windows
        assert scheduled(made) == kind.windows
        namespace = made.region.namespace
        assert namespace["portable"] == str(kind.word == EXACT).lower()
        assert ("topology" in namespace) == (kind.word == NAMESPACED)
        round_trip(made, specs)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.word == REFUSED], ids=str)
def test_a_kind_that_cannot_be_kept_is_refused_at_start(kind: Kind) -> None:
    from vllm.v1 import kv_cache_interface as kv  # lazy: as above

    from kvtier.errors import ConfigError
    from tests.vllm.ranks import ranks

    with (
        pytest.raises((ConfigError, ValueError), match=kind.message) as caught,
        ranks(kind.specs(kv, 1), **kind.options),
    ):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.fault("Y06")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", SETS)
def test_a_set_of_groups_comes_back_byte_for_byte(name: str, tp: int) -> None:
    from vllm.v1 import kv_cache_interface as kv  # lazy: as above

    from tests.vllm.ranks import Parallel, ranks

    make, options, windows = SETS[name]
    specs = make(kv, tp)
    with ranks(specs, Parallel(tp), **options) as made:
        assert tuple(group.window_chunks for group in made.region.geometry.groups) == windows
        assert scheduled(made) == windows
        assert made.region.namespace["portable"] == str(name in PORTABLE).lower()
        offloaded = {layer for group in made.groups for layer in group}
        left = {layer for layer in specs if layer not in offloaded}
        assert left == {layer for layer in specs if layer.endswith("tail_cache")}
        round_trip(made, specs)


def test_a_group_that_vllm_leaves_out_may_not_stand_before_another() -> None:
    """Keys carry vLLM's number of the group, and slots are found by it."""
    from vllm.v1 import kv_cache_interface as kv  # lazy: as above

    from kvtier.errors import ConfigError
    from tests.vllm.ranks import ranks

    specs = {
        "a": kv.CircularBufferSpec(**rows()),
        "b": kv.FullAttentionSpec(**heads(1)),
    }
    with pytest.raises(ConfigError, match=LEFT_OUT), ranks(specs, layout="BLHNC"):
        pass


@pytest.mark.fault("Y02")
@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 63, 64, 65, 200])
def test_windows_are_those_of_vllms_scheduler(window: int, chunk_blocks: int) -> None:
    from vllm.v1 import kv_cache_interface as kv  # lazy: as above

    from tests.vllm.ranks import ranks

    specs = {
        "a": kv.SlidingWindowSpec(**heads(1), sliding_window=window),
        "b": kv.FullAttentionSpec(**heads(1)),
    }
    with ranks(specs, extra={"blocks_per_chunk": chunk_blocks}) as made:
        groups = made.region.geometry.groups
        assert tuple(group.window_chunks for group in groups) == scheduled(made)
        assert scheduled(made) == (-(-window // (16 * chunk_blocks)), None)


def test_windows_that_vllm_keeps_as_full_attention_are_no_windows() -> None:
    """Without its hybrid manager it walks and keeps all layers alike."""
    from vllm.v1 import kv_cache_interface as kv  # lazy: as above

    from tests.vllm.ranks import ranks

    window = kv.SlidingWindowSpec(**heads(1), sliding_window=64)
    specs = {"a": window, "b": window, "c": kv.FullAttentionSpec(**heads(1))}
    for disabled, windows in ((False, (4, 4, None)), (True, (None,))):
        with ranks(specs, disable_hybrid_kv_cache_manager=disabled) as made:
            groups = made.region.geometry.groups
            assert tuple(group.window_chunks for group in groups) == windows
            assert scheduled(made) == windows
            round_trip(made, specs)


def windowed(kv: Any, full: int, windows: int) -> dict[str, Any]:
    """So many layers of full attention, and so many with windows."""
    specs = {f"w{i}": kv.SlidingWindowSpec(**heads(1), sliding_window=64) for i in range(windows)}
    return specs | {f"f{i}": kv.FullAttentionSpec(**heads(1)) for i in range(full)}


def linear(kv: Any) -> dict[str, Any]:
    """The family `linear` with vLLM's block of 640 tokens: three layers with state, one without."""
    import torch  # lazy: as above

    attention = kv.FullAttentionSpec(
        block_size=640, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
    )
    recurrent = kv.MambaSpec(
        block_size=640,
        shapes=((3, 1024), (4, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
        page_size_padded=attention.page_size_bytes,
    )
    return {f"s{i}": recurrent for i in range(3)} | {"a": attention}


def hidden_states(kv: Any) -> dict[str, Any]:
    """Groups of ten layers, and one of a single layer: a tenth of their bytes."""
    return windowed(kv, 10, 50) | {"h": kv.HiddenStateCacheSpec(**rows(256))}


@pytest.mark.parametrize(
    ("make", "options", "spread"),
    [
        (lambda kv: windowed(kv, 1, 5), {}, 1.0),
        (lambda kv: windowed(kv, 10, 52), {}, 10 / 8),
        (linear, {"block_size": 640, "blocks": 16, "kv_heads": 2}, 327680 / 268288),
        (hidden_states, {}, 10.0),
    ],
    ids=["swa", "remainder", "linear", "tenfold"],
)
def test_little_of_any_group_is_padding(
    make: Callable[[Any], dict[str, Any]],
    options: dict[str, Any],
    spread: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However far apart the sizes of chunks are, in a host memory of some dozens of them."""
    from vllm.v1 import kv_cache_interface as kv  # lazy: as above

    from tests.vllm import ranks

    monkeypatch.setattr(ranks, "CAPACITY_BYTES", 32 << 20)
    with ranks.ranks(make(kv), **options) as made:
        payloads = made.region.geometry.payload_bytes
        assert max(payloads) / min(payloads) == pytest.approx(spread)
        assert max(made.region.geometry.padding_ratio) <= 0.15
