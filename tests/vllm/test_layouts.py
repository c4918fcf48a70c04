# SPDX-License-Identifier: Apache-2.0
"""One model's KV under every parallel layout: the same slots, or other namespaces, by name.

The whole model's K and V are arrays; a rank's page and the canonical page are both cut from them by
slicing and transposing alone, while the plans come from vLLM's own mappings. No engine runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvtier.errors import ConfigError
from kvtier.namespace import decode_json, difference

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]

Bytes = npt.NDArray[np.uint8]

BLOCK_TOKENS = 16
HEAD_BYTES = 64
"""One K row, or one V row."""
LAYERS = ("a", "b", "c")
BLOCKS = 64
CHUNKS = 2
BLOCKS_PER_CHUNK = 2


class Layout(msgspec.Struct, frozen=True):
    """Order of the bytes of a page."""

    order: Literal["NHD", "HND"]
    """Tokens first (token-major, a head's rows lie apart) or heads first."""
    kv: Literal["packed", "split"]
    """K and V of a row side by side, or K half and V half of a page."""

    @property
    def name(self) -> str:
        """vLLM's name."""
        return {"NHD": "LBNHC", "HND": "LBHNC"}[self.order]

    def __str__(self) -> str:
        return f"{self.order}-{self.kv}"

    def page(self, k: Bytes, v: Bytes) -> bytes:
        """Page of rows ``(heads, tokens, bytes)``, of one rank or of the whole model."""
        if self.order == "NHD":
            k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
        if self.kv == "packed":
            return np.concatenate([k, v], axis=-1).tobytes()
        return k.tobytes() + v.tobytes()

    def view(self, cache: Any) -> Any:
        """What a backend with K and V in halves makes of vLLM's tensor."""
        if self.kv == "packed":
            return cache
        blocks, heads, tokens, content = cache.shape
        size = content // 2
        page = heads * tokens * content
        strides = {
            "NHD": (page, page // 2, heads * size, size, 1),
            "HND": (page, page // 2, size, tokens * size, 1),
        }[self.order]
        return cache.as_strided((blocks, 2, tokens, heads, size), strides)


LAYOUTS = [
    Layout(order, kv)
    for order in ("HND", "NHD")
    for kv in ("packed", "split")  # type: ignore[arg-type]
]
LATENT = "latent"


class Model:
    """K and V of `blocks` blocks, ``(blocks, heads, tokens, bytes)``; or latent rows."""

    def __init__(self, heads: int, tokens: int = BLOCK_TOKENS) -> None:
        self.heads = heads
        self.tokens = tokens
        self.blocks = CHUNKS * BLOCKS_PER_CHUNK
        rng = np.random.default_rng(7)
        shape = (len(LAYERS), 2, self.blocks, heads, tokens, HEAD_BYTES)
        self.kv = rng.integers(0, 256, shape, np.uint8)

    def part(
        self, layer: int, block: int, parallel: Any = None, rank: int = 0
    ) -> tuple[Bytes, Bytes]:
        """K and V rows that a rank has of a block; all of them without `parallel`."""
        k, v = self.kv[layer, :, block]
        if parallel is None:
            return k, v
        copies = max(1, parallel.tp // self.heads)
        shards = np.array_split(np.arange(self.heads), parallel.tp // copies)
        heads = shards[rank % parallel.tp // copies]
        turn = np.arange(self.tokens) // parallel.interleave % parallel.dcp
        tokens = np.flatnonzero(turn == rank % parallel.dcp)
        return k[heads][:, tokens], v[heads][:, tokens]

    def chunk(self, layout: Layout, number: int) -> bytes:
        """Canonical bytes of a chunk."""
        first = number * BLOCKS_PER_CHUNK
        return b"".join(
            layout.page(*self.part(layer, block))
            for block in range(first, first + BLOCKS_PER_CHUNK)
            for layer in range(len(LAYERS))
        )


def sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


class Instance:
    """One engine's ranks, and the model's KV in them."""

    def __init__(self, made: Any, model: Model, layout: Layout, stages: list[tuple[int, ...]]):
        self.made = made
        self.model = model
        self.layout = layout
        self.stages = stages
        """Layers of each rank."""
        self.keys = [made.key(0, number) for number in range(CHUNKS)]

    @property
    def namespace(self) -> dict[str, str]:
        return dict(self.made.region.namespace)

    def local(self, rank: int, layer: int, block: int) -> Bytes:
        """Page of a rank as its bytes lie in memory."""
        page = self.layout.page(*self.model.part(layer, block, self.made.parallel, rank))
        return np.frombuffer(page, np.uint8)

    def memory(self, rank: int, layer: int) -> Bytes:
        """Pages of a layer as they lie in memory, ``(blocks, bytes)``; writable."""
        from tests.vllm.ranks import memory  # lazy: vLLM takes seconds

        cache = self.made.caches[rank][LAYERS[layer]]
        size = cache.stride(0) * cache.element_size()
        start = cache.storage_offset() * cache.element_size()
        flat = memory(cache)[start : start + size * len(cache)]
        return flat.reshape(len(cache), size)

    def pages(self) -> Iterator[tuple[int, int]]:
        for rank, layers in enumerate(self.stages):
            for layer in layers:
                yield rank, layer

    def write(self) -> list[int]:
        """Store the model's KV from blocks 1 and following; returns the slots."""
        taken = range(1, 1 + self.model.blocks)
        for rank, layer in self.pages():
            pages = self.memory(rank, layer)
            for place, block in enumerate(taken):
                pages[block] = self.local(rank, layer, place)
        slots: list[int] = self.made.store(self.keys, [list(taken)])
        # Each byte once: ranks with the same bytes take turns.
        stored = [worker.stored_bytes for worker in self.made.workers]
        assert sum(stored) == CHUNKS * self.made.region.geometry.payload_bytes[0]
        return slots

    def read(self) -> None:
        """Load the chunks into other blocks, and compare all of the memory."""
        back = range(40, 40 - self.model.blocks, -1)
        self.made.wipe(0x5A)
        self.made.load(self.keys, [list(back)])
        compared = 0
        for rank, layer in self.pages():
            pages = self.memory(rank, layer)
            for place, block in enumerate(back):
                np.testing.assert_array_equal(pages[block], self.local(rank, layer, place))
                compared += 1
            others = np.setdiff1d(np.arange(len(pages)), back)
            assert (pages[others] == 0x5A).all()
        assert compared == self.model.blocks * sum(map(len, self.stages))


@contextlib.contextmanager
def instance(
    layout: Layout,
    parallel: Any,
    heads: int = 4,
    stages: tuple[tuple[int, ...], ...] = (tuple(range(len(LAYERS))),),
    **options: Any,
) -> Iterator[Instance]:
    """An engine whose layers have `heads` KV heads; `stages` are the layers of each stage."""
    import torch  # lazy: as above
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from tests.vllm.ranks import ranks

    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=max(1, heads // parallel.tp),
        head_size=HEAD_BYTES // 2,
        dtype=torch.bfloat16,
    )
    layers = [stages[rank // parallel.tp] for rank in range(parallel.world)]
    options = {"extra": {}} | options
    extra = {"blocks_per_chunk": BLOCKS_PER_CHUNK} | options.pop("extra")
    with ranks(
        lambda rank: {LAYERS[layer]: spec for layer in layers[rank]},
        parallel,
        layout=layout.name,
        kv_heads=heads,
        view=layout.view,
        blocks=BLOCKS,
        extra=extra,
        **options,
    ) as made:
        yield Instance(made, Model(heads, BLOCK_TOKENS * parallel.dcp), layout, layers)


@pytest.mark.fault("C04", "C09", "P07")
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_number_of_ranks_writes_the_same_slots_and_reads_those_of_any_other(
    layout: Layout, heads: int
) -> None:
    from tests.vllm.ranks import Parallel  # lazy: as above

    expected = [sha256(Model(heads).chunk(layout, number)) for number in range(CHUNKS)]
    assert len(set(expected)) == CHUNKS
    with contextlib.ExitStack() as stack:
        # With 2 heads the last two have more ranks than heads; with 4 the last one does.
        engines = [
            stack.enter_context(instance(layout, Parallel(tp), heads)) for tp in (1, 2, 4, 8)
        ]
        written = [engine.write() for engine in engines]
        for engine, slots in zip(engines, written, strict=True):
            assert [sha256(engine.made.payload(0, slot)) for slot in slots] == expected
            assert engine.namespace == engines[0].namespace
            assert engine.namespace["portable"] == "true"
            assert "topology" not in engine.namespace
        for writer, reader in itertools.permutations(range(len(engines)), 2):
            for source, target in zip(written[writer], written[reader], strict=True):
                foreign = bytes(engines[writer].made.payload(0, source))
                engines[reader].made.payload(0, target)[:] = foreign
            engines[reader].read()


@pytest.mark.fault("C05")
def test_other_orders_of_a_page_are_kept_apart_by_name() -> None:
    from tests.vllm.ranks import Parallel  # lazy: as above

    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(instance(layout, Parallel(2))) for layout in LAYOUTS]
        chunks = {sha256(engine.made.payload(0, engine.write()[0])) for engine in engines}
        assert len(chunks) == len(LAYOUTS)
        for one, other in itertools.combinations(engines, 2):
            assert difference(one.namespace, other.namespace) == ["tile_format"]


@pytest.mark.fault("R04")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_of_a_context_interleave_their_tokens_in_one_slot(layout: Layout) -> None:
    from tests.vllm.ranks import Parallel  # lazy: as above

    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(instance(layout, parallel))
            for parallel in (
                Parallel(8, dcp=2),
                Parallel(8, dcp=2, interleave=4),
                Parallel(8, dcp=2, interleave=16),
            )
        ]
        for engine in engines:
            slots = engine.write()
            content = [bytes(engine.made.payload(0, slot)) for slot in slots]
            assert content == [engine.model.chunk(layout, number) for number in range(CHUNKS)]
            engine.read()
        for one, other in itertools.combinations(engines, 2):
            # vLLM says that it is bound to the topology, and so it is kept.
            assert difference(one.namespace, other.namespace) == ["topology"]
        plain = stack.enter_context(instance(layout, Parallel(8)))
        assert set(difference(plain.namespace, engines[0].namespace)) == {
            "groups",
            "portable",
            "tokens_per_hash",
            "topology",
        }


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stages_have_areas_of_their_own(layout: Layout, tp: int) -> None:
    from tests.vllm.ranks import Parallel  # lazy: as above

    parallel = Parallel(tp, pp=2)
    divisions = [((0, 1), (2,)), ((0,), (1, 2))]
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(instance(layout, parallel, stages=stages)) for stages in divisions
        ]
        for engine in engines:
            model = engine.model
            slots = engine.write()
            content = [bytes(engine.made.payload(0, slot)) for slot in slots]
            assert content == [
                b"".join(
                    engine.local(rank, layer, number * BLOCKS_PER_CHUNK + block).tobytes()
                    for block in range(BLOCKS_PER_CHUNK)
                    for rank, layer in engine.pages()
                )
                for number in range(CHUNKS)
            ]
            # The same bytes as one rank has, in the order of the ranks.
            assert [len(one) for one in content] == [len(model.chunk(layout, 0))] * CHUNKS
            engine.read()
        # Other divisions of the layers into stages do not share, although all sizes are equal.
        assert difference(engines[0].namespace, engines[1].namespace) == ["groups"]
        flat = stack.enter_context(instance(layout, Parallel(tp)))
        assert difference(flat.namespace, engines[0].namespace) == [
            "groups",
            "portable",
            "topology",
        ]


def test_a_stage_without_a_layer_of_a_group_is_refused_on_every_rank() -> None:
    import torch  # lazy: as above
    from vllm.v1 import kv_cache_interface as kv

    from kvtier.errors import ConfigError
    from tests.vllm.ranks import Parallel, ranks

    shape: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 4,
        "head_size": 32,
        "dtype": torch.bfloat16,
    }
    full = kv.FullAttentionSpec(**shape)
    window = kv.SlidingWindowSpec(**shape, sliding_window=64)
    with (
        pytest.raises(ConfigError, match="a pipeline stage has no layer of a KV cache group: a"),
        ranks(lambda rank: {"ab"[rank]: (full, window)[rank]}, Parallel(1, pp=2)),
    ):
        pass


@pytest.mark.fault("H11")
@pytest.mark.parametrize("refusing", [0, 1])
def test_a_stage_that_refuses_has_told_the_others_its_sizes(
    refusing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one collective call comes before anything that can fail on one stage alone."""
    from kvtier.vllm import spec  # lazy: as above
    from tests.vllm.ranks import Parallel, Ranks  # lazy: as above

    asked: list[Any] = []
    windows, areas = spec.window_chunks, Ranks._stage_areas

    def window(config: Any, *arguments: Any) -> int | None:
        if config.parallel_config.rank == refusing:
            raise ConfigError("a layer of this stage cannot be had")
        return windows(config, *arguments)

    def stage_areas(made: Any, mine: Any) -> Any:
        asked.append(mine)
        return areas(made, mine)

    monkeypatch.setattr(spec, "window_chunks", window)
    monkeypatch.setattr(Ranks, "_stage_areas", stage_areas)
    with (
        pytest.raises(ConfigError, match="cannot be had"),
        instance(LAYOUTS[0], Parallel(1, pp=2), stages=((0, 1), (2,))),
    ):
        pass
    # The ranks are started one after the other here, the last of them is the one that refuses.
    assert len(asked) == refusing + 1


@pytest.mark.fault("R02")
def test_each_rank_of_two_stages_of_two_has_a_line_and_an_area_of_its_own() -> None:
    from tests.vllm.ranks import Parallel  # lazy: as above

    with instance(LAYOUTS[0], Parallel(2, pp=2), stages=((0, 1), (2,))) as engine:
        region = engine.made.region
        assert [worker.rank for worker in engine.made.workers] == [0, 1, 2, 3]
        assert region.ranks == 4
        assert region.unsigned() == []
        # Nobody takes the line of a rank with the same number in another stage.
        script = (
            "import sys; from kvtier.host.region import Region\n"
            "region = Region.attach(sys.argv[1], directory=sys.argv[2])\n"
            "for rank in range(4):\n"
            "    try: region.sign(rank)\n"
            "    except Exception as exc: print(type(exc).__name__, exc)\n"
        )
        said = subprocess.run(
            [sys.executable, "-c", script, region.name, str(Path(region.path).parent)],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.splitlines()
        assert len(said) == 4
        for rank, line in enumerate(said):
            assert line.startswith(f"ConfigError rank {rank} of the region")
            assert "has been signed for by process" in line


@pytest.mark.fault("U05")
def test_the_namespace_does_not_depend_on_who_runs_the_worker() -> None:
    """In the scheduler's process or in one of its own; and the manager has what the workers say."""
    from tests.vllm.ranks import Parallel  # lazy: as above

    seen = []
    for executor in ("uni", "mp"):
        with instance(LAYOUTS[0], Parallel(), executor=executor) as engine:
            parallel = engine.made.configs[0].parallel_config
            assert parallel.distributed_executor_backend == executor
            assert dict(engine.made.manager.region.namespace) == engine.namespace
            seen.append(engine.namespace)
    assert seen[0] == seen[1]
    with instance(LAYOUTS[0], Parallel(2)) as engine:
        assert dict(engine.made.manager.region.namespace) == engine.namespace == seen[0]


class Latent(Layout, frozen=True):
    """Latent rows: no heads and no V, the same on all ranks."""

    def page(self, k: Bytes, v: Bytes) -> bytes:
        return k[0].tobytes()

    def view(self, cache: Any) -> Any:
        return cache


@contextlib.contextmanager
def latent(parallel: Any, **options: Any) -> Iterator[Instance]:
    """An engine with latent attention."""
    import torch  # lazy: as above
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from tests.vllm.ranks import ranks

    spec = MLAAttentionSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=1,
        head_size=HEAD_BYTES // 2,
        dtype=torch.bfloat16,
        max_tp_shards=1,
    )
    extra = {"blocks_per_chunk": BLOCKS_PER_CHUNK} | options.pop("extra", {})
    everything = tuple(range(len(LAYERS)))
    with ranks(
        dict.fromkeys(LAYERS, spec), parallel, kv_heads=1, blocks=BLOCKS, extra=extra, **options
    ) as made:
        model = Model(1, BLOCK_TOKENS * parallel.dcp)
        yield Instance(made, model, Latent("HND", "packed"), [everything] * parallel.world)


@pytest.mark.fault("C09", "P07", "R11")
def test_latent_rows_are_stored_once_whatever_the_number_of_ranks() -> None:
    from tests.vllm.ranks import Parallel  # lazy: as above

    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(latent(Parallel(tp))) for tp in (1, 2, 4, 8)]
        written = [engine.write() for engine in engines]
        expected = [engines[0].model.chunk(engines[0].layout, number) for number in range(CHUNKS)]
        for engine, slots in zip(engines, written, strict=True):
            assert [bytes(engine.made.payload(0, slot)) for slot in slots] == expected
            assert engine.namespace == engines[0].namespace
            assert engine.namespace["portable"] == "true"
        for writer, reader in itertools.permutations(range(len(engines)), 2):
            for source, target in zip(written[writer], written[reader], strict=True):
                foreign = bytes(engines[writer].made.payload(0, source))
                engines[reader].made.payload(0, target)[:] = foreign
            engines[reader].read()


@pytest.mark.fault("R04")
def test_a_context_interleaves_latent_rows() -> None:
    from tests.vllm.ranks import Parallel  # lazy: as above

    for interleave in (1, 4):
        with latent(Parallel(4, dcp=2, interleave=interleave)) as engine:
            slots = engine.write()
            assert [bytes(engine.made.payload(0, slot)) for slot in slots] == [
                engine.model.chunk(engine.layout, number) for number in range(CHUNKS)
            ]
            engine.read()


def answer(engine: Instance, key: bytes) -> str:
    """What vLLM hears of a key once the tiers have said what they have."""
    from vllm.v1.kv_offload.base import ReqContext  # lazy: as above

    manager = engine.made.manager
    context = ReqContext(req_id="asks")
    manager.on_new_request(context)
    deadline = time.monotonic() + 20
    while (said := manager.lookup(key, context).name) not in ("HIT", "MISS"):
        assert time.monotonic() < deadline
        manager.on_schedule_end(None)
        time.sleep(0.005)
    return str(said)


def settle(engine: Instance) -> None:
    """Wait until the tiers have what they were sent."""
    deadline = time.monotonic() + 20
    while not engine.made.manager.engine.idle:
        assert time.monotonic() < deadline
        engine.made.manager.on_schedule_end(None)
        time.sleep(0.005)


def files(root: Path) -> Mapping[str, Any]:
    """Of an engine with a directory of files, in this process."""
    tier = {"type": "fs", "root_dir": str(root)}
    return {"secondary_tiers": [tier], "isolation": "thread", "lookup_timeout_seconds": 10.0}


@pytest.mark.fault("C05", "P07")
@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_files_serve_other_numbers_of_ranks_and_no_other_tile_format(
    kind: str, tmp_path: Path
) -> None:
    from tests.vllm.ranks import Backend, Parallel  # lazy: as above

    class Other(Backend):
        """Another kernel with pages of the same size."""

    def start(tp: int, isa: str = "amx", backend: type = Backend) -> Any:
        options = {"isa": isa, "backend": backend, "extra": files(tmp_path)}
        if kind == "latent":
            return latent(Parallel(tp), **options)
        return instance(LAYOUTS[0], Parallel(tp), **options)

    with start(2) as engine:
        engine.write()
        settle(engine)
    for tp in (1, 2, 8):
        with start(tp) as engine:
            assert [answer(engine, key) for key in engine.keys] == ["HIT"] * CHUNKS
            engine.read()
    (mine,) = tmp_path.glob("*/namespace.json")
    for isa, backend in (("vec", Backend), ("amx", Other)):
        before = set(tmp_path.glob("*/namespace.json"))
        with start(2, isa, backend) as engine:
            assert [answer(engine, key) for key in engine.keys] == ["MISS"] * CHUNKS
            engine.write()
            settle(engine)
        (other,) = set(tmp_path.glob("*/namespace.json")) - before
        fields = decode_json(other.read_bytes())
        assert difference(decode_json(mine.read_bytes()), fields) == ["tile_format"]
        assert isa in json.loads(fields["tile_format"])[0].split("/")
    # What the others wrote has changed nothing.
    with start(1) as engine:
        assert [answer(engine, key) for key in engine.keys] == ["HIT"] * CHUNKS
        engine.read()


@pytest.mark.fault("C09")
def test_state_of_another_number_of_ranks_is_not_found(tmp_path: Path) -> None:
    """Areas of ranks have equal sizes at every number of ranks, and other bytes."""
    import torch  # lazy: as above
    from vllm.v1.kv_cache_interface import MambaSpec

    from tests.vllm.ranks import Parallel, ranks

    names = {}
    for tp in (1, 2):
        spec = MambaSpec(
            block_size=BLOCK_TOKENS,
            shapes=((4 // tp, 64),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
        with ranks({"a": spec}, Parallel(tp), extra=files(tmp_path)) as made:
            engine = Instance(made, Model(1), LAYOUTS[0], [()])
            assert [answer(engine, key) for key in engine.keys] == ["MISS"] * CHUNKS
            made.store(engine.keys, [[1, 2]])
            settle(engine)
            assert made.region.geometry.payload_bytes == (1024,)
            names[tp] = engine.namespace
    assert difference(names[1], names[2]) == ["topology"]
