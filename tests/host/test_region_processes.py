# SPDX-License-Identifier: Apache-2.0
"""Regions between real processes: joining, dying at every point, forking."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.host import files
from kvtier.host.mapping import TAKEOVER_BYTE
from kvtier.host.opening import join
from kvtier.host.region import Region, sweep
from kvtier.testing import leaks
from tests.host.child import geometry

Spawn = Callable[..., Any]
POINTS = ["nameless", "linked", "building", "ready"]


def create(directory: str, ranks: int = 1, timeout_seconds: float = 20) -> Region:
    return Region.create(
        "r", geometry(), {"model": "m"}, ranks, directory=directory, timeout_seconds=timeout_seconds
    )


@pytest.mark.parametrize("count", [2, 4])
def test_processes_create_at_once(region_dir: str, spawn: Spawn, count: int) -> None:
    children = spawn(count)
    for child in children:
        child.send("create", directory=region_dir, ranks=count)
    answers = [child.receive() for child in children]
    assert sum(answer["creator"] for answer in answers) == 1
    assert len(os.listdir(region_dir)) == 1
    for rank, child in enumerate(children):
        child.ask("write", slot=rank, text=f"rank {rank}")
        child.ask("sign", rank=rank)
    for rank, child in enumerate(children):
        beside = (rank + 1) % count
        assert child.ask("read", slot=beside, length=6) == {"text": f"rank {beside}"}
    region = Region.attach("r", directory=region_dir, timeout_seconds=20)
    for rank, child in enumerate(children):
        assert region.finished_by_all() == -1
        child.ask("finish", rank=rank, publish=[0, 1, 3], fail=[2] if rank == 1 else [])
        assert region.finished(rank) == (3 if rank == 1 else 1)
    assert region.finished_by_all() == 1
    assert [region.failures(rank) for rank in range(2)] == [[], [2]]
    region.close()
    for child in children:
        assert os.listdir(region_dir) != []
        child.ask("close")
    assert os.listdir(region_dir) == []


def test_all_joiners_wait_for_a_creator_at_work(region_dir: str, spawn: Spawn) -> None:
    creator, *others = spawn(3)
    creator.send("create", directory=region_dir, pause="building")
    assert creator.receive() == {"at": "building"}
    for child in others:
        child.send("create", directory=region_dir)
    with pytest.raises(ConfigError, match="another rank is still building it"):
        create(region_dir, timeout_seconds=0.1)
    creator.go()
    assert creator.receive()["creator"] is True
    assert [child.receive()["creator"] for child in others] == [False, False]


def test_rank_that_differs_is_refused(region_dir: str, spawn: Spawn) -> None:
    one, other = spawn(2)
    one.ask("create", directory=region_dir, ranks=2)
    answer = other.ask("create", directory=region_dir, ranks=2, namespace={"model": "n"})
    assert answer["error"] == "ConfigError"
    assert "namespace.model: 'n' here, 'm' in the region" in answer["message"]
    answer = other.ask("create", directory=region_dir, ranks=2, slots=63)
    assert "geometry.num_slots: 63 here, 64 in the region" in answer["message"]
    assert other.ask("create", directory=region_dir, ranks=2)["creator"] is False


def test_a_rank_signs_once(region_dir: str, spawn: Spawn) -> None:
    one, other = spawn(2)
    for child in (one, other):
        child.ask("create", directory=region_dir, ranks=2)
    assert one.ask("sign", rank=0) == {}
    assert one.ask("sign", rank=0) == {}
    answer = other.ask("sign", rank=0)
    assert f"rank 0 of the region {region_dir}" in answer["message"]
    assert f"signed for by process {one.process.pid}" in answer["message"]
    answer = other.ask("finish", rank=0, publish=[0], fail=[])
    assert "publishes without having signed" in answer["message"]
    assert other.ask("sign", rank=1) == {}
    assert "rank 2 of a region for 2 ranks" in other.ask("sign", rank=2)["message"]


def test_signature_of_a_dead_rank_is_not_renewed(region_dir: str, spawn: Spawn) -> None:
    # Its transfers are numbered on from where it died; nobody can know which of them ended.
    one, other = spawn(2)
    for child in (one, other):
        child.ask("create", directory=region_dir, ranks=2)
    one.ask("sign", rank=0)
    pid = one.process.pid
    one.kill()
    assert f"signed for by process {pid}" in other.ask("sign", rank=0)["message"]


@pytest.mark.fault("L01")
@pytest.mark.fault("H23")
@pytest.mark.parametrize("point", POINTS)
def test_creator_killed_at_a_point(region_dir: str, spawn: Spawn, point: str) -> None:
    creator, waiting, fresh = spawn(3)
    creator.send("create", directory=region_dir, pause=point)
    assert creator.receive() == {"at": point}
    assert len(os.listdir(region_dir)) == (point != "nameless")
    waiting.send("create", directory=region_dir)
    if point == "nameless":
        assert waiting.receive()["creator"] is True
    assert sweep(region_dir) == [], "a living creator's file is not swept"
    creator.kill()
    if point != "nameless":
        # Killed in READY but before it let others in, the file is as dead as a half-made one.
        assert waiting.receive()["creator"] is True
    assert fresh.ask("create", directory=region_dir)["creator"] is False
    for child in (waiting, fresh):
        child.ask("close")
    assert os.listdir(region_dir) == []


@pytest.mark.fault("L01")
@pytest.mark.parametrize("point", POINTS)
def test_next_start_removes_what_a_kill_left(region_dir: str, spawn: Spawn, point: str) -> None:
    creator = spawn()
    creator.send("create", directory=region_dir, name="another", pause=point)
    assert creator.receive() == {"at": point}
    creator.kill()
    assert len(os.listdir(region_dir)) == (point != "nameless")
    with create(region_dir) as region:
        assert os.listdir(region_dir) == [os.path.basename(region.path)]
    assert os.listdir(region_dir) == []


@pytest.mark.fault("L01")
@pytest.mark.needs("mount")
def test_restarts_after_kills_on_a_tmpfs_of_one_region(
    small_tmpfs: Callable[[int], str], spawn: Spawn
) -> None:
    slots = 2048
    folder = small_tmpfs(int(1.2 * slots * 4096))
    children = spawn(6)
    for child in children[:5]:
        answer = child.ask("create", directory=folder, slots=slots, step_bytes=1 << 20)
        assert answer.get("creator") is True, answer
        assert child.ask("populate") == {"done": True}
        free = os.statvfs(folder)
        assert free.f_bavail * free.f_frsize < slots * 4096, "no room for a second one"
        child.kill()
        assert len(os.listdir(folder)) == 1
    # The control: while its process lives, the memory is not to be had.
    last = spawn()
    assert last.ask("create", directory=folder, slots=slots, name="a")["creator"] is True
    refused = children[5].ask("create", directory=folder, slots=slots, name="b")
    assert f"{folder} has only" in refused["message"]
    last.ask("close")
    assert os.listdir(folder) == []


@pytest.mark.fault("L03")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("point", ["linked", "building", "ready", "returned"])
def test_signal_that_raises_leaves_nothing(
    region_dir: str, spawn: Spawn, point: str, number: int
) -> None:
    child = spawn()
    child.ask("unwind")
    if point == "returned":
        child.ask("create", directory=region_dir)
    else:
        child.send("create", directory=region_dir, pause=point)
        assert child.receive() == {"at": point}
    assert len(os.listdir(region_dir)) == 1
    assert child.kill(number) != 0
    assert os.listdir(region_dir) == []


@pytest.mark.fault("L03")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_that_kills_leaves_what_the_next_start_takes(
    region_dir: str, spawn: Spawn, number: int
) -> None:
    child = spawn()
    child.ask("create", directory=region_dir)
    assert child.kill(number) == -number
    with create(region_dir) as region:
        assert region.is_creator
        assert len(os.listdir(region_dir)) == 1


@pytest.mark.fault("L03")
def test_last_holder_removes_the_file_of_a_dead_creator(region_dir: str, spawn: Spawn) -> None:
    creator, service = spawn(2)
    creator.ask("create", directory=region_dir)
    service.ask("attach", directory=region_dir, signed=False)
    creator.kill()
    assert len(os.listdir(region_dir)) == 1
    service.end()
    assert os.listdir(region_dir) == []


@pytest.mark.fault("L04")
def test_survivor_keeps_nothing_of_those_that_died(region_dir: str, spawn: Spawn) -> None:
    with create(region_dir) as region:
        region.slot_view(0, 4)[:] = b"keep"
        children = spawn(10)
        before = leaks.take()
        rss = _rss_bytes()
        for child in children:
            child.ask("attach", directory=region_dir, signed=False)
            child.ask("write", slot=1, text="x" * 3000)
            child.kill()
            # A handle of the survivor's own, as for each life of a peer.
            Region.attach("r", directory=region_dir, signed=False).close()
        after = leaks.take()
        assert (after.fds, after.mappings) == (before.fds, before.mappings)
        assert _rss_bytes() - rss < 2 << 20
        assert bytes(region.slot_view(0, 4)) == b"keep"
        assert sweep(region_dir) == []


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.fault("K07")
def test_old_mapping_stays_valid_when_the_owner_restarts(region_dir: str, spawn: Spawn) -> None:
    owner, idle, fresh = spawn(3)
    owner.ask("create", directory=region_dir)
    owner.ask("write", slot=1, text="old bytes")
    idle.ask("attach", directory=region_dir, signed=False)
    owner.kill()
    answer = fresh.ask("create", directory=region_dir, timeout=1)
    assert answer["creator"] is True
    assert fresh.ask("read", slot=1, length=9) == {"text": "\0" * 9}
    fresh.ask("write", slot=1, text="new bytes")
    assert idle.ask("read", slot=1, length=9) == {"text": "old bytes"}
    idle.ask("write", slot=1, text="old still")
    assert fresh.ask("read", slot=1, length=9) == {"text": "new bytes"}
    idle.ask("close")
    assert os.listdir(region_dir) == [os.path.basename(answer["path"])]
    assert idle.ask("attach", directory=region_dir, signed=False) == {"path": answer["path"]}
    assert idle.ask("read", slot=1, length=9) == {"text": "new bytes"}


@pytest.mark.fault("K07")
@pytest.mark.parametrize("dead", ["creator", "rank"])
def test_manager_does_not_take_an_earlier_starts_region(
    region_dir: str, spawn: Spawn, dead: str
) -> None:
    creator, rank, service, manager, fresh = spawn(5)
    for number, child in enumerate((creator, rank)):
        child.ask("create", directory=region_dir, ranks=2)
        child.ask("sign", rank=number)
    service.ask("attach", directory=region_dir)
    (creator if dead == "creator" else rank).kill()
    refused = manager.ask("attach", directory=region_dir, timeout=0.1)
    who = "creator" if dead == "creator" else "rank 1"
    assert f"it belongs to an earlier start whose {who} has died" in refused["message"]
    manager.send("attach", directory=region_dir)
    old = os.stat(os.path.join(region_dir, *os.listdir(region_dir)))
    assert fresh.ask("create", directory=region_dir, ranks=1, timeout=1)["creator"] is True
    fresh.ask("write", slot=0, text="fresh")
    fresh.ask("sign", rank=0)
    path = manager.receive()["path"]
    assert os.stat(path).st_ino != old.st_ino
    assert manager.ask("read", slot=0, length=5) == {"text": "fresh"}


@pytest.mark.fault("K07")
def test_one_of_many_takes_the_name_over(region_dir: str, spawn: Spawn) -> None:
    creator, holder, *fresh = spawn(5)
    creator.ask("create", directory=region_dir)
    holder.ask("attach", directory=region_dir, signed=False)
    creator.kill()
    for child in fresh:
        child.send("create", directory=region_dir, ranks=3, timeout=2)
    assert sorted(child.receive()["creator"] for child in fresh) == [False, False, True]
    assert len(os.listdir(region_dir)) == 1


def test_name_is_taken_over_by_one_at_a_time(region_dir: str) -> None:
    with create(region_dir) as region:
        other = os.open(region.path, os.O_RDWR)
        assert files.lock_byte(other, TAKEOVER_BYTE)
        region._mapped.lose_name()
        assert os.path.exists(region.path)
        os.close(other)
        region._mapped.lose_name()
        assert not os.path.exists(region.path)
        fd = os.open(region.path, os.O_CREAT | os.O_EXCL)
        region._mapped.lose_name()
        assert os.path.exists(region.path), "another inode"
        os.unlink(region.path)
        os.close(fd)


def test_joiner_that_comes_as_the_last_one_leaves(region_dir: str) -> None:
    region = create(region_dir)
    fd = os.open(region.path, os.O_RDWR)
    region.close()
    assert join(fd, region.path, deadline=0) == (None, "it has just been removed")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_child_with_an_inherited_descriptor(region_dir: str, spawn: Spawn) -> None:
    region = create(region_dir)
    region.slot_view(2, 3)[:] = b"abc"
    child = spawn(pass_fds=(region.fileno(),))
    answer = child.ask("from_fd", fd=region.fileno())
    assert answer["path"] == region.path
    assert child.ask("read", slot=2, length=3) == {"text": "abc"}
    region.close()
    assert os.path.exists(region.path), "the child holds a lock of its own"
    child.ask("close")
    assert os.listdir(region_dir) == []


def test_inherited_descriptor_of_a_file_without_a_name(region_dir: str, spawn: Spawn) -> None:
    with create(region_dir) as region:
        os.unlink(region.path)
        child = spawn(pass_fds=(region.fileno(),))
        child.ask("from_fd", fd=region.fileno())
        child.ask("write", slot=0, text="abc")
        assert bytes(region.slot_view(0, 3)) == b"abc"


@pytest.mark.fault("H20")
def test_forked_child_refuses_use(region_dir: str, spawn: Spawn) -> None:
    reading, writing = os.pipe()
    child = spawn(pass_fds=(reading,))
    child.ask("create", directory=region_dir)
    child.ask("sign", rank=0)
    answers = child.ask("fork", wait_fd=reading)["answers"]
    os.close(reading)
    os.close(writing)
    assert answers.pop("maps") == "0"
    assert answers.pop("fds") == "0"
    assert answers.pop("place") == "taken True, kept True"
    assert len(answers) == 16
    for call, answer in answers.items():
        assert answer.startswith("ClosedError: the region"), (call, answer)
        assert "forked" in answer
    # The parent is unharmed, and its file still there.
    assert child.ask("available") == {"slots": 64}
    child.ask("write", slot=0, text="abc")
    assert child.ask("read", slot=0, length=3) == {"text": "abc"}
    assert len(os.listdir(region_dir)) == 1
    assert sweep(region_dir) == []


@pytest.mark.fault("H20")
@pytest.mark.parametrize("forget", [True, False])
def test_fork_does_not_keep_a_dead_parents_file(
    region_dir: str, spawn: Spawn, forget: bool
) -> None:
    reading, writing = os.pipe()
    child = spawn(pass_fds=(reading,))
    child.ask("create", directory=region_dir)
    watch = os.pidfd_open(child.ask("fork", wait_fd=reading, forget=forget)["pid"])
    child.kill()
    # The forked child lives on, as one that a server forked for a helper would.
    assert select.select([watch], [], [], 0)[0] == []
    # Without the hook that closes the forked child's descriptor the file stays: the control.
    assert len(sweep(region_dir)) == forget
    os.close(reading)
    os.close(writing)
    assert select.select([watch], [], [], 20)[0] == [watch]
    os.close(watch)
    if not forget:
        assert len(sweep(region_dir)) == 1
