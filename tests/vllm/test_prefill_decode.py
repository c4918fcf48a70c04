# SPDX-License-Identifier: Apache-2.0
"""The example's proxy in front of two ``vllm serve``, started as it says."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import ONE_THREAD, series
from tests.vllm.serve import ROOT, Server, command, free_ports
from tests.vllm.test_serve import SMALL
from tests.vllm.test_slice import BLOCK_TOKENS, HOST_BYTES, prompt
from tests.vllm.test_tiers import CHUNK_BYTES

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROGRAM = ROOT / "examples" / "prefill_decode_proxy.py"
CHUNKS = 10
TEMPLATE = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
START_SECONDS = 30.0


def with_words(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with a tokenizer: ``t0007`` is token 7."""
    # lazy: takes seconds to import
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    for one in checkpoint.iterdir():
        (folder / one.name).symlink_to(one)
    words = Tokenizer(models.WordLevel({f"t{i:04}": i for i in range(1024)}, unk_token="t0000"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "eos_token": "t0002",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def config(shm: Path, port: int) -> str:
    """What the example's own text gives to ``--kv-transfer-config``."""
    (shown,) = re.findall(r"--kv-transfer-config '(\{.*?\]\}\})'", PROGRAM.read_text(), re.S)
    given = json.loads(shown.replace("571'$i'", str(port)))
    extra = given["kv_connector_extra_config"]
    assert extra["secondary_tiers"] == [{"type": "p2p", "port": port}]
    extra |= {"cpu_bytes_to_use": HOST_BYTES, "directory": str(shm)}
    return json.dumps(given)


@contextlib.contextmanager
def proxy(log: Path, servers: list[Server], peer_port: int) -> Iterator[int]:
    """Its port. Servers and proxy are ended as a supervisor ends them."""
    first, second = servers
    port = free_ports(1)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, str(PROGRAM), "--port", str(port)),
                *("--prefill", f"http://127.0.0.1:{first.port},127.0.0.1:{peer_port}"),
                *("--decode", f"http://127.0.0.1:{second.port}"),
            ],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                assert json.loads(ask(port, "/v1/models"))["data"]
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield port
        for one in servers:
            one.process.terminate()
        for one in servers:
            one.process.wait(timeout=40)
        process.terminate()
        assert process.wait(timeout=15) == 0
    finally:
        process.kill()
        process.wait()


def ask(port: int, path: str, body: Any = None) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            kind = {"content-type": "application/json"}
            connection.request("POST", path, json.dumps(body), kind)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    assert response.status == 200, f"{path}: {response.status} {text}"
    return text


def moved(server: Server, name: str, *labels: str) -> float:
    """Bytes of chunks that have gone over; asked for in steps only."""
    time.sleep(0.6)
    server.complete(prompt(77, 100), 1)
    return series(server.get("/metrics")).get((f"kvtier_{name}_total", "p2p", *labels), 0)


def test_completions_and_chats_through_the_proxy(
    checkpoint: Callable[[str], Path], own_shm_directory: Path, tmp_path: Path
) -> None:
    model = with_words(checkpoint("full"), tmp_path / "model")
    ports = free_ports(2)
    more = [one for one in SMALL if one != "--skip-tokenizer-init"]
    servers = []
    for port in (ports, ports + 1):
        words = command(model, HOST_BYTES, own_shm_directory, tmp_path / "files")
        words[words.index("--kv-transfer-config") + 1] = config(own_shm_directory, port)
        # Both start at the same time.
        servers.append(Server([*words, *more], tmp_path / f"server-{port - ports}", ONE_THREAD))
    first, second = servers
    with first, second, proxy(tmp_path / "proxy", servers, ports) as port:
        asked = {
            "model": str(model),
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        tokens = prompt(1, CHUNKS * BLOCK_TOKENS + 9)
        answer = json.loads(ask(port, "/v1/completions", asked | {"prompt": tokens}))
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == CHUNKS * BLOCK_TOKENS
        # The prefill instance's own, over its accelerator's cache.
        control, _ = first.complete(tokens, 6)
        assert answer["choices"][0]["token_ids"] == control
        assert moved(second, "transfer_bytes", "load") == CHUNKS * CHUNK_BYTES
        assert moved(first, "peer_served_bytes", "") == CHUNKS * CHUNK_BYTES

        tokens = prompt(2, CHUNKS * BLOCK_TOKENS + 9)
        said = {"role": "user", "content": " ".join(f"t{token:04}" for token in tokens)}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        text = ask(port, "/v1/chat/completions", asked | {"messages": [said]} | stream)
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        pieces = [json.loads(line) for line in lines]
        usage = pieces[-1]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == CHUNKS * BLOCK_TOKENS
        answered = "".join(
            choice["delta"].get("content") or "" for one in pieces for choice in one["choices"]
        )
        control, cached = first.complete(tokens, 6)
        assert cached == CHUNKS * BLOCK_TOKENS
        assert answered.split() == [f"t{token:04}" for token in control]
        assert len(pieces) > 6  # as they came, not all at once
        assert moved(second, "transfer_bytes", "load") == 2 * CHUNKS * CHUNK_BYTES
    assert list(own_shm_directory.iterdir()) == []
