# SPDX-License-Identifier: Apache-2.0
"""A process with memory to get from and put into, for tests and benchmarks of UCX.

One thread. Its memory is a file in /dev/shm, mapped as a region is, with a pattern that `pattern`
gives, or without a seed blank. It says in a line of JSON where it can be reached, then takes a
command a line, each answered by a line, and drives its worker from the event descriptor while it
waits. It ends with its input.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import selectors
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from kvtier._core import ucx
from kvtier.host import files, huge

ROOT = Path(__file__).resolve().parent.parent.parent


def pattern(size: int, seed: int) -> np.ndarray:
    """Bytes that differ from place to place and seed to seed."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class SharedMemory:
    """A nameless file in /dev/shm with huge pages, mapped like a region; `close` unmaps it."""

    def __init__(self, size: int) -> None:
        fd = files.create_nameless("/dev/shm")
        try:
            os.ftruncate(fd, size)
            huge.fill(fd, 0, size)
            self.address = huge.map_shared(fd, 0, size)
        finally:
            os.close(fd)
        self.size = size
        self.bytes: Any = np.frombuffer(
            (ctypes.c_ubyte * size).from_address(self.address), dtype=np.uint8
        )

    @classmethod
    def blank(cls, size: int) -> SharedMemory:
        """Private memory that nobody has written: a page of zeros, wherever it is read."""
        memory = cls.__new__(cls)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory.address = files.libc().mmap(
            None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0
        )
        memory.size = size
        files.libc().madvise(memory.address, size, mmap.MADV_HUGEPAGE)
        return memory

    def close(self) -> None:
        self.bytes = None
        files.libc().munmap(self.address, self.size)


class Peer:
    """Such a process, seen from the one that started it."""

    def __init__(
        self, size: int, *, seed: int | None = 0, writable: bool = False, **environment: str
    ) -> None:
        self.size = size
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.core.ucx_peer",
                str(size),
                json.dumps(seed),
                str(int(writable)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **environment},
            text=True,
        )
        said = self.read()
        self.address = int(said["at"])
        self.worker = bytes.fromhex(said["worker"])
        self.rkey = bytes.fromhex(said["rkey"])

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                return said
        raise EOFError(f"the peer has ended: {self.process.wait()}")

    def tell(self, command: str, **values: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **values}) + "\n")
        self.process.stdin.flush()

    def ask(self, command: str, **values: object) -> dict[str, Any]:
        self.tell(command, **values)
        return self.read()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> int:
        """Its exit status; after a SIGSTOP or a hang it is killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.stdin.close()
            return self.process.wait(10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            return self.process.wait()
        finally:
            self.process.stdout.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Process:
    """The process itself."""

    def __init__(self, size: int, seed: int | None, *, writable: bool) -> None:
        if seed is None:
            self.memory = SharedMemory.blank(size)
        else:
            self.memory = SharedMemory(size)
            self.memory.bytes[:] = pattern(size, seed)
        self.context = ucx.Context()
        self.registered = self.context.register(self.memory.address, size, writable=writable)
        self.worker = ucx.Worker(self.context)
        self.endpoint: ucx.Endpoint | None = None
        self.key: ucx.RemoteKey | None = None
        self.errors: list[str] = []

    def answer(self, command: str, **values: Any) -> dict[str, Any]:
        if command == "crc":
            return {"crc": zlib.crc32(self.memory.bytes)}
        if command == "fill":
            self.memory.bytes[:] = values["value"]
        elif command == "connect":
            self.endpoint = self.worker.connect(bytes.fromhex(values["worker"]), self.errors.append)
            self.key = self.endpoint.unpack(bytes.fromhex(values["rkey"]))
        elif command in ("put", "get"):
            return self.move(command, **values)
        elif command == "errors":
            return {"errors": self.errors}
        elif command == "unregister":
            self.registered.close()
        else:
            raise ValueError(command)
        return {}

    def move(self, command: str, *, at: int, size: int, times: int) -> dict[str, Any]:
        """The same chunk again and again, until it fails."""
        assert self.endpoint is not None
        ended: list[str | None] = []
        start = getattr(self.endpoint, command)
        for done in range(times):
            start(self.memory.address, size, at, self.key, ended.append)
            until = time.monotonic() + 5
            while not ended and time.monotonic() < until:
                self.worker.progress()
            error = ended.pop() if ended else "no end"
            if error:
                return {"done": done, "error": error}
        return {"done": times, "error": None}

    def run(self) -> None:
        print(json.dumps({
            "at": self.memory.address,
            "worker": self.worker.address.hex(),
            "rkey": self.registered.rkey.hex(),
        }), flush=True)  # fmt: skip
        with selectors.DefaultSelector() as selector:
            selector.register(self.worker.fileno(), selectors.EVENT_READ)
            selector.register(sys.stdin, selectors.EVENT_READ)
            while True:
                while self.worker.progress() or not self.worker.arm():
                    if selector.get_map() and sys.stdin in self.ready(selector, 0):
                        break
                if sys.stdin in self.ready(selector, None):
                    line = sys.stdin.readline()
                    if not line:
                        break
                    print(json.dumps(self.answer(**json.loads(line))), flush=True)
        self.worker.close()
        self.registered.close()
        self.memory.close()

    @staticmethod
    def ready(selector: selectors.BaseSelector, seconds: float | None) -> list[object]:
        return [key.fileobj for key, _ in selector.select(seconds)]


if __name__ == "__main__":
    Process(int(sys.argv[1]), json.loads(sys.argv[2]), writable=sys.argv[3] == "1").run()
