# SPDX-License-Identifier: Apache-2.0
"""Memory of a region: refused when it cannot fit, reserved before use, never a SIGBUS."""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.host import opening, space
from kvtier.host.region import Region
from kvtier.types import Geometry, GroupGeometry
from tests.host.child import geometry

Spawn = Callable[..., Any]
MIB = 1 << 20


def create(directory: str, slots: int, **options: Any) -> Region:
    values = {"timeout_seconds": 1.0, "step_bytes": MIB, **options}
    return Region.create("r", geometry(slots), {"model": "m"}, 1, directory=directory, **values)


def reserved_bytes(path: str) -> int:
    return os.stat(path).st_blocks * 512


@pytest.mark.fault("E01")
@pytest.mark.needs("mount")
def test_larger_than_the_tmpfs(small_tmpfs: Callable[[int], str]) -> None:
    folder = small_tmpfs(4 * MIB)
    with pytest.raises(ConfigError) as caught:
        create(folder, 16 * MIB // 4096)
    message = str(caught.value)
    wanted = int(re.search(r"takes (\d+) bytes", message)[1])
    assert 16 * MIB < wanted < 17.5 * MIB
    assert f"but {folder} has only {4 * MIB} bytes" in message
    assert os.listdir(folder) == []
    with create(folder, 2 * MIB // 4096):
        pass


@pytest.mark.fault("E01")
@pytest.mark.needs("mount")
@pytest.mark.parametrize("size", [4096 * 3, MIB])
def test_no_room_for_the_first_step(
    small_tmpfs: Callable[[int], str], spawn: Spawn, size: int
) -> None:
    # As when another process fills the tmpfs between the check and the reservation.
    folder = small_tmpfs(size)
    creator, waiting = spawn(2)
    options = {"directory": folder, "slots": 4 * MIB // 4096, "unchecked": True}
    creator.send("create", pause="linked", **options)
    assert creator.receive() == {"at": "linked"}
    waiting.send("create", **options)
    creator.go()
    for child in (creator, waiting):
        answer = child.receive()
        assert answer["error"] == "ConfigError"
        assert "no memory for the first" in answer["message"]
        assert "No space left on device" in answer["message"]
    assert os.listdir(folder) == []


def test_a_limit_of_file_sizes_is_named(region_dir: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(ConfigError, match=r"File too large; .*\(ulimit -f\)"):
            create(region_dir, 4 * MIB // 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(region_dir) == []


def test_waiting_ranks_get_the_creators_reason(region_dir: str, spawn: Spawn) -> None:
    path = os.path.join(region_dir, f"kvtier-{os.getuid()}-x")
    opened = threading.Event()
    waiting: list[BaseException] = []

    def wait() -> None:
        fd = os.open(path, os.O_RDWR)
        opened.set()
        try:
            opening.join(fd, path, deadline=opening.time.monotonic() + 20)
        except ConfigError as exc:
            waiting.append(exc)

    fd = opening.files.create_nameless(region_dir)
    assert opening.files.try_lock(fd, exclusive=True)
    assert opening.files.link(fd, path)
    thread = threading.Thread(target=wait)
    thread.start()
    assert opened.wait(10)
    opening.header.write_failure(fd, "why it went wrong")
    assert opening.files.remove_if_last(fd, path)
    os.close(fd)
    thread.join(10)
    assert "another rank could not make the region: why it went wrong" in str(waiting[0])


@pytest.mark.fault("E03")
@pytest.mark.parametrize("where", ["v2", "v2 parent", "v2 root", "v1", "v1 parent"])
@pytest.mark.parametrize("enough", [False, True])
def test_limit_of_the_cgroup(region_dir: str, tmp_path: Path, where: str, enough: bool) -> None:
    root = tmp_path / "cgroup"
    if where.startswith("v2"):
        line, top, name = "0::/pod/box", root, "memory.max"
    else:
        line, top, name = "5:cpu,memory:/pod/box", root / "memory", "memory.limit_in_bytes"
    (top / "pod" / "box").mkdir(parents=True)
    place = {"parent": top / "pod", "root": top}.get(where.split()[-1], top / "pod" / "box")
    for folder in (top, top / "pod", top / "pod" / "box"):
        (folder / name).write_text("max\n" if name == "memory.max" else f"{2**63 - 4096}\n")
    limit = 64 * MIB if enough else 2 * MIB
    (place / name).write_text(f"{limit}\n")
    (tmp_path / "self").write_text(f"1:name=systemd:/pod\n{line}\n")
    system = space.SystemFiles(str(root), str(tmp_path / "self"), "/proc/meminfo")
    if enough:
        create(region_dir, 1024, system=system).close()
        return
    with pytest.raises(ConfigError) as caught:
        create(region_dir, 1024, system=system)
    message = str(caught.value)
    assert f"the cgroup allows {limit} bytes" in message
    assert f"({place / name})" in message
    assert 4 * MIB < int(re.search(r"takes (\d+) bytes", message)[1]) < 5 * MIB
    assert os.listdir(region_dir) == []


@pytest.mark.fault("E03")
def test_memory_of_the_machine(region_dir: str, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000000 kB\nMemAvailable:  2048 kB\n")
    system = space.SystemFiles(str(tmp_path), str(tmp_path / "none"), str(meminfo))
    with pytest.raises(ConfigError, match=f"machine has only {2048 * 1024} bytes"):
        create(region_dir, 1024, system=system)
    meminfo.write_text("MemTotal:  9000000 kB\n")
    create(region_dir, 1024, system=system).close()


def test_memory_is_reserved_in_steps(region_dir: str) -> None:
    slots = 5 * MIB // 4096 + 7
    with create(region_dir, slots) as region:
        assert region.available_slots == 256
        head = reserved_bytes(region.path) - MIB
        assert 0 < head < MIB
        seen: list[int] = []
        done = threading.Event()

        def on_available(total: int) -> None:
            seen.append(total)
            assert region.available_slots == total
            if total == slots:
                done.set()

        region.slot_view(255, 4096)[:] = b"\x5a" * 4096
        with pytest.raises(IndexError, match=f"slot 256: 256 of {slots} have memory"):
            region.slot_view(256, 1)
        region.populate(on_available)
        with pytest.raises(ConfigError, match="is being populated already"):
            region.populate(on_available)
        assert done.wait(20)
        assert seen == [512, 768, 1024, 1280, slots]
        assert reserved_bytes(region.path) == head + slots * 4096
        region.slot_view(slots - 1, 4096)[:] = b"\xa5" * 4096
        assert bytes(region.slot_view(255, 4096)) == b"\x5a" * 4096
        other = Region.attach("r", directory=region_dir, signed=False)
        with pytest.raises(ConfigError, match="only the rank that made"):
            other.populate(on_available)
        other.close()


def test_memory_comes_in_whole_slabs(region_dir: str) -> None:
    """A step that ends inside a slab makes it available with the next one."""
    seen: list[int] = []
    shape = Geometry((GroupGeometry(16, 1, 20480), GroupGeometry(16, 1, 4096)), 5000, 4096, 5)
    with Region.create(
        "r", shape, {"model": "m"}, 1, directory=region_dir, step_bytes=4 * MIB
    ) as region:
        assert region.available_slots == 1020
        region.populate(seen.append)
        assert region._mapped is not None
        assert region._mapped.populator.join(20)
        assert seen == [2045, 3070, 4095, 5000]
        assert region.available_slots == 5000


@pytest.mark.fault("V06")
@pytest.mark.fault("V08")
def test_serves_before_all_is_reserved(
    region_dir: str, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered = threading.Event(), threading.Event()
    threads: list[str] = []
    original = space.reserve

    def gated(fd: int, offset: int, length: int) -> None:
        threads.append(threading.current_thread().name)
        if len(threads) == 4:  # tables, first step, one step, and now
            entered.set()
            assert gate.wait(20)
        original(fd, offset, length)

    monkeypatch.setattr(space, "reserve", gated)
    child = spawn()
    first_step = threading.Event()
    with create(region_dir, 4 * MIB // 4096) as region:
        region.populate(lambda total: first_step.set())
        assert entered.wait(20)
        assert first_step.is_set()
        child.ask("attach", directory=region_dir, signed=False)
        assert child.ask("available") == {"slots": 512}
        child.ask("write", slot=511, text="early")
        assert bytes(region.slot_view(511, 5)) == b"early"
        gate.set()
        region.close()
        assert not [t for t in threading.enumerate() if t.name == "kvtier-populate"]
    assert threads == ["MainThread", "MainThread", "kvtier-populate", "kvtier-populate"]


@pytest.mark.fault("E16")
@pytest.mark.needs("mount")
def test_step_without_memory_caps_the_region(
    small_tmpfs: Callable[[int], str], spawn: Spawn, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_tmpfs(10 * MIB)
    slots = 8 * MIB // 4096
    with create(folder, slots) as region:
        filler = Path(folder) / "filler"
        filler.write_bytes(b"x" * 5 * MIB)
        seen: list[int] = []
        with caplog.at_level(logging.WARNING):
            region.populate(seen.append)
            assert region._mapped.populator.join(20)
        capped = seen[-1]
        assert 256 < capped < slots
        assert capped % 256 == 0
        assert region.available_slots == capped
        (record,) = caplog.records
        assert "no memory for more than" in record.message
        assert "No space left on device" in record.message
        # All that is handed out has memory, here and elsewhere; all else is refused.
        for slot in range(capped):
            region.slot_view(slot, 4096)[:] = bytes([slot % 251]) * 4096
        child = spawn()
        child.ask("attach", directory=folder, signed=False)
        assert child.ask("available") == {"slots": capped}
        for slot in range(capped):
            assert bytes(region.slot_view(slot, 4096)) == bytes([slot % 251]) * 4096
        with pytest.raises(IndexError, match=f"{capped} of {slots} have memory"):
            region.slot_view(capped, 1)
        filler.unlink()


@pytest.mark.fault("E16")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EIO])
def test_any_failed_step_is_one_warning(
    region_dir: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    original, calls = space.reserve, []

    def failing(fd: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) == 4:
            raise OSError(code, os.strerror(code))
        original(fd, offset, length)

    monkeypatch.setattr(space, "reserve", failing)
    with create(region_dir, 8 * MIB // 4096) as region:
        seen: list[int] = []
        with caplog.at_level(logging.WARNING):
            region.populate(seen.append)
            assert region._mapped.populator.join(20)
        assert seen == [512]
        assert len(calls) == 4
        assert [os.strerror(code) in record.message for record in caplog.records] == [True]


def test_close_in_the_middle_of_population(region_dir: str) -> None:
    entered, seen = threading.Event(), []
    with create(region_dir, 64 * MIB // 4096) as region:
        mapped = region._mapped

        def on_available(total: int) -> None:
            entered.set()
            seen.append((total, mapped.populator._cancelled.wait(20)))

        region.populate(on_available)
        assert entered.wait(20)
        region.close()
        assert not [t for t in threading.enumerate() if t.name == "kvtier-populate"]
    assert seen == [(512, True)]


def test_close_from_the_callback(region_dir: str) -> None:
    region = create(region_dir, 4 * MIB // 4096)
    done = threading.Event()

    def on_available(total: int) -> None:
        region.close()
        done.set()

    region.populate(on_available)
    assert done.wait(20)
    assert not os.path.exists(region.path)
