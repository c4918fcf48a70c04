# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` as a process of its own, with the command that stands in README.md.

Owns the process and its group. Of the README's command only the model, the sizes and the
directories are replaced; further options of the server, which say nothing of kvtier, come after it.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_SECONDS = 240.0


def readme_command() -> list[str]:
    """The ``vllm serve`` command of README.md, in words."""
    (block,) = re.findall(r"```\n(vllm serve .*?)\n```", (ROOT / "README.md").read_text(), re.S)
    return shlex.split(block)


def command(model: Path, host_bytes: int, directory: Path, files: Path) -> list[str]:
    """The README's command for this machine."""
    words = readme_command()
    assert words[2] == "MODEL"
    words[2] = str(model)
    place = words.index("--kv-transfer-config") + 1
    config = json.loads(words[place])
    extra = config["kv_connector_extra_config"]
    (tier,) = extra["secondary_tiers"]
    extra |= {"cpu_bytes_to_use": host_bytes, "directory": str(directory)}
    tier |= {"root_dir": str(files), "capacity_bytes": "1GiB"}
    words[place] = json.dumps(config)
    return words


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, one in enumerate(sockets):
                one.bind(("127.0.0.1", first + number))
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
        return first
    raise AssertionError("no free ports in a row")


def processes() -> dict[int, tuple[int, str]]:
    """Living processes: parent and command line by process id; zombies are not among them."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                line = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ")
                found[int(name)] = (int(parent), line.decode("latin-1"))
    return found


def family(pid: int) -> dict[int, str]:
    """Command lines of a process and of everything below it."""
    known = processes()
    found: dict[int, str] = {}
    more = {pid} & set(known)
    while more:
        found |= {one: known[one][1] for one in more}
        more = {one for one, (parent, _) in known.items() if parent in more}
    return found


class Server:
    """A running server; a context manager that leaves no process.

    Parameters
    ----------
    words : sequence of str
        The command.
    folder : Path
        For the log and what the installation lacks.
    environment : dict of str, optional
        Besides pytest's.
    """

    def __init__(
        self, words: list[str], folder: Path, environment: dict[str, str] | None = None
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / "log"
        self.model = words[2]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        env = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
        env |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_COLOR": "0",
            "PYTHONPATH": f"{ROOT}:{_named_vllm(folder)}",
        }
        env |= environment or {}
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [
                    *(str(Path(sys.executable).with_name(words[0])), *words[1:]),
                    *("--host", "127.0.0.1", "--port", str(self.port)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                process_group=0,
                cwd=folder,
            )
        self.family: dict[int, str] = {}
        """Everything that the server had started by the time it was up."""

    def __enter__(self) -> Server:
        try:
            self._wait_until_up()
        except BaseException:
            self.__exit__()
            raise
        self.family = family(self.process.pid)
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill_family()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            code = self.process.poll()
            assert code is None, f"the server ended with {code}\n{self.tail()}"
            assert time.monotonic() < deadline, f"the server does not come up\n{self.tail()}"
            time.sleep(0.1)

    def tail(self) -> str:
        """The end of the log."""
        return self.log.read_bytes()[-6000:].decode(errors="replace")

    def get(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> str:
        """One request; the body of its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                kind = {"content-type": "application/json"}
                connection.request("POST", path, json.dumps(body), kind | (headers or {}))
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        assert response.status == 200, f"{path}: {response.status} {text}"
        return text

    def complete(
        self, prompt: list[int], max_tokens: int = 8, replica: int | None = None
    ) -> tuple[list[int], int]:
        """Tokens of a greedy answer, and how many of the prompt's were not computed.

        `replica` is the data-parallel rank that has to answer.
        """
        text = self.get(
            "/v1/completions",
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
            {} if replica is None else {"X-data-parallel-rank": str(replica)},
        )
        answer = json.loads(text)
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def left_alive(self, seconds: float) -> dict[int, str]:
        """Who of the server's processes still lives after at most `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            living = processes()
            left = {
                pid: line
                for pid, line in self.family.items()
                if pid in living and living[pid][1] == line
            }
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    def terminate(self, seconds: float) -> float:
        """SIGTERM, as every supervisor sends it; how long the server took to end."""
        started = time.monotonic()
        self.process.terminate()
        self.process.wait(timeout=seconds)
        return time.monotonic() - started

    def kill_family(self) -> None:
        """SIGKILL to every process that the server has started, the tier service included."""
        everybody = self.family | family(self.process.pid)
        living = processes()
        for pid, line in everybody.items():
            if living.get(pid, (0, ""))[1] == line:
                with contextlib.suppress(ProcessLookupError):  # it ended just now
                    os.kill(pid, signal.SIGKILL)
        self.kill()
        assert self.left_alive(15.0) == {}

    def kill(self) -> None:
        """SIGKILL to the server's process group, as a container's end; the tier service has a
        group of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)


def _named_vllm(folder: Path) -> Path:
    """The command asks for the version of a package "vllm", which the build for CPUs is not
    called: a folder in which it is."""
    place = folder / "packages"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
        return place
    version = importlib.metadata.version("vllm-cpu") + "+cpu"
    info = place / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return place
