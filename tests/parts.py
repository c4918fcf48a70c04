# SPDX-License-Identifier: Apache-2.0
"""Parts of a machine that some tests need: one probe each.

A test names its parts with ``@pytest.mark.needs("mount")``; a part that is missing leaves the test
out with the probe's reason, or fails it when ``KVTIER_REQUIRE`` names the part or says ``all``.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
import mmap
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def trace_path() -> Path:
    """Where the published request trace is looked for."""
    folder = os.environ.get("KVTIER_TRACES", str(ROOT.parent / "shared" / "traces"))
    return Path(folder) / "mooncake_conversation.jsonl"


RUST_PACKAGES = ("pydantic-core", "tiktoken", "safetensors", "tokenizers", "rpds-py", "hf-xet")
"""Well-known packages that are built in Rust."""

DEBIAN_PYTHON = "/usr/bin/python3"
"""The one that Debian's Python packages are for."""


def disk_folder() -> Path | None:
    """A writable directory on a disk's file system."""
    # lazy: the probes load nothing of kvtier before a test asks for them.
    from kvtier.bench.tierdir import file_system

    for place in (Path("/var/tmp"), Path.cwd()):
        if os.access(place, os.W_OK) and file_system(place) in ("ext4", "xfs", "btrfs"):
            return place
    return None


def installed(names: Iterable[str]) -> list[str]:
    """Those of the distributions that are installed."""
    return [name for name in names if any(importlib.metadata.distributions(name=name))]


def _root() -> str | None:
    return None if os.geteuid() == 0 else "needs root"


def _mount() -> str | None:
    if os.geteuid() != 0:
        return "needs root to mount"
    if shutil.which("mount") is None:
        return "no mount command"
    folder = tempfile.mkdtemp(prefix="kvtier-probe-")
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            return f"cannot mount a tmpfs: {done.stderr.strip()}"
        subprocess.run(["umount", folder], timeout=30, check=True)
    finally:
        os.rmdir(folder)
    return None


def _loop() -> str | None:
    """Whether a file can be mounted as an ext4 disk; mounting as such is a part of its own."""
    if shutil.which("mkfs.ext4") is None:
        return "command mkfs.ext4 not found"
    with tempfile.TemporaryDirectory(prefix="kvtier-probe-") as folder:
        image, disk = Path(folder) / "image", Path(folder) / "disk"
        disk.mkdir()
        with image.open("wb") as file:
            file.truncate(4 << 20)
        for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, disk]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            if done.returncode:
                return f"{command[0]} of a loop device failed: {done.stderr.strip()}"
        subprocess.run(["umount", disk], timeout=30, check=True)
    return None


def _netns() -> str | None:
    """Whether networks of one's own can be made."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    if shutil.which("ip") is None:
        return "command ip not found"
    name = f"kvtier-probe-{os.getpid()}"
    for words in (
        f"netns add {name}",
        f"-n {name} link add one type veth peer name two",
        f"netns del {name}",
    ):
        command = ["ip", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            return f"{shlex.join(command)}: {done.stderr.strip()}"
    return None


def _discipline(*words: str) -> Callable[[], str | None]:
    """Whether the kernel has a queueing discipline, by its name and what it needs."""

    def probe() -> str | None:
        reason = _netns()
        if reason is not None:
            return reason
        if shutil.which("tc") is None:
            return "command tc not found"
        # In a namespace that ends with the command.
        command = ["unshare", "-n", "tc", "qdisc", "add", "dev", "lo", "root", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return f"{shlex.join(command)}: {done.stderr.strip()}" if done.returncode else None

    return probe


def _direct() -> str | None:
    with tempfile.TemporaryDirectory(prefix="kvtier-probe-") as folder:
        try:
            os.close(os.open(f"{folder}/file", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        except OSError as exc:
            return f"no O_DIRECT in {tempfile.gettempdir()}: {exc.strerror}"
    return None


def _disk() -> str | None:
    return None if disk_folder() else "no disk file system to write to"


def _cores() -> str | None:
    return None if len(os.sched_getaffinity(0)) > 1 else "only one core"


def _memory_policy() -> str | None:
    from kvtier.host import numa  # lazy: as above

    # The kernel keeps those of the named nodes that exist.
    with numa.interleaved([0, 1]) as spread:
        return None if spread else "the kernel tells or sets no memory policy"


def _huge_pages() -> str | None:
    """Whether the kernel makes a huge page of a file on /dev/shm when it is asked to."""
    from kvtier.host import files  # lazy: as above

    libc = files.libc()
    size = 2 << 20
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, 2 * size)
        # Twice the size has an aligned part; offset and address must be aligned alike, so it is
        # mapped a second time where that is.
        both, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        start = libc.mmap(None, 2 * size, both, shared, fd, 0)
        aligned = -(-start // size) * size
        mapped = libc.mmap(aligned, size, both, shared | 0x10, fd, 0)  # MAP_FIXED
        refused = libc.madvise(mapped, size, 25)  # MADV_COLLAPSE
        code = ctypes.get_errno()
        libc.munmap(start, 2 * size)
    finally:
        os.close(fd)
    return f"MADV_COLLAPSE on /dev/shm: {os.strerror(code)}" if refused else None


def _rust() -> str | None:
    return None if installed(RUST_PACKAGES) else f"none of {', '.join(RUST_PACKAGES)} is installed"


def _module(name: str) -> Callable[[], str | None]:
    def probe() -> str | None:
        return None if importlib.util.find_spec(name) else f"python package {name} not installed"

    return probe


def _command(name: str) -> Callable[[], str | None]:
    def probe() -> str | None:
        return None if shutil.which(name) else f"command {name} not found"

    return probe


def _swift() -> str | None:
    """Whether OpenStack Swift can run: it keeps what it knows of an object in attributes."""
    if shutil.which("memcached") is None:
        return "command memcached not found"
    command = [DEBIAN_PYTHON, "-c", "import swift.common.middleware.s3api.s3api"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError as exc:
        return f"{DEBIAN_PYTHON}: {exc.strerror}"
    if done.returncode:
        return f"{DEBIAN_PYTHON}: {done.stderr.strip().rpartition(chr(10))[2]}"
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.setxattr(file.fileno(), "user.kvtier", bytes(1024))
        except OSError as exc:
            return f"no attributes of files in {tempfile.gettempdir()}: {exc.strerror}"
    return None


def _trace() -> str | None:
    path = trace_path()
    return None if path.is_file() else f"{path} not found (set KVTIER_TRACES to its folder)"


def _registry() -> str | None:
    """Whether pip can install something that is not here yet."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "six"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--dest", folder], capture_output=True, timeout=120, check=False
        )
    return None if done.returncode == 0 else "pip reaches no package registry"


@functools.cache
def newer_python() -> str | None:
    """The newest Python on this machine that is newer than this one: its interpreter."""
    found = {}
    places = [*os.environ.get("PATH", "").split(os.pathsep)]
    places += map(str, Path("~/.pyenv/versions").expanduser().glob("3.*/bin"))
    for minor in range(sys.version_info.minor + 1, 20):
        for place in places:
            path = Path(place, f"python3.{minor}")
            if not os.access(path, os.X_OK):
                continue
            # A version manager's stand-in runs only what is chosen.
            done = subprocess.run([path, "-c", "import venv"], capture_output=True, check=False)
            if done.returncode == 0:
                found[minor] = str(path)
    return found[max(found)] if found else None


def _newer_python() -> str | None:
    return None if newer_python() else "no newer Python than this one"


def _cuda() -> str | None:
    return None if os.path.exists("/dev/nvidiactl") else "no NVIDIA device"


def _ucx() -> str | None:
    """Whether the binding was built and finds a library; asked in a process of its own."""
    command = [sys.executable, "-c", "from kvtier._core import ucx; ucx.load()"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    return None if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]


def _peek() -> str | None:
    """Whether a process may read another one's memory, as containers often do not let it."""
    from kvtier.host import files  # lazy: as above

    class Range(ctypes.Structure):
        _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))

    text = ctypes.create_string_buffer(b"here")
    code = (
        "import ctypes; t = ctypes.create_string_buffer(b'here')\n"
        "print(ctypes.addressof(t), flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        there = Range(int(child.stdout.readline()), 4)
        here = Range(ctypes.addressof(text), 4)
        done = files.libc().process_vm_readv(
            child.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0
        )
        reason = None if done == 4 else os.strerror(ctypes.get_errno())
        child.stdin.write(b"\n")
    return reason and f"cannot read another process's memory: {reason}"


def _tun() -> str | None:
    """Whether network devices can be made that a program carries the frames of."""
    if (reason := _netns()) is not None:
        return reason
    return None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "no access to /dev/net/tun"


def _torch_cuda() -> str | None:
    """Whether torch can use a GPU; in a process of its own, since CUDA never leaves one again."""
    if importlib.util.find_spec("torch") is None:
        return "python package torch not installed"
    command = [sys.executable, "-c", "import torch; exit(not torch.cuda.is_available())"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    return None if done.returncode == 0 else "torch finds no GPU"


PARTS: dict[str, Callable[[], str | None]] = {
    "root": _root,
    "mount": _mount,
    "loop": _loop,
    "netns": _netns,
    "tbf": _discipline("tbf", "rate", "1mbit", "burst", "32kb", "latency", "50ms"),
    "tun": _tun,
    "direct": _direct,
    "disk": _disk,
    "cores": _cores,
    "memory-policy": _memory_policy,
    "huge-pages": _huge_pages,
    "rust": _rust,
    "vllm": _module("vllm"),
    "torch": _module("torch"),
    "fio": _command("fio"),
    "swift": _swift,
    "registry": _registry,
    "trace": _trace,
    "newer-python": _newer_python,
    "cuda": _cuda,
    "torch-cuda": _torch_cuda,
    "ucx": _ucx,
    "peek": _peek,
}
"""Part to probe: None if it is there, else the reason why not."""

NEVER_REQUIRED = frozenset(
    {"cuda", "torch-cuda", "huge-pages", "trace", "newer-python", "tbf", "tun"}
)
"""What ``KVTIER_REQUIRE=all`` cannot ask of every machine; naming the part still requires it."""


@functools.cache
def missing(part: str) -> str | None:
    """Why `part` is missing, None if it is there. KeyError for a part that is not in the table."""
    return PARTS[part]()


def required(part: str) -> bool:
    """Whether ``KVTIER_REQUIRE`` turns a missing `part` into a failure."""
    wanted = {word.strip() for word in os.environ.get("KVTIER_REQUIRE", "").split(",")}
    return part in wanted or ("all" in wanted and part not in NEVER_REQUIRED)
