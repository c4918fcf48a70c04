# SPDX-License-Identifier: Apache-2.0
"""The load generator over vLLM: all strategies in process, and a running server."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvtier.bench.__main__ import main
from kvtier.bench.results import Report
from tests.bench.test_workload import row, write
from tests.vllm.conftest import checkpoint
from tests.vllm.engine import ONE_THREAD
from tests.vllm.serve import Server, command, family

__all__ = ["checkpoint"]

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("fonts_open")]

BLOCK_TOKENS, TOKEN_BYTES = 128, 2048
FIRST, TURN, TURNS, OUTPUT = 648, 256, 2, 4
CONVERSATIONS = 4
TALK = (
    f"--conversations={CONVERSATIONS}",
    f"--first-prompt-tokens={FIRST}",
    f"--turn-tokens={TURN}",
    f"--turns={TURNS}",
    f"--output-tokens={OUTPUT}",
    "--max-in-flight=2",
    "--quiet",
)
PROMPTS = [FIRST + turn * TURN for turn in range(TURNS + 1)]
EAGER = '--engine-args={"enforce_eager": true}'
WHOLE = 10 * BLOCK_TOKENS * TOKEN_BYTES
"""A conversation at its end."""


def read(directory: Path) -> Report:
    return msgspec.json.decode((directory / "report.json").read_bytes(), type=Report)


def bench(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Exit code of the load generator in vLLM, with a device cache for two conversations."""
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    return main(
        [
            "--engine=vllm",
            f"--model={model}",
            f"--accelerator={2 * WHOLE}",
            f"--output={folder}",
            f"--tier-dir={folder}",
            "--allow-tmpfs",
            *options,
        ]
    )


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("full")


def test_all_strategies_serve_the_same_conversations(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Device and host memory: two conversations of four, each."""
    code = bench(model, tmp_path, monkeypatch, *TALK, f"--host-memory={2 * WHOLE}", EAGER)
    captured = capsys.readouterr()
    assert code in (0, 1), captured.err
    assert captured.err == ""
    report = read(tmp_path)
    assert (report.engine, report.source, report.shape) == ("vllm", None, None)
    assert report.accelerator_bytes == 2 * WHOLE
    assert [run.strategy for run in report.runs] == ["none", "host", "host+fs", "stock"]
    for run in report.runs:
        assert run.requests == run.requests_wanted == CONVERSATIONS * len(PROMPTS)
        assert run.prompt_tokens == CONVERSATIONS * sum(PROMPTS)
        assert run.output_tokens == OUTPUT * run.requests
        parts = (run.accelerator_tokens, run.loaded_tokens, run.computed_tokens)
        assert sum(parts) == run.prompt_tokens, parts
        assert 0 < run.first_token.p50 <= run.wall_seconds
        assert run.engine.failures == {}
        assert run.working_set_bytes == pytest.approx(
            CONVERSATIONS * (PROMPTS[-1] + OUTPUT) * TOKEN_BYTES, rel=0.3
        )
        assert run.copies.load_bytes == run.loaded_tokens * TOKEN_BYTES
        own = run.times.engine / run.wall_seconds
        assert (own == 0) if run.strategy == "none" else (0 < own < 0.5)
    none, host, files, stock = report.runs
    assert none.loaded_tokens == 0
    assert host.tier_tokens == {}
    assert host.computed_tokens <= none.computed_tokens
    for run in (files, stock):
        assert run.tier_tokens.get("fs", 0) > 0, run
        assert run.engine.promoted_bytes["fs"] >= run.tier_tokens["fs"] * TOKEN_BYTES
        assert run.engine.stored_bytes["fs"] > 0
        assert run.computed_tokens < host.computed_tokens
        assert run.copies.verified_bytes == run.copies.load_bytes > 0
        assert run.copies.differing_blocks == 0
    assert report.verdict.clauses[0].holds is True
    assert not any("bytes were not compared" in note for note in report.notes)
    total = CONVERSATIONS * len(PROMPTS)
    for strategy in ("host", "host+fs", "stock"):
        (found,) = [
            re.search(rf"(\d+) of {total} answers of {re.escape(strategy)} begin", note)
            for note in report.notes
            if f"answers of {strategy} begin" in note
        ]
        assert found is not None
        # Prefills of other lengths differ in their last digits, and now and then in a token.
        assert int(found[1]) >= 0.75 * total, report.notes
    assert "stock" in captured.out
    left = {path.name for path in tmp_path.iterdir()}
    logs = {f"vllm-{name}-{CONVERSATIONS}.log" for name in ("none", "host", "host+fs", "stock")}
    assert left == {"report.html", "report.png", "report.json"} | logs
    assert not any("kvtier.bench.drivers" in line for line in family(os.getpid()).values())


@pytest.mark.parametrize(("strategy", "spec"), [("host", "WrongSpec"), ("stock", "WrongStockSpec")])
def test_bytes_that_came_to_the_wrong_block_fail_the_run(
    strategy: str,
    spec: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each load's chunks in reverse: right bytes in the wrong blocks, which no checksum sees."""
    (tmp_path / "files").mkdir()
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": spec,
            "spec_module_path": "tests.bench.wrong",
            "cpu_bytes_to_use": 8 * WHOLE,
            "blocks_per_chunk": 1,
        },
    }
    if strategy == "stock":
        tiers = [{"type": "fs", "root_dir": str(tmp_path / "files")}]
        connector["kv_connector_extra_config"]["secondary_tiers"] = tiers
    engine_args = {"enforce_eager": True, "kv_transfer_config": connector}
    options = [f"--strategies={strategy}", f"--engine-args={json.dumps(engine_args)}"]
    code = bench(model, tmp_path, monkeypatch, *TALK, *options)
    assert code == 1, capsys.readouterr().err
    report = read(tmp_path)
    (run,) = report.runs
    assert run.requests == run.requests_wanted
    assert run.copies.verified_bytes == run.copies.load_bytes > 0
    # Of an odd number of chunks the middle one is where it should be.
    loaded = run.copies.load_bytes // (BLOCK_TOKENS * TOKEN_BYTES)
    assert loaded / 2 < run.copies.differing_blocks <= loaded
    clause = report.verdict.clauses[0]
    assert clause.holds is False
    assert f"{run.copies.differing_blocks} blocks differ" in clause.measured
    assert report.verdict.summary.startswith("FAILED: bytes differ")


def test_a_trace_in_vllm(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three prefixes in turn, one request at a time; the device cache holds two prompts, host
    memory one. While no request is due, the generator says so."""
    lines = [row(i * 800, 1100, 6, (10 * (i % 3), 10 * (i % 3) + 1, 100 + i)) for i in range(9)]
    lines.append(row(6500, 2600, 6, (70, 71, 72, 73, 74, 75)))  # too long for this device cache
    lines.append(row(16_000, 1100, 6, (0, 1, 200)))
    trace = write(tmp_path / "trace.jsonl", *lines)
    code = bench(
        model,
        tmp_path,
        monkeypatch,
        *("--workload=trace", f"--trace={trace}", "--speedup=2"),
        "--strategies=none,host+fs",
        f"--host-memory={WHOLE}",
        EAGER,
    )
    captured = capsys.readouterr()
    assert code in (0, 1), captured.err
    assert captured.err == ""
    report = read(tmp_path)
    none, files = report.runs
    for run in report.runs:
        assert (run.point, run.requests, run.requests_wanted) == ("trace", 10, 10)
        assert (run.prompt_tokens, run.output_tokens) == (11_000, 60)
        # The last request is due after eight seconds, and its first token counts from there.
        assert run.wall_seconds >= 8.0
        assert run.first_token.p99 < 6.0
        assert run.engine.failures == {}
    assert none.loaded_tokens == 0
    # Blocks that hold tokens of the first two ids are everybody's with that prefix.
    assert 3 * 1024 <= files.loaded_tokens <= 7 * 1024
    assert files.tier_tokens["fs"] > 0
    assert files.computed_tokens < none.computed_tokens
    assert any("1 requests of the trace were longer than the" in note for note in report.notes)
    assert any("10 answers of host+fs begin as none's do" in note for note in report.notes)
    clause = report.verdict.clauses[-1]
    assert clause.text.startswith("no strategy is slower to the first token than none")
    assert clause.holds is not None
    assert captured.out.count("   9/10 requests") >= 4
    log = (tmp_path / "vllm-host+fs.log").read_text()
    assert "kvtier: manager attached" in log
    assert "kv_load_failure_policy is" not in log


def test_what_vllm_refuses_is_one_line_and_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows"}')
    arguments = [f"--model={tmp_path}", f"--output={tmp_path}", "--strategies=none", *TALK, EAGER]
    assert main(["--engine=vllm", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m kvtier.bench: vLLM with strategy none failed: ")
    assert "nobody_knows" in line
    log = Path(line.rpartition("its log is ")[2])
    assert "Traceback" in log.read_text()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    # The server is killed at the end, and leaves its region.
    memory = Path(tempfile.mkdtemp(prefix="kvt-test-", dir="/dev/shm"))
    words = command(model, 20 << 20, memory, folder / "files")
    small = [
        "--skip-tokenizer-init",
        "--enforce-eager",
        *("--max-model-len", "2048"),
        *("--max-num-seqs", "4"),
        *("--num-gpu-blocks-override", "28"),
        "--enable-prompt-tokens-details",
    ]
    with Server([*words, *small], folder / "server", ONE_THREAD) as running:
        yield running
    shutil.rmtree(folder)
    shutil.rmtree(memory)


def ask(server: Server, tmp_path: Path, *more: str) -> int:
    url = f"--base-url=http://127.0.0.1:{server.port}"
    return main(["--engine=openai", url, f"--output={tmp_path}", *TALK, *more])


def test_a_server_serves_the_same_conversations(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(server, tmp_path) == 0, capsys.readouterr().err
    report = read(tmp_path)
    (run,) = report.runs
    assert (report.engine, run.strategy) == ("openai", "server")
    assert run.requests == run.requests_wanted == CONVERSATIONS * len(PROMPTS)
    assert run.prompt_tokens == CONVERSATIONS * sum(PROMPTS)
    assert run.output_tokens == OUTPUT * run.requests
    assert run.errors == {}
    # Whole blocks of each prompt but the first one, wherever the server had them.
    cached = sum(tokens // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPTS[:-1])
    assert run.tier_tokens == {"server": CONVERSATIONS * cached}
    assert run.computed_tokens == run.prompt_tokens - CONVERSATIONS * cached
    assert 0 < run.first_token.p50 < run.wall_seconds
    assert report.verdict.holds
    assert [clause.text for clause in report.verdict.clauses] == ["every request was answered"]
    assert any("bytes cannot be compared inside a foreign server" in note for note in report.notes)
    assert report.about["model"] == server.model


def test_a_server_serves_a_trace(server: Server, tmp_path: Path) -> None:
    lines = [row(i * 200, 1000, 6, (0, i % 3 + 1)) for i in range(8)]
    lines.append(row(2000, 2045, 6, (5, 6, 7, 8)))  # too long for the server
    trace = write(tmp_path / "trace.jsonl", *lines)
    arguments = f"--workload=trace --trace={trace} --speedup=2".split()
    assert ask(server, tmp_path, *arguments) == 0
    report = read(tmp_path)
    (run,) = report.runs
    assert (run.point, run.requests, run.prompt_tokens) == ("trace", 8, 8000)
    assert run.output_tokens == 8 * 6
    # The first blocks are everybody's.
    assert run.tier_tokens["server"] >= 7 * 512
    assert run.wall_seconds >= 0.7
    assert any("1 requests of the trace were too long" in note for note in report.notes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model=another"], "serves /"),
        (["--turns=9"], "a conversation grows to 2956 tokens"),
        (["--strategies=host"], "a server's own configuration decides, so there is only server"),
    ],
)
def test_wrong_use_of_a_server_is_one_line(
    server: Server,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ask(server, tmp_path, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_server_that_dies_leaves_requests_unanswered(server: Server, tmp_path: Path) -> None:
    """The last test of the module: it takes the server down in the middle of a run."""
    # Not SIGTERM: vLLM accepts requests while its engine ends, and never answers them.
    timer = threading.Timer(2.0, server.kill_family)
    timer.start()
    try:
        code = ask(server, tmp_path, "--conversations=200", "--seed=1")
    finally:
        timer.cancel()
        timer.join()
    assert code == 1
    report = read(tmp_path)
    (run,) = report.runs
    assert 0 < run.requests < run.requests_wanted
    assert sum(run.errors.values()) == run.requests_wanted - run.requests
    assert report.verdict.summary.startswith("FAILED: not every request was answered")
    assert "connection refused" in report.verdict.clauses[0].measured
