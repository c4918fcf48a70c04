# SPDX-License-Identifier: Apache-2.0
"""A region in one process: memory, handles, and what is refused."""

from __future__ import annotations

import gc
import itertools
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtier import __version__
from kvtier.errors import ClosedError, ConfigError
from kvtier.host import files, header
from kvtier.host.mapping import MAPPED_FILES
from kvtier.host.region import Region, sweep
from kvtier.namespace import namespace_digest
from kvtier.testing import leaks
from kvtier.types import Geometry, GroupGeometry, PageGeometry
from tests.host.child import geometry

NAMESPACE = {"model": "m", "dtype": "bfloat16"}


def create(directory: str, name: str = "r", **options: object) -> Region:
    values = {"geometry": geometry(), "namespace": NAMESPACE, "ranks": 2, **options}
    return Region.create(name, directory=directory, timeout_seconds=0.2, **values)


def test_what_was_given_is_there(region_dir: str) -> None:
    pages = (PageGeometry("layer.0", 0, 3000), PageGeometry("layer.1", 3000, 2000))
    groups = (GroupGeometry(16, 2, 5000, pages, 4), GroupGeometry(64, 1, 4000))
    shape = Geometry(groups=groups, num_slots=10, slot_bytes=12288)
    with create(region_dir, geometry=shape, ranks=3):
        region = Region.attach("r", directory=region_dir, timeout_seconds=1, signed=False)
        assert region.geometry == shape
        assert region.namespace == NAMESPACE
        assert region.namespace_digest == namespace_digest(NAMESPACE)
        assert (region.name, region.ranks) == ("r", 3)
        assert region.path == f"{region_dir}/{os.path.basename(region.path)}"
        assert os.path.basename(region.path).startswith(f"kvtier-{os.getuid()}-")
        assert os.stat(region.path).st_mode & 0o777 == 0o600
        assert region.geometry.padding_ratio == (1 - 10000 / 12288, 1 - 4000 / 12288)
        assert not os.get_inheritable(region.fileno())
        region.close()


def test_memory_is_disjoint_aligned_and_zero(region_dir: str) -> None:
    with create(region_dir) as region:
        count, size = region.geometry.num_slots, region.geometry.slot_bytes
        spans = {}
        for name in ("records", "table", "payload"):
            view = np.frombuffer(getattr(region, name), np.uint8)
            start = view.__array_interface__["data"][0]
            assert start % 4096 == 0
            assert not view.any()
            spans[name] = (start, start + view.size)
            view[:] = 0xAA
        assert spans["records"][1] - spans["records"][0] == 64 * count
        assert spans["payload"][1] - spans["payload"][0] == size * count
        ordered = sorted(spans.values())
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ordered))
        assert region.base_address == spans["payload"][0]
        assert region.slot_address(5) == spans["payload"][0] + 5 * size
        # Filled to the last byte, and the header is as it was.
        assert region.available_slots == count
        assert [region.finished(rank) for rank in range(2)] == [-1, -1]
        again = Region.attach("r", directory=region_dir, timeout_seconds=1, signed=False)
        assert again.geometry == region.geometry
        again.close()


def test_slots_hold_their_own_bytes(region_dir: str) -> None:
    with create(region_dir) as region:
        size = region.geometry.slot_bytes
        for slot in range(region.geometry.num_slots):
            region.slot_view(slot, size)[:] = bytes([slot + 1]) * size
        for slot in range(region.geometry.num_slots):
            assert bytes(region.payload[slot * size : (slot + 1) * size]) == (
                bytes([slot + 1]) * size
            )
        assert len(region.slot_view(3, 17)) == 17
        for slot in (-1, region.geometry.num_slots):
            with pytest.raises(IndexError, match="64 of 64 have memory"):
                region.slot_view(slot, 1)
            with pytest.raises(IndexError, match="64 of 64 have memory"):
                region.slot_address(slot)
        for length in (-1, size + 1):
            with pytest.raises(IndexError, match="at most 4096 bytes"):
                region.slot_view(0, length)


def test_handles_of_one_process_share_a_mapping(region_dir: str) -> None:
    before = leaks.take()
    first = create(region_dir)
    one = leaks.take()
    second = create(region_dir)
    third = Region.attach("r", directory=region_dir, timeout_seconds=1, signed=False)
    fourth = Region.from_fd(first.fileno())
    assert leaks.take().fds == one.fds
    assert leaks.take().mappings == one.mappings == before.mappings + 1
    assert len({region.base_address for region in (first, second, third, fourth)}) == 1
    assert (first.is_creator, second.is_creator, third.is_creator) == (True, False, False)
    first.close()
    assert os.path.exists(second.path)
    second.slot_view(0, 2)[:] = b"ab"
    assert bytes(fourth.slot_view(0, 2)) == b"ab"
    for region in (second, third, fourth):
        region.close()
        region.close()
    assert not os.path.exists(first.path)
    assert MAPPED_FILES.count() == 0
    assert leaks.take() == before


def test_two_regions_in_one_process(region_dir: str) -> None:
    with create(region_dir, "a") as a, create(region_dir, "b", geometry=geometry(32)) as b:
        assert a.path != b.path
        a.slot_view(0, 1)[:] = b"a"
        b.slot_view(0, 1)[:] = b"b"
        assert bytes(a.slot_view(0, 1)) == b"a"
        a.close()
        assert bytes(b.slot_view(0, 1)) == b"b"


def test_closed_region_refuses_use_and_close_is_idempotent(region_dir: str) -> None:
    region = create(region_dir)
    region.close()
    region.close()
    for call in (
        lambda: region.records,
        lambda: region.payload,
        lambda: region.available_slots,
        lambda: region.slot_view(0, 1),
        lambda: region.finished(0),
        lambda: region.sign(0),
        region.fileno,
    ):
        with pytest.raises(ClosedError, match="is closed"):
            call()


def test_view_outlives_its_region(region_dir: str) -> None:
    before = leaks.take()
    region = create(region_dir)
    view = region.slot_view(1, 4)
    array = np.frombuffer(region.records, np.uint8)
    view[:] = b"live"
    region.close()
    assert not os.path.exists(region.path)
    assert leaks.take().fds == before.fds
    assert bytes(view) == b"live"
    assert array.sum() == 0
    del view, array
    assert leaks.take().mappings == before.mappings


def test_forgotten_handle_gives_all_back(region_dir: str) -> None:
    gc.collect()  # what earlier tests have forgotten
    before = leaks.take()
    region = create(region_dir, step_bytes=4096)
    region.populate(lambda slots: None)
    path = region.path
    del region
    gc.collect()
    assert not os.path.exists(path)
    assert leaks.take() == before


@pytest.mark.fault("L03")
def test_end_of_interpreter_removes_the_file(region_dir: str) -> None:
    text = (
        "from tests.host.test_region import create\n"
        f"region = create({region_dir!r})\n"
        "print(region.path)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(region_dir)
    assert done.stderr == ""
    assert os.listdir(region_dir) == []


@pytest.mark.parametrize(
    ("field", "change", "words"),
    [
        ("ranks", {"ranks": 3}, "ranks: 3 here, 2 in the region"),
        (
            "slots",
            {"geometry": geometry(65)},
            "geometry.num_slots: 65 here, 64 in the region",
        ),
        (
            "groups",
            {"geometry": msgspec.structs.replace(geometry(), groups=geometry().groups * 2)},
            "geometry.groups: 2 here, 1 in the region",
        ),
        (
            "block",
            {"geometry": geometry(64, 3001)},
            "geometry.groups[0].block_bytes: 3001 here, 3000 in the region",
        ),
        (
            "value",
            {"namespace": {**NAMESPACE, "dtype": "float16"}},
            "namespace.dtype: 'float16' here, 'bfloat16' in the region",
        ),
        (
            "more",
            {"namespace": {**NAMESPACE, "rope": "yarn"}},
            "namespace.rope: 'yarn' here, absent in the region",
        ),
        (
            "less",
            {"namespace": {"model": "m"}},
            "namespace.dtype: absent here, 'bfloat16' in the region",
        ),
    ],
)
def test_difference_is_named(region_dir: str, field: str, change: dict, words: str) -> None:
    with create(region_dir):
        with pytest.raises(ConfigError) as caught:
            create(region_dir, **change)
        assert words in str(caught.value)
        with create(region_dir) as other:
            assert not other.is_creator


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "x" * 256}, "1 to 255 bytes, got 256"),
        ({"name": ""}, "1 to 255 bytes, got 0"),
        ({"ranks": 0}, "1 to 4096 ranks, got 0"),
        ({"ranks": 4097}, "1 to 4096 ranks, got 4097"),
        ({"geometry": Geometry((), 1, 4096)}, "at least one KV cache group"),
        ({"geometry": msgspec.structs.replace(geometry(), num_slots=0)}, "at least one slot"),
        ({"geometry": msgspec.structs.replace(geometry(), slot_bytes=4097)}, "multiple of 4096"),
        ({"geometry": msgspec.structs.replace(geometry(), slab_slots=7)}, "64 slots are no mult"),
        ({"geometry": msgspec.structs.replace(geometry(64, 5000), slot_bytes=4096)}, "largest"),
    ],
)
def test_wrong_arguments(region_dir: str, change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        create(region_dir, **change)


SLABS = Geometry((GroupGeometry(16, 1, 16000), GroupGeometry(16, 1, 4096)), 30, 4096, 6)
"""Five slabs of one chunk of four slots, or of six of one."""


def test_a_region_in_slabs_says_so_to_those_who_join(region_dir: str) -> None:
    with create(region_dir, geometry=SLABS) as region:
        for change, words in (
            ({"slab_slots": 10}, "geometry.slab_slots: 10 here, 6 in the region"),
            ({"slab_slots": 5}, "geometry.slab_slots: 5 here, 6 in the region"),
            ({"slot_bytes": 8192}, "geometry.slot_bytes: 8192 here, 4096 in the region"),
        ):
            with pytest.raises(ConfigError, match=words):
                create(region_dir, geometry=msgspec.structs.replace(SLABS, **change))
        other = Region.attach("r", directory=region_dir, timeout_seconds=1, signed=False)
        assert other.geometry == SLABS
        base = region.base_address
        assert region.area(0) == (base, 6 * 4096, 5, 16384)
        assert region.area(1) == (base, 6 * 4096, 5, 4096)
        other.close()


def test_no_chunk_goes_over_the_end_of_its_slab(region_dir: str) -> None:
    with create(region_dir, geometry=SLABS) as region:
        region.slot_view(6, 16384)[:] = b"\x5a" * 16384
        assert len(region.slot_view(8, 16384)) == 16384
        assert bytes(region.slot_view(9, 4096)) == b"\x5a" * 4096
        assert region.slot_address(9) == region.base_address + 9 * 4096
        for slot, size in ((9, 12288), (11, 4096), (0, 24576)):
            with pytest.raises(IndexError, match=f"at most {size} bytes"):
                region.slot_view(slot, size + 1)


def test_long_names_make_short_paths(region_dir: str) -> None:
    with create(region_dir, "x" * 255) as region, create(region_dir, "x" * 254) as other:
        assert len(os.path.basename(region.path)) < 40
        assert region.path != other.path


def test_directory_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot make a region in /no/such/place: No such file"):
        create("/no/such/place")
    with pytest.raises(ConfigError, match="cannot make a region in /proc"):
        create("/proc")


def test_another_version_is_refused(region_dir: str) -> None:
    with create(region_dir) as region:
        fd = os.open(region.path, os.O_RDWR)
        os.pwrite(fd, b"9.9.9".ljust(32, b"\0"), 64)
        # Without this process's own mapping the header is read anew.
        text = (
            "import sys\n"
            "from kvtier.host.region import Region\n"
            f"Region.attach('r', directory={region_dir!r}, timeout_seconds=0, signed=False)\n"
        )
        run = [sys.executable, "-c", text]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert f"made by kvtier 9.9.9 (format 2), this is kvtier {__version__}" in done.stderr
        os.pwrite(fd, __version__.encode().ljust(32, b"\0"), 64)
        os.pwrite(fd, struct.pack("<I", 7), 8)
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert f"made by kvtier {__version__} (format 7)" in done.stderr
        os.pwrite(fd, b"somebody", 0)
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert "is no region of kvtier" in done.stderr
        os.close(fd)


@pytest.mark.parametrize("damage", ["meta", "short"])
def test_damaged_file_is_refused(region_dir: str, damage: str) -> None:
    path = files.region_path(region_dir, "r")
    with create(region_dir) as region:
        content = Path(region.path).read_bytes()
    content = bytearray(content)
    if damage == "meta":
        content[4096:4100] = b"\xff" * 4
    else:
        del content[-4096:]
    with open(path, "wb") as file:
        file.write(content)
        assert files.try_lock(file.fileno(), exclusive=False)
        with pytest.raises(ConfigError, match=r"damaged header|bytes where its header wants"):
            Region.attach("r", directory=region_dir, timeout_seconds=0, signed=False)
        assert MAPPED_FILES.count() == 0
    assert sweep(region_dir) == [path]


@pytest.mark.fault("F10")
def test_what_stands_in_the_way_is_named(region_dir: str) -> None:
    path = files.region_path(region_dir, "r")
    os.symlink("/dev/zero", path)
    with pytest.raises(ConfigError, match="it is no plain file, remove it"):
        create(region_dir)
    assert sweep(region_dir) == []
    os.unlink(path)
    os.mkdir(path)
    with pytest.raises(ConfigError, match="it is no plain file, remove it"):
        create(region_dir)
    os.rmdir(path)


@pytest.mark.fault("F10")
@pytest.mark.needs("root")
def test_file_of_another_user_is_left_alone(region_dir: str) -> None:
    path = files.region_path(region_dir, "r")
    Path(path).touch()
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to uid 12345, this process runs as uid 0"):
        create(region_dir)
    assert sweep(region_dir) == []
    assert os.path.exists(path)
    # As that user: root's file is not readable, and has another name.
    os.chmod(region_dir, 0o1777)
    with create(region_dir, "s") as mine:
        text = (
            "import os\n"
            "from tests.host.test_region import create, sweep\n"
            "os.setuid(12345)\n"
            f"with create({region_dir!r}, 's') as region:\n"
            "    print(os.path.basename(region.path))\n"
            f"    print(sweep({region_dir!r}))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=True
        )
        name, swept = done.stdout.splitlines()
        assert name.startswith("kvtier-12345-")
        assert swept == "[]"
        assert os.path.exists(mine.path)
    os.unlink(path)


def test_sweep_takes_only_the_dead(region_dir: str) -> None:
    dead = os.path.join(region_dir, f"kvtier-{os.getuid()}-dead")
    other = os.path.join(region_dir, "something-else")
    for path in (dead, other):
        Path(path).touch()
    with create(region_dir) as region:
        assert not os.path.exists(dead), "create sweeps"
        Path(dead).touch()
        assert sweep(region_dir) == [dead]
        assert sorted(os.listdir(region_dir)) == sorted(
            [os.path.basename(region.path), "something-else"]
        )
        region.slot_view(0, 1)[:] = b"x"
    os.unlink(other)


def test_close_leaves_a_file_that_took_the_name(region_dir: str) -> None:
    with create(region_dir) as region:
        os.unlink(region.path)
        Path(region.path).touch()
    assert os.path.exists(region.path), "not this region's inode"
    os.unlink(region.path)


def test_swept_between_two_locks_is_made_again(
    region_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The gap while the creator changes its exclusive lock to a shared one.
    original, calls = files.try_lock, []

    def gap(fd: int, *, exclusive: bool) -> bool:
        if not exclusive and not calls:
            calls.append(fd)
            files.fcntl.flock(fd, files.fcntl.LOCK_UN)
            assert len(sweep(region_dir)) == 1
        return original(fd, exclusive=exclusive)

    monkeypatch.setattr(files, "try_lock", gap)
    with create(region_dir) as region:
        assert calls
        assert region.is_creator
        assert os.path.exists(region.path)


def test_threads_create_at_once(region_dir: str) -> None:
    barrier, regions = threading.Barrier(8), []

    def run() -> None:
        barrier.wait(10)
        regions.append(
            Region.create("r", geometry(), NAMESPACE, 8, directory=region_dir, timeout_seconds=20)
        )

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(region.is_creator for region in regions) == 1
    assert len({region.base_address for region in regions}) == 1
    for region in regions:
        region.close()


@pytest.mark.fault("H24")
def test_attach_says_what_is_missing(region_dir: str) -> None:
    with pytest.raises(ConfigError, match="no rank has made it"):
        Region.attach("r", directory=region_dir, timeout_seconds=0.05)
    with create(region_dir, ranks=4) as region:
        region.sign(2)
        with pytest.raises(ConfigError, match="ranks 0, 1, 3 of 4 have not signed"):
            Region.attach("r", directory=region_dir, timeout_seconds=0.05)
        region.sign(0)
        region.sign(1)
        region.sign(3)
        Region.attach("r", directory=region_dir, timeout_seconds=0.05).close()


def test_attach_returns_once_the_last_has_signed(region_dir: str) -> None:
    found: list[Region] = []
    with create(region_dir) as region:
        region.sign(0)
        thread = threading.Thread(
            target=lambda: found.append(Region.attach("r", directory=region_dir))
        )
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        region.sign(1)
        thread.join(10)
        assert found[0].unsigned() == []
        found[0].close()


def test_state_of_a_file_without_header(region_dir: str) -> None:
    fd = files.create_nameless(region_dir)
    assert header.read_state(fd) == header.BUILDING
    os.close(fd)
