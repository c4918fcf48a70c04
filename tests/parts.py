# SPDX-License-Identifier: Apache-2.0
"""Parts of a machine that some tests need: one probe each.

A test names its parts with ``@pytest.mark.needs("mount")``; a part that is missing leaves the test
out with the probe's reason, or fails it when ``KVTIER_REQUIRE`` names the part or says ``all``.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def trace_path() -> Path:
    """Where the published request trace is looked for."""
    folder = os.environ.get("KVTIER_TRACES", str(ROOT.parent / "shared" / "traces"))
    return Path(folder) / "mooncake_conversation.jsonl"


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


def _module(name: str) -> Callable[[], str | None]:
    def probe() -> str | None:
        return None if importlib.util.find_spec(name) else f"python package {name} not installed"

    return probe


def _command(name: str) -> Callable[[], str | None]:
    def probe() -> str | None:
        return None if shutil.which(name) else f"command {name} not found"

    return probe


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


def _cuda() -> str | None:
    return None if os.path.exists("/dev/nvidiactl") else "no NVIDIA device"


PARTS: dict[str, Callable[[], str | None]] = {
    "root": _root,
    "mount": _mount,
    "vllm": _module("vllm"),
    "torch": _module("torch"),
    "fio": _command("fio"),
    "registry": _registry,
    "trace": _trace,
    "cuda": _cuda,
}
"""Part to probe: None if it is there, else the reason why not."""

NEVER_REQUIRED = frozenset({"cuda", "trace"})
"""What ``KVTIER_REQUIRE=all`` cannot ask of every machine; naming the part still requires it."""


@functools.cache
def missing(part: str) -> str | None:
    """Why `part` is missing, None if it is there. KeyError for a part that is not in the table."""
    return PARTS[part]()


def required(part: str) -> bool:
    """Whether ``KVTIER_REQUIRE`` turns a missing `part` into a failure."""
    wanted = {word.strip() for word in os.environ.get("KVTIER_REQUIRE", "").split(",")}
    return part in wanted or ("all" in wanted and part not in NEVER_REQUIRED)
