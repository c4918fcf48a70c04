# SPDX-License-Identifier: Apache-2.0
"""A process that does to regions what the test tells it: one JSON line each way.

``pause`` names a point inside ``create`` at which the process says so and waits for a line.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.errors import KVTierError
from kvtier.host import files, header, space
from kvtier.host.mapping import MappedFile
from kvtier.host.region import Region
from kvtier.testing import leaks
from kvtier.types import Geometry, GroupGeometry
from tests.driven import say, serve

POINTS = {
    "nameless": (files, "create_nameless"),
    "linked": (files, "link"),
    "building": (header, "write_header"),
    "ready": (header, "write_state"),
}


def geometry(slots: int = 64, block_bytes: int = 3000) -> Geometry:
    """Geometry of small slots of 4 KiB."""
    slot_bytes = -(-block_bytes // 4096) * 4096
    group = GroupGeometry(block_tokens=16, blocks_per_chunk=1, block_bytes=block_bytes)
    return Geometry(groups=(group,), num_slots=slots, slot_bytes=slot_bytes)


def pause_after(point: str) -> None:
    """Let the process wait for a line once it has come to `point`."""
    module, name = POINTS[point]
    original: Callable[..., Any] = getattr(module, name)

    def gated(*args: Any) -> Any:
        result = original(*args)
        say(at=point)
        sys.stdin.readline()
        return result

    setattr(module, name, gated)


class Commands:
    """State of the child between two lines."""

    def __init__(self) -> None:
        self.region: Region | None = None

    def create(
        self,
        directory: str,
        name: str = "r",
        slots: int = 64,
        ranks: int = 1,
        namespace: dict[str, str] | None = None,
        timeout: float = 20,
        step_bytes: int = 1 << 30,
        pause: str | None = None,
        unchecked: bool = False,
        block_bytes: int = 3000,
    ) -> dict[str, Any]:
        if pause:
            pause_after(pause)
        if unchecked:
            space.check_space = lambda *args: None
        self.region = Region.create(
            name,
            geometry(slots, block_bytes),
            namespace or {"model": "m"},
            ranks,
            directory=directory,
            timeout_seconds=timeout,
            step_bytes=step_bytes,
        )
        return {"creator": self.region.is_creator, "path": self.region.path}

    def attach(
        self, directory: str, name: str = "r", timeout: float = 20, signed: bool = True
    ) -> dict[str, Any]:
        self.region = Region.attach(
            name, directory=directory, timeout_seconds=timeout, signed=signed
        )
        return {"path": self.region.path}

    def from_fd(self, fd: int) -> dict[str, Any]:
        self.region = Region.from_fd(fd)
        os.close(fd)
        return {"path": self.region.path, "fds": len(os.listdir("/proc/self/fd"))}

    def sign(self, rank: int) -> None:
        self.region.sign(rank)

    def finish(self, rank: int, publish: list[int], fail: list[int]) -> None:
        for transfer in sorted({*publish, *fail}):
            (self.region.fail if transfer in fail else self.region.publish)(rank, transfer)

    def hammer(self, rank: int, count: int, step: int) -> None:
        """Finish many transfers; each `step`-th fails."""
        for transfer in range(count):
            (self.region.fail if transfer % step == 3 else self.region.publish)(rank, transfer)

    def write(self, slot: int, text: str) -> None:
        self.region.slot_view(slot, len(text))[:] = text.encode()

    def read(self, slot: int, length: int) -> dict[str, Any]:
        return {"text": bytes(self.region.slot_view(slot, length)).decode()}

    def available(self) -> dict[str, Any]:
        return {"slots": self.region.available_slots}

    def populate(self) -> dict[str, Any]:
        done = threading.Event()
        last = self.region.geometry.num_slots

        def on_available(slots: int) -> None:
            if slots == last:
                done.set()

        self.region.populate(on_available)
        return {"done": done.wait(20) or self.region.available_slots == last}

    def close(self) -> None:
        self.region.close()

    def unwind(self) -> None:
        """SIGTERM raises, as a server's own handler would make it."""

        def handler(number: int, frame: object) -> None:
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGHUP, handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def fork(self, wait_fd: int, forget: bool = True) -> dict[str, Any]:
        """A forked child that tries everything, then lives until `wait_fd` ends."""
        if not forget:
            MappedFile.forget = lambda self: None
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            answers = json.dumps({"answers": self.try_everything()})
            os.write(writing, answers.encode())
            os.close(writing)
            os.read(wait_fd, 1)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            return {"pid": pid, **json.load(file)}

    def try_everything(self) -> dict[str, str]:
        now = leaks.take()
        return {
            **refusals(self.region),
            "maps": str(now.mappings),
            "fds": str(sum("/test-regions-" in target for target in now.fds.values())),
            "place": self.take_place(),
        }

    def take_place(self) -> str:
        """Map something where the region was, end the handle, and see whether it stays."""
        address = self.region._mapped.address
        size = self.region._mapped.layout.total_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        taken = files.libc().mmap(address, size, writable, flags, -1, 0) == address
        self.region.close()
        self.region = None
        gc.collect()
        kept = False
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, stop = (int(border, 16) for border in line.split()[0].split("-"))
            kept = kept or start <= address < stop
        return f"taken {taken}, kept {kept}"


def refusals(region: Region) -> dict[str, str]:
    """How each call on a region ends."""
    calls: dict[str, Callable[[], Any]] = {
        "records": lambda: region.records,
        "table": lambda: region.table,
        "payload": lambda: region.payload,
        "base_address": lambda: region.base_address,
        "slot_view": lambda: region.slot_view(0, 1),
        "slot_address": lambda: region.slot_address(0),
        "available_slots": lambda: region.available_slots,
        "fileno": region.fileno,
        "sign": lambda: region.sign(0),
        "unsigned": region.unsigned,
        "publish": lambda: region.publish(0, 0),
        "fail": lambda: region.fail(0, 0),
        "finished": lambda: region.finished(0),
        "finished_by_all": region.finished_by_all,
        "failures": lambda: region.failures(0),
        "populate": lambda: region.populate(lambda slots: None),
    }
    answers = {}
    for name, call in calls.items():
        try:
            call()
        except KVTierError as exc:
            answers[name] = f"{type(exc).__name__}: {exc}"
        else:
            answers[name] = "went through"
    return answers


if __name__ == "__main__":
    # Whoever started the tests may ignore it (nohup), and that is inherited.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    serve(Commands())
