# SPDX-License-Identifier: Apache-2.0
"""Real servers that speak S3, each in a process of its own, on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.options import Secret
from kvtier.tiers.obj.options import ObjOptions
from tests.parts import DEBIAN_PYTHON

START_SECONDS = 60.0
STOP_SECONDS = 5.0
SWIFT_DOMAIN = "s3.localhost"
"""Its buckets are names below it, too."""
SWIFT_PAGE = 20
"""Objects of one page of its listings, so that they have several."""


class Server(NamedTuple):
    """Where it is, and who may use it; without keys that is up to the AWS chain."""

    kind: str
    url: str
    access_key: str | None
    secret_key: str | None


def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False


def free_ports(number: int) -> list[int]:
    """So many, each another one."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def served(
    command: Sequence[str],
    ports: Sequence[int],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """A server process, once it listens on all its ports, until the block ends."""
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        try:
            until = time.monotonic() + START_SECONDS
            while not all(map(listens, ports)):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{command[0]} did not start: {log.read_text()[-2000:]}")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
    until = time.monotonic() + STOP_SECONDS
    while left := [port for port in ports if listens(port)]:
        if time.monotonic() > until:
            raise RuntimeError(f"{command[0]} has left somebody behind, who listens on {left}")
        time.sleep(0.05)


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """moto's S3, which is a mock."""
    ports = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(ports[0])]
    with served(
        command, ports, folder / "moto.log", {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": "100000000"}
    ):
        yield Server("moto", f"http://127.0.0.1:{ports[0]}", "test", "test")


@contextlib.contextmanager
def swift(folder: Path) -> Iterator[Server]:
    """OpenStack Swift with its S3 layer; what it keeps is in `folder`."""
    work = folder / "swift"
    work.mkdir()
    names = ("proxy", "account", "container", "object", "memcached")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    keys = {"access_key": "test:tester", "secret_key": "testing"}
    settings = {
        "folder": str(work),
        "ports": ports,
        **keys,
        "domain": SWIFT_DOMAIN,
        "page": SWIFT_PAGE,
    }
    program = Path(__file__).with_name("swift_server.py")
    command = [DEBIAN_PYTHON, str(program), json.dumps(settings)]
    with served(command, list(ports.values()), folder / "swift.log"):
        yield Server("swift", f"http://127.0.0.1:{ports['proxy']}", **keys)


def tier_options(server: Server, bucket: str, **more: Any) -> ObjOptions:
    """Of a tier there that makes its bucket, if `more` says nothing else."""
    return ObjOptions(
        **{
            "bucket": bucket,
            "endpoint_override": server.url,
            "access_key": server.access_key and Secret(server.access_key),
            "secret_key": server.secret_key and Secret(server.secret_key),
            "create_bucket": True,
            "absent_seconds": 0.001,
            **more,
        }
    )
