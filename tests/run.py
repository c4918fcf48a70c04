# SPDX-License-Identifier: Apache-2.0
"""All tests in two runs of pytest side by side: most of them wait most of the time.

``python -m tests.run [--timed] FOLDERS [-- OPTIONS]``: one run for the folders, one for everything
else, both with pytest's options. With ``--timed`` the tests that judge speeds come after both, with
nothing beside them. Each run has a /dev/shm of its own, so that ``tests/conftest.py`` finds there
what its own tests left and nothing else; without the right to mount, one run follows the other.
Lines are printed as they come, and at the end how each run went.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

OWN_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
"""Before a command: a /dev/shm of its own, for it and all that it starts."""


def may_mount() -> bool:
    """Whether `OWN_SHM` works here."""
    try:
        return not subprocess.run([*OWN_SHM, "true"], capture_output=True, check=False).returncode
    except FileNotFoundError:
        return False


def pytest(*options: str, before: tuple[str, ...] = ()) -> tuple[int, str]:
    """A run's exit code, and its last line."""
    line = ""
    with subprocess.Popen(
        [*before, sys.executable, "-m", "pytest", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            # In one piece: the other run prints too.
            sys.stdout.write(line)
            sys.stdout.flush()
    return process.returncode, line.strip("= \n")


def main(arguments: list[str]) -> int:
    """Run everything; 0 if each run ended with 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.run")
    parser.add_argument("--timed", action="store_true", help="those marked timed alone, at the end")
    parser.add_argument("folders", nargs="+", help="what the first of both runs has")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    given, options = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    chosen = ["-m", "not timed", *options] if given.timed else options
    runs = {
        " ".join(given.folders): [*given.folders, *chosen],
        "all others": [*(f"--ignore={folder}" for folder in given.folders), *chosen],
    }
    beside = may_mount()
    with ThreadPoolExecutor(2 if beside else 1) as pool:
        before = OWN_SHM if beside else ()
        jobs = {name: pool.submit(pytest, *words, before=before) for name, words in runs.items()}
    ended = {name: job.result() for name, job in jobs.items()}
    if given.timed:
        ended["timed"] = pytest("-m", "timed", *options)
    for name, (code, line) in ended.items():
        print(f"{name}: exit {code}, {line}")
    return int(any(code for code, _ in ended.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
