# SPDX-License-Identifier: Apache-2.0
"""Every family of models reloads exactly: from host memory, from files, and after a restart.

In one process prompts are answered cold, from the device's own cache (the control), from host
memory and from the files; there the damage is done too. Then its files are read by another one:
after its end, or beside it. The device's blocks are overwritten before each reload, and counters
say where its bytes came from.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.host import region
from kvtier.tiers.fs.naming import chunk_path
from tests.vllm.engine import Engine, Processes
from tests.vllm.models import FAMILIES
from tests.vllm.test_slice import environment, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HOST_BYTES = 64 << 20
WINDOW_TOKENS = FAMILIES["swa"]["sliding_window"]


class Case(msgspec.Struct, frozen=True):
    """One engine. How many tokens a block has, vLLM says: it differs between processors (16 or 128
    for latent attention, and as many as make a block as large as a recurrent state)."""

    family: str
    blocks_per_chunk: int
    tokens: int
    """Of the prompt, as far as they fill four blocks and four again."""
    device_blocks: int
    max_model_len: int
    portable: bool = True

    def __str__(self) -> str:
        return f"{self.family}-bpc{self.blocks_per_chunk}"


CASES = [
    case
    for per_chunk in (1, 4)
    for case in (
        Case("full", per_chunk, tokens=1024, device_blocks=16, max_model_len=1280),
        # Five groups with a window of 256 tokens, one without; room for one prompt of 8,000 tokens.
        Case("swa", per_chunk, tokens=1024, device_blocks=400, max_model_len=8192),
        Case("mla", per_chunk, tokens=512, device_blocks=48, max_model_len=640),
        # Three groups with a recurrent state, one with attention.
        Case(
            "linear", per_chunk, tokens=2560, device_blocks=24, max_model_len=3456, portable=False
        ),
    )
]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two answers have the same tokens, each with the same probability to four digits."""
    return left["tokens"] == right["tokens"] and all(
        abs(one - other) < 5e-5
        for one, other in zip(left["logprobs"], right["logprobs"], strict=True)
    )


class Source(msgspec.Struct, frozen=True):
    """Where the bytes of a run came from."""

    promoted: int
    """Chunks promoted from the tier."""
    loads: list[list[int]]
    """Chunks and blocks loaded from host memory, by group."""
    loaded_bytes: int
    corrupt: int


class Served:
    """An engine of a case.

    Attributes
    ----------
    tokens : list of int
        The prompt.
    cold, control : dict
        Its answers without any cache, and with its prefix in the device's.
    keys, other : list of list of str
        Its chunks by group, and those of another prompt.
    written : list of set of str
        Digests of the device's blocks after the cold run, as each group sees them.
    """

    def __init__(
        self,
        case: Case,
        model: Path,
        shm: Path,
        files: Path,
        tier: dict[str, Any] | None = None,
    ) -> None:
        self.case = case
        self.model = model
        self.shm = shm
        self.files = files
        self.tier = tier or {"type": "fs", "root_dir": str(files), "capacity_bytes": "1GiB"}
        self.engine: Engine | None = None

    def start(self, engine: Engine, device_cache: bool) -> None:
        case = self.case
        self.engine = engine
        started = engine.start(
            model=str(self.model),
            blocks=case.device_blocks,
            max_model_len=case.max_model_len,
            device_cache=device_cache,
            extra={
                "cpu_bytes_to_use": HOST_BYTES,
                "blocks_per_chunk": case.blocks_per_chunk,
                "directory": str(self.shm),
                "on_reset": "keep",
                "secondary_tiers": [self.tier],
            },
        )
        engine.call("note_requests")
        self.probe("kvt_loads")
        state = self.probe("kvt_state")
        self.block_tokens = started["block_size"]
        self.block_bytes: list[int] = state["block_bytes"]
        self.payload_bytes: list[int] = state["payload_bytes"]
        self.windows: list[int | None] = state["windows"]
        self.chunk_tokens = self.block_tokens * case.blocks_per_chunk
        assert state["portable"] == case.portable
        assert state["chunk_tokens"] == [self.chunk_tokens] * len(self.windows)
        self.tokens = self.a_prompt(1)
        self.cached, _ = self.expected(self.tokens)

    def stop(self) -> None:
        """End the engine; its process stays."""
        if self.engine is not None:
            self.engine.call("stop")
            self.engine = None
            assert list(self.shm.iterdir()) == []

    def call(self, method: str, **arguments: Any) -> Any:
        assert self.engine is not None
        return self.engine.call(method, **arguments)

    def probe(self, name: str, *arguments: Any) -> Any:
        (answer,) = self.call("rpc", name=name, arguments=list(arguments))
        return answer

    def a_prompt(self, seed: int, tokens: int | None = None) -> list[int]:
        whole = self.case.tokens // (4 * self.block_tokens) * 4 * self.block_tokens
        return prompt(seed, tokens or whole + min(24, self.block_tokens // 2))

    def expected(self, tokens: list[int]) -> tuple[int, list[list[int]]]:
        """How many of the tokens a reload brings, and of each group how many chunks and blocks."""
        cached = len(tokens) // self.chunk_tokens * self.chunk_tokens
        assert cached < len(tokens)  # vLLM computes one token at least, and then asks otherwise
        loads = []
        for window in self.windows:
            if window is None:
                first = 0
            elif self.case.family == "swa":
                first = max(0, cached - WINDOW_TOKENS + 1)
            else:
                first = cached - 1  # one state
            loads.append(
                [
                    (cached - 1) // size - first // size + 1
                    for size in (self.chunk_tokens, self.block_tokens)
                ]
            )
        return cached, loads

    def run(self, tokens: list[int] | None = None) -> dict[str, Any]:
        (answer,) = self.call("generate", prompts=[tokens or self.tokens], max_tokens=4)
        return answer

    def empty_device(self) -> None:
        """Nothing of it is found, and nothing of it is left."""
        assert self.call("reset")
        self.probe("kvt_wipe")

    def empty_host(self) -> None:
        """Host memory forgets everything; the tier keeps it."""
        self.call("settle")
        assert self.call("reset", connector=True)
        assert self.call("settle")["ready"] == 0

    def source(self, run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], Source]:
        """An answer, and where its prefix came from."""
        name = self.tier["type"]
        before = self.call("settle")
        loaded = self.probe("kvt_state")["loaded_bytes"]
        self.probe("kvt_loads")
        answer = run()
        loads = self.probe("kvt_loads")
        after = self.call("settle")
        return answer, Source(
            after["tier_hits"][name] - before["tier_hits"][name],
            loads,
            self.probe("kvt_state")["loaded_bytes"] - loaded,
            sum(after["corrupt"].values()) - sum(before["corrupt"].values()),
        )

    def reload(self, files: bool = False, tokens: list[int] | None = None) -> dict[str, Any]:
        """The prompt, with its prefix from host memory, or from the tier's `files` alone."""
        if files:
            self.empty_host()
        self.empty_device()
        cached, loads = self.expected(tokens or self.tokens)
        answer, source = self.source(lambda: self.run(tokens))
        assert answer["cached"] == cached
        assert source == Source(
            promoted=sum(chunks for chunks, _ in loads) if files else 0,
            loads=loads,
            loaded_bytes=sum(
                blocks * size for (_, blocks), size in zip(loads, self.block_bytes, strict=True)
            ),
            corrupt=0,
        )
        return answer

    def recompute(self) -> tuple[dict[str, Any], Source]:
        """The prompt, with no prefix on the device and a part that is missing elsewhere."""
        self.empty_device()
        answer, source = self.source(self.run)
        assert answer["cached"] == 0
        assert sum(map(sum, source.loads)) == source.loaded_bytes == 0
        return answer, source

    def digests(self) -> list[set[str]]:
        return [set(self.probe("kvt_digests", group)) for group in range(len(self.windows))]

    def assert_same_bytes(self) -> None:
        """The device holds the blocks of the cold run, those that a reload brings."""
        sizes = self.block_bytes
        _, loads = self.expected(self.tokens)
        blocks = [number for _, number in loads]
        for group, digests in enumerate(self.digests()):
            # Groups share the device's memory: the one with the smallest pages can judge them all.
            expected = sum(blocks) if sizes[group] == min(sizes) else blocks[group]
            assert len(self.written[group] & digests) >= expected

    def kinds(self) -> list[int]:
        """A group of each kind."""
        full = [group for group, window in enumerate(self.windows) if window is None]
        windowed = [group for group, window in enumerate(self.windows) if window is not None]
        return full[:1] + windowed[:1]

    def path(self, key: str) -> Path:
        """File of a chunk."""
        (path,) = self.files.glob(f"*/{chunk_path(bytes.fromhex(key))}")
        return path

    def needed(self, group: int) -> str:
        """A chunk without which nothing of the prompt is of use."""
        return self.keys[group][-1 if self.windows[group] else 0]

    def prepare(self) -> None:
        """Cold run, control, and what the damage needs."""
        # As other weights have it: a chunk of each group, under the keys of the prompt.
        self.probe("kvt_turn_weights", 1)
        turned = self.run()
        assert turned["cached"] == 0
        self.call("settle")
        self.keys = self.call("chunks")
        self.chunks = [chunks for chunks, _ in self.expected(self.tokens)[1]]
        assert list(map(len, self.keys)) == self.chunks
        self.probe("kvt_remember", [keys[-1] for keys in self.keys])
        self.probe("kvt_turn_weights", -1)
        self.empty_host()
        for path in self.files.rglob("*.kv"):
            path.unlink()
        self.empty_device()

        wiped = self.digests()
        self.cold = self.run()
        assert self.cold["cached"] == 0
        assert not same(self.cold, turned)
        self.written = [now - before for now, before in zip(self.digests(), wiped, strict=True)]
        self.control, source = self.source(self.run)
        assert self.control["cached"] == self.cached
        assert source.promoted == source.loaded_bytes == 0
        assert self.call("chunks") == self.keys
        self.run(self.a_prompt(2))
        self.call("settle")
        self.other = self.call("chunks")
        assert list(map(len, self.other)) == self.chunks


class Pair:
    """Two processes."""

    def __init__(self, logs: Path, reader: Engine) -> None:
        self._logs = logs
        self._made = 0
        self._writer: Engine | None = None
        self.reader = reader

    @property
    def writer(self) -> Engine:
        """Another one where the last has ended."""
        if self._writer is None:
            self._made += 1
            self._writer = Engine(self._logs / str(self._made), environment(1))
        return self._writer

    def end_writer(self) -> None:
        """Its process, too."""
        if self._writer is not None:
            self._writer.close()
            assert self._writer.process.returncode is not None
            self._writer = None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> Iterator[Pair]:
    with processes.lend() as reader:
        made = Pair(tmp_path_factory.mktemp("engines"), reader)
        try:
            yield made
        finally:
            made.end_writer()


@pytest.fixture(scope="module", params=CASES, ids=str)
def served(
    request: pytest.FixtureRequest,
    pair: Pair,
    checkpoint: Callable[[str], Path],
    shm_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """In the writer's process, with host memory and files filled."""
    case = request.param
    files = tmp_path_factory.mktemp("files")
    made = Served(case, checkpoint(case.family), shm_directory, files)
    made.start(pair.writer, device_cache=True)
    try:
        made.prepare()
        yield made
    finally:
        made.stop()
        shutil.rmtree(files)


def test_latent_rows_of_two_ranks(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path
) -> None:
    """Both ranks have the same rows, and each loads them all."""
    tokens = prompt(1, 330)
    with Engine(tmp_path / "log", environment(2)) as engine:

        def run() -> dict[str, Any]:
            (answer,) = engine.call("generate", prompts=[tokens])
            return answer

        def ranks(name: str, *arguments: Any) -> list[Any]:
            return engine.call("rpc", name=name, arguments=list(arguments))

        def reload() -> dict[str, Any]:
            assert engine.call("reset")
            ranks("kvt_wipe")
            return run()

        block_tokens = engine.start(
            model=str(checkpoint("mla")),
            tp=2,
            blocks=48,
            max_model_len=640,
            device_cache=True,
            extra={"cpu_bytes_to_use": HOST_BYTES, "directory": str(own_shm_directory)},
        )["block_size"]
        chunks = len(tokens) // block_tokens
        ranks("kvt_wipe")
        wiped = [set(digests) for digests in ranks("kvt_digests", 0)]
        assert run()["cached"] == 0
        written = [
            set(digests) - before
            for digests, before in zip(ranks("kvt_digests", 0), wiped, strict=True)
        ]
        assert written[0] == written[1]
        control = run()
        assert control["cached"] == chunks * block_tokens
        assert [state["loaded_chunks"] for state in ranks("kvt_state")] == [0, 0]

        again = reload()
        assert again["cached"] == control["cached"]
        assert same(again, control)
        assert [state["loaded_chunks"] for state in ranks("kvt_state")] == [chunks] * 2
        for mine, digests in zip(written, ranks("kvt_digests", 0), strict=True):
            assert len(mine.intersection(digests)) >= chunks
        ranks("kvt_flip_everywhere", 0)
        assert not same(reload(), control)
        ranks("kvt_flip_everywhere", 0)
        assert same(reload(), control)
    region.sweep(str(own_shm_directory))  # see test_slice


def test_steps_that_end_inside_a_chunk_of_a_window(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path, processes: Processes
) -> None:
    """A window of 256 tokens, blocks of 128, steps of 960. A chunk as long as the window is stored
    whatever the steps; of a longer one vLLM has overwritten the beginning before it was whole, and
    it is a miss, never half a hit."""
    tokens = prompt(5, 2100)
    with processes.lend() as engine:

        def run(seed: list[int]) -> dict[str, Any]:
            (answer,) = engine.call("generate", prompts=[seed], max_tokens=4)
            return answer

        for blocks_per_chunk, lost in ((2, False), (4, True)):
            started = engine.start(
                model=str(checkpoint("swa")),
                blocks=90,
                max_model_len=2304,
                max_num_batched_tokens=960,
                max_num_seqs=1,
                extra={
                    "cpu_bytes_to_use": HOST_BYTES,
                    "blocks_per_chunk": blocks_per_chunk,
                    "directory": str(own_shm_directory),
                },
            )
            assert started["block_size"] * 2 == WINDOW_TOKENS
            cold = run(tokens)
            run(prompt(6, 600))  # the last stores go out with the next step
            (state,) = engine.call("rpc", name="kvt_state")
            assert (state["failed_chunks"] > 0) == lost
            assert engine.call("reset")
            engine.call("rpc", name="kvt_wipe")
            again = run(tokens)
            assert again["cached"] == (0 if lost else 2048)
            assert again["tokens"] == cold["tokens"]
            warned = "blocks_per_chunk up to 2 avoids that" in engine.text()
            assert warned == lost
            engine.call("stop")


@pytest.mark.fault("C04")
def test_from_host_memory(served: Served) -> None:
    for seed in range(10, 30):
        if all(map(set.isdisjoint, served.written, served.digests())):
            break
        served.run(served.a_prompt(seed, served.case.max_model_len - 16))
    else:
        pytest.fail("other prompts do not push the prefix off the device")
    assert same(served.reload(), served.control)
    served.assert_same_bytes()


@pytest.mark.parametrize("kind", ["flip", "heads", "layers", "shift", "exchange", "stale"])
def test_damage_in_host_memory_changes_the_answer(served: Served, kind: str) -> None:
    """Done to one chunk of a group of each kind, where no checksum is in the way."""
    damages = []
    for group in served.kinds():
        mine, other = served.keys[group], served.other[group]
        if kind in ("flip", "heads", "stale"):
            damages.append(mine[-1:])
        elif kind == "exchange":
            damages.append([mine[-1], other[-1]])
        elif kind == "shift" and served.expected(served.tokens)[1][group][1] > 1:
            damages.append(mine[-2:])  # a state has no block before it
    if kind == "layers":
        one_each = len(served.keys) > 1  # a layer in each group
        damages.append([served.keys[0][-1]] + ([served.keys[1][-1]] if one_each else []))
    assert damages
    for keys in damages:
        served.probe("kvt_spoil", kind, keys)
        assert not same(served.reload(), served.control)
        served.probe("kvt_mend")
    # With the damage undone it is the same again: nothing else has made the difference.
    assert same(served.reload(), served.control)


def test_from_files(served: Served) -> None:
    assert same(served.reload(files=True), served.control)
    served.assert_same_bytes()


@pytest.mark.fault("Y08")
def test_only_what_host_memory_lacks_comes_from_files(served: Served) -> None:
    served.reload()
    for group in served.kinds():
        keys = served.keys[group]
        assert served.call("drop", keys=keys) == len(keys)
        served.empty_device()
        answer, source = served.source(served.run)
        assert answer["cached"] == served.cached
        assert source.promoted == len(keys)
        assert [chunks for chunks, _ in source.loads] == served.chunks
        assert same(answer, served.control)


@pytest.mark.fault("Y04")
def test_groups_come_back_together_or_not_at_all(served: Served) -> None:
    """Of one group one chunk is nowhere."""
    served.reload()
    for group in served.kinds():
        needed = served.needed(group)
        served.path(needed).unlink()
        assert served.call("drop", keys=[needed]) == 1
        answer, source = served.recompute()
        assert source.promoted == 0
        assert same(answer, served.cold)
        # It has been stored again.
        assert same(served.reload(), served.control)
        assert same(served.reload(files=True), served.control)


@pytest.mark.fault("Y05", "C26")
@pytest.mark.parametrize("kind", ["flip", "exchange"])
def test_a_damaged_file_is_seen_and_its_chunk_recomputed(served: Served, kind: str) -> None:
    for group in served.kinds():
        needed = served.needed(group)
        path = served.path(needed)
        before = path.read_bytes()
        if kind == "flip":
            place = served.payload_bytes[group] // 2
            path.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
        else:
            # Whole, with a checksum that is right, and of the other prompt.
            path.write_bytes(served.path(served.other[group][-1]).read_bytes())
        served.empty_host()
        answer, source = served.recompute()
        assert source.corrupt == 1
        assert same(answer, served.cold)
        served.call("settle")
        assert path.read_bytes() == before
        assert same(served.reload(files=True), served.control)


@pytest.mark.fault("Y02")
def test_each_group_loads_what_its_window_needs(served: Served) -> None:
    """Of prompts up to the longest one: all of full attention, a window, or one state."""
    case = served.case
    lengths = {
        "full": [served.chunk_tokens + 1, 1200],
        "swa": [1000, 2000, 3000, 4156, 8000],
        "mla": [served.chunk_tokens + 1, 600],
        "linear": [4 * served.block_tokens + 1],
    }[case.family]
    for seed, length in enumerate(lengths, 30):
        tokens = served.a_prompt(seed, length)
        assert served.run(tokens)["cached"] == 0
        served.call("settle")
        answer = served.reload(tokens=tokens)
        assert same(served.reload(files=True, tokens=tokens), answer)
        for window, (chunks, _) in zip(served.windows, served.expected(tokens)[1], strict=True):
            if window is not None:
                assert chunks <= window + 1
    if case.family == "swa":
        assert served.windows[:-1] == [-(-WINDOW_TOKENS // served.chunk_tokens)] * 5


def test_little_of_a_full_host_memory_is_padding(served: Served) -> None:
    """Recurrent states and attention over as many tokens differ in size; windowed groups do not."""
    for seed in range(40, 80):
        served.run(served.a_prompt(seed, served.case.max_model_len - 16))
        state = served.call("settle")
        if state["fill"] > 0.8:  # an eighth may be kept free for loads
            break
    else:
        pytest.fail(f"host memory is not full: {state['fill']}")
    assert 0 <= state["padding"] <= 0.15
    payloads = served.payload_bytes
    if max(payloads) * 0.85 > min(payloads):
        assert len(set(state["widths"])) > 1
    else:
        assert set(state["widths"]) == {1}


@pytest.mark.fault("K03")
def test_another_process_reads_the_files(served: Served, pair: Pair) -> None:
    """The writer's own successor, or an instance beside the writer. A start costs some seconds, so
    that each family has the one with chunks of one block and the other with chunks of four."""
    if served.case.blocks_per_chunk == 1:
        after_a_restart(served, pair)
    else:
        beside_the_writer(served, pair)


def after_a_restart(served: Served, pair: Pair) -> None:
    """The engine and its process have ended before the next engine is made; that one finds the
    files alone, and starts as vLLM does without the tests."""
    served.stop()
    pair.end_writer()
    served.start(pair.reader, device_cache=False)
    answer = served.reload(files=True)
    assert same(answer, served.control)
    served.assert_same_bytes()
    for path in served.files.rglob("*.kv"):
        path.unlink()
    served.empty_host()
    answer, source = served.recompute()
    assert source.promoted == 0
    assert same(answer, served.cold)


def beside_the_writer(served: Served, pair: Pair) -> None:
    """What was there when the reader started, and what is written while it runs."""
    reader = copy.copy(served)
    reader.start(pair.reader, device_cache=False)
    try:
        assert same(reader.reload(files=True), served.control)
        reader.assert_same_bytes()
        later = served.a_prompt(90)
        assert served.run(later)["cached"] == 0
        control = served.run(later)
        assert control["cached"] == served.cached
        served.call("settle")
        assert same(reader.reload(files=True, tokens=later), control)
        # The writer is none the worse for it.
        assert same(served.reload(files=True), served.control)
    finally:
        pair.reader.call("stop")
