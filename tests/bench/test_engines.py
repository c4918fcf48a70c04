# SPDX-License-Identifier: Apache-2.0
"""What the drivers of real engines do without one: messages, comparisons, a server's failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from kvtier.bench.__main__ import main
from kvtier.bench.cli import make_settings, parse_arguments
from kvtier.bench.drivers.groups import chunk_groups
from kvtier.bench.drivers.remote import Answer, Begin, Facts, Failed, Progress, decode, encode
from kvtier.bench.engines import compare_answers
from kvtier.bench.results import Report
from kvtier.bench.settings import RealEngine
from kvtier.bench.strategies import connector_config

pytestmark = pytest.mark.usefixtures("fonts_open")


def test_messages_arrive_as_they_were_sent() -> None:
    settings = make_settings(parse_arguments(["--strategies=none"]))
    begin = Begin(settings, "none", "/var/tmp/files")
    assert decode(encode(begin), Begin) == begin
    for message in (Facts(8, 4, 3, True, {"model": "m"}), Progress(1, 2, 3, 0.5), Failed("why")):
        line = encode(message)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert decode(line, Answer) == message
    assert Facts(8, 4, 3, True, {}).token_bytes == 2


def test_answers_are_compared_with_nones() -> None:
    base = {"a": [1, 2], "b": [3]}
    found = compare_answers("7", {"none": base, "host": {"a": [1, 2], "b": [4]}, "stock": {}})
    assert found == ["7: 1 of 2 answers of host begin as none's do"]
    assert compare_answers("7", {"host": base}) == []


def test_each_strategy_configures_the_connector() -> None:
    real = RealEngine(model="any/model", policy="arc")

    def extra(strategy: str) -> dict[str, object]:
        config = connector_config(strategy, real, 1 << 30, "/files")
        assert config is not None
        assert config["kv_connector"] == "OffloadingConnector"
        assert config["kv_load_failure_policy"] == "recompute"  # kvtier warns otherwise
        return config["kv_connector_extra_config"]

    assert connector_config("none", real, 1 << 30, None) is None
    assert "tiers" not in extra("host")
    (tier,) = extra("host+fs")["tiers"]
    assert tier == {"type": "fs", "name": "fs", "root_dir": "/files", "private": True}
    assert extra("stock")["spec_name"] == "StockSpec"
    assert extra("stock")["eviction_policy"] == extra("host")["policy"] == "arc"
    assert {extra(name)["cpu_bytes_to_use"] for name in ("host", "host+fs", "stock")} == {1 << 30}


@pytest.mark.parametrize(
    ("sizes", "firsts", "per_chunk", "groups"),
    [
        ([3], [0], [1], [0, 0, 0]),
        ([3], [5], [4], [0]),
        ([4], [2], [4], [0, 0]),
        ([3, 0, 1], [0, 9, 4], [1, 1, 1], [0, 0, 0, 2]),
        ([5, 4], [3, 0], [4, 4], [0, 0, 1]),
    ],
)
def test_chunks_of_a_job_by_group(
    sizes: list[int], firsts: list[int], per_chunk: list[int], groups: list[int]
) -> None:
    assert chunk_groups(sizes, firsts, per_chunk) == groups


class Moody(BaseHTTPRequestHandler):
    """A server that answers some prompts and not others, by their turn."""

    protocol_version = "HTTP/1.1"
    served: list[dict[str, object]]

    def log_message(self, *_arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "only", "max_model_len": 4000}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.served.append(body)
        tokens = len(body["prompt"])
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": tokens}
        events = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}]
        if tokens == 400:
            return self._send(503, b'{"error": "busy"}')
        if tokens == 500:
            events[1:] = []
        if tokens == 600:
            events[1:] = [{"error": {"message": "lost the engine"}}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        if tokens != 500:
            lines.append("data: [DONE]\n\n")
        return self._send(200, "".join(lines).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def moody() -> Iterator[Callable[..., tuple[int, Report, list[dict[str, object]]]]]:
    handler = type("Handler", (Moody,), {"served": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="moody")
        thread.start()

        def ask(
            folder: Path, first: int, turns: int
        ) -> tuple[int, Report, list[dict[str, object]]]:
            code = main(
                [
                    "--engine=openai",
                    f"--base-url=http://127.0.0.1:{server.server_address[1]}/v1",
                    "--conversations=3",
                    f"--first-prompt-tokens={first}",
                    "--turn-tokens=100",
                    f"--turns={turns}",
                    "--output-tokens=5",
                    f"--output={folder}",
                    "--quiet",
                ]
            )
            text = (folder / "report.json").read_bytes()
            return code, msgspec.json.decode(text, type=Report), handler.served

        try:
            yield ask
        finally:
            server.shutdown()
            thread.join()


def test_a_server_that_answers_all(moody: Callable[..., object], tmp_path: Path) -> None:
    code, report, served = moody(tmp_path, 700, 1)
    assert code == 0
    (run,) = report.runs
    assert (run.requests, run.output_tokens, run.prompt_tokens) == (6, 30, 4500)
    assert run.computed_tokens == 4500
    assert any("does not tell how many tokens it had cached" in note for note in report.notes)
    for body in served:
        assert body["stream"] is body["ignore_eos"] is True
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("only", 5, 0)
    assert len({tuple(body["prompt"]) for body in served}) == 6


def test_each_way_not_to_answer_is_counted_by_its_cause(
    moody: Callable[..., object], tmp_path: Path
) -> None:
    code, report, _served = moody(tmp_path, 300, 3)
    assert code == 1
    (run,) = report.runs
    # A conversation goes on after a turn that was not answered.
    assert (run.requests, run.requests_wanted) == (3, 12)
    assert run.errors == {"status 503": 3, "stream broke off": 3, "error in the stream": 3}
    notes = "\n".join(report.notes)
    assert 'status 503: {"error": "busy"}' in notes
    assert "lost the engine" in notes
    assert not report.verdict.holds
    measured = report.verdict.clauses[0].measured
    assert measured == "9 left, error in the stream: 3, status 503: 3, stream broke off: 3"
