# SPDX-License-Identifier: Apache-2.0
"""One directory and several instances: names, namespaces, leftovers of the dead, the living."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier._core import fileio
from kvtier.errors import ConfigError
from kvtier.namespace import directory_name, namespace_digest
from kvtier.testing.contract import chunk
from kvtier.tiers.fs import naming
from kvtier.types import Outcome, make_key
from tests.tiers.fs.util import GROUP, SIZE, opened, temporary_files


async def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


BASE = {
    "model": "org/model",
    "revision": "a",
    "kv_dtype": "bfloat16",
    "tile_format": "NHD",
    "fingerprint": "1",
}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("tile_format", "HND", marks=pytest.mark.fault("C05")),
        pytest.param("kv_dtype", "float16", marks=pytest.mark.fault("C06")),
        pytest.param("revision", "b", marks=pytest.mark.fault("C07")),
        pytest.param("fingerprint", "2", marks=pytest.mark.fault("C10")),
        pytest.param("kv_dtype", "fp8_e4m3", marks=pytest.mark.fault("C11")),
    ],
)
async def test_namespaces_do_not_share(tmp_path: Path, field: str, value: str) -> None:
    """Two instances that differ in one field see nothing of each other, and harm nothing."""
    second = {**BASE, field: value}
    async with opened(tmp_path / "root", fields=BASE) as bench:
        assert await bench.store(1) == [Outcome.DONE]
        before = bench.file(1).read_bytes()
        async with opened(tmp_path / "root", fields=second) as other:
            assert other.tier.path != bench.tier.path
            assert await other.there(1) == [False]
            assert await other.load(1) == [Outcome.MISSING]
            assert await other.store(1) == [Outcome.DONE]
            # Bytes that somebody copied over are not served either: the trailer says whose.
            shutil.copy(bench.file(1), other.file(1))
            assert await other.load(1) == [Outcome.CORRUPT]
        assert bench.file(1).read_bytes() == before
        assert await bench.load(1) == [Outcome.DONE]


@pytest.mark.asyncio
async def test_namespace_file(tmp_path: Path) -> None:
    """A person can read what the directory is; one of another namespace is refused."""
    async with opened(tmp_path / "root", fields=BASE) as bench:
        file = Path(bench.tier.path, "namespace.json")
        text = file.read_text()
        assert '"revision": "a"' in text
        assert namespace_digest(BASE).hex() in text
        assert Path(bench.tier.path).name == directory_name(BASE)
        other = {**BASE, "revision": "b"}
        async with opened(tmp_path / "root", fields=other) as second:
            shutil.copy(Path(second.tier.path, "namespace.json"), file)
    with pytest.raises(ConfigError, match=r"revision: 'a' here, 'b' there"):
        async with opened(tmp_path / "root", fields=BASE):
            pass
    # One that was torn (no atomic rename there) is written anew.
    file.write_text(text[:50])
    async with opened(tmp_path / "root", fields=BASE):
        assert file.read_text() == text


WRITER = """
import asyncio, os, pathlib, sys
import tests.tiers.fs.util as util
async def main():
    async with util.opened(pathlib.Path(sys.argv[1])) as bench:
        start, mode = int(sys.argv[2]), sys.argv[3]
        if mode == "hang":
            gate, _ = os.pipe()
            bench.faults.block("rename", gate)
            tasks = [asyncio.create_task(bench.store(start + n)) for n in range(4)]
            while bench.faults.calls("rename") < 4:
                await asyncio.sleep(0.01)
            print("written", flush=True)
            await asyncio.sleep(60)
        for _ in range(3):
            outcomes = await bench.store(*range(start, start + 40))
            assert all(o.ok for o in outcomes), outcomes
            outcomes = await bench.load(*range(start, start + 40))
            assert all(o.name == "DONE" for o in outcomes), outcomes
asyncio.run(main())
"""


def spawn(root: Path, start: int, mode: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(start), mode], stdout=subprocess.PIPE
    )


@pytest.mark.asyncio
@pytest.mark.fault("R03")
async def test_ranks_share_one_directory(tmp_path: Path) -> None:
    """Four processes store and load the same and neighbouring chunks: nobody truncates anybody."""
    root = tmp_path / "root"
    processes = [spawn(root, 10 * n, "work") for n in range(4)]
    for process in processes:
        assert await asyncio.to_thread(process.wait, 60) == 0
        process.stdout.close()
    async with opened(root) as bench:
        assert set(await bench.load(*range(64))) == {Outcome.DONE}
        assert bench.tier.usage.files == 70
    assert not temporary_files(root)


@pytest.mark.asyncio
@pytest.mark.fault("H23")
async def test_writer_killed_before_commit(tmp_path: Path) -> None:
    """Its chunks can be written at once by others, and its temporary files go."""
    root = tmp_path / "root"
    process = spawn(root, 0, "hang")
    try:
        first = asyncio.to_thread(process.stdout.readline)
        assert await asyncio.wait_for(first, 60) == b"written\n"
        assert len(temporary_files(root)) == 4
        async with opened(root) as bench:
            # While it lives its files are left alone, also by an instance of the same host.
            assert len(temporary_files(root)) == 4
            assert await bench.there(0) == [False]
            assert await bench.store(0) == [Outcome.DONE]
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait, 30)
            assert len(temporary_files(root)) == 4
            bench.samples()
            bench.tier._janitor.walk()
            await until(lambda: not temporary_files(root))
            await until(lambda: bench.samples().get(("kvtier_fs_swept_total", "fs")) == 4)
            assert await bench.store(1) == [Outcome.DONE]
            assert await bench.load(0, 1) == [Outcome.DONE] * 2
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.asyncio
@pytest.mark.fault("H23")
async def test_leftovers_of_others(tmp_path: Path) -> None:
    """A temporary file of another host is left alone while it is young."""
    async with opened(tmp_path / "root") as bench:
        assert await bench.store(1) == [Outcome.DONE]
        name = bench.file(1).name
        foreign = naming.Owner("0" * 12, 1, 1, "aa")
        own = naming.this_owner()
        earlier = naming.Owner(own.host, own.pid, own.start - 1, "aa")
        files = {
            key: bench.file(1).with_name(f"{name}.{owner}.{key}.tmp")
            for key, owner in (("1", foreign), ("2", foreign), ("3", earlier), ("4", own))
        }
        for path in files.values():
            path.write_bytes(b"x")
        unrelated = bench.file(1).with_name("notes.tmp")
        unrelated.write_bytes(b"x")
        old = time.time() - 7200
        os.utime(files["2"], (old, old))
        bench.tier._janitor.walk()
        await until(lambda: not files["2"].exists() and not files["3"].exists())
        assert files["1"].exists()
        assert files["4"].exists()
        assert unrelated.exists()


@pytest.mark.asyncio
@pytest.mark.fault("F12")
async def test_janitor_waits_for_its_directory(tmp_path: Path) -> None:
    """The root disappears: writes go on in a new one, and the janitor is still at work."""
    async with opened(tmp_path / "root") as bench:
        assert await bench.store(1) == [Outcome.DONE]
        shutil.rmtree(tmp_path / "root")
        assert await bench.load(1) == [Outcome.MISSING]
        bench.tier._janitor.wake()
        await until(lambda: Path(bench.tier.path, "namespace.json").exists())
        deadline = time.monotonic() + 10
        while await bench.store(1) != [Outcome.DONE]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert bench.file(1).exists()
        assert await bench.load(1) == [Outcome.DONE]
        assert bench.tier._janitor._thread.is_alive()


def test_names() -> None:
    key = make_key(bytes(range(32)), 7)
    path = naming.chunk_path(key)
    assert path == f"00/{bytes(range(32)).hex()}_7.kv"
    assert naming.chunk_key(Path(path).name) == key
    batch = fileio.Batch([key, make_key(b"\xff", 0), make_key(b"\x01" * 36, 2**32 - 1)])
    for i, other in enumerate((key, make_key(b"\xff", 0), make_key(b"\x01" * 36, 2**32 - 1))):
        assert batch.path(i) == naming.chunk_path(other)
        assert naming.chunk_key(Path(batch.path(i)).name) == other
    for wrong in ("x_0.kv", "00_00.kv", "00_4294967296.kv", "00_0.kv.bad", f"{'00' * 37}_0.kv"):
        assert naming.chunk_key(wrong) is None
    assert naming.is_namespace_directory(directory_name(BASE))
    assert naming.is_namespace_directory(directory_name({"model": "/my models/.x/../y" * 9}))
    assert not naming.is_namespace_directory(naming.CONTROL_DIRECTORY)
    owner = naming.this_owner()
    assert naming.parse_owner(str(owner)) == owner
    assert naming.temporary_owner(f"{Path(path).name}.{owner}.1f.tmp") == owner
    assert not owner.is_dead(owner.host)
    assert len(str(owner)) < fileio.TAG_MAX


@pytest.mark.parametrize("key", [b"", b"abcd", bytes(41)])
def test_batch_refuses_keys(key: bytes) -> None:
    with pytest.raises(ValueError, match="5 to 40 bytes"):
        fileio.Batch([key])


def test_batch_refuses_payloads_without_memory(tmp_path: Path) -> None:
    key = chunk(1, GROUP, SIZE)[0]
    with pytest.raises(ValueError, match="address"):
        fileio.Batch([key], [0], [4096])
    with pytest.raises(ValueError, match="one length"):
        fileio.Batch([key], [4096], [1, 2])
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    directory = fileio.Directory(fd, bytes(32), "tag")
    with pytest.raises(ValueError, match="no payload addresses"):
        directory.load(fileio.Batch([key]))
    directory.close()
    with pytest.raises(ValueError, match="closed"):
        directory.find(fileio.Batch([key]))
