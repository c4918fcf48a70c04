# SPDX-License-Identifier: Apache-2.0
"""Run-time dependencies are pure Python or C: none of them, however deep, is built in Rust."""

from __future__ import annotations

import importlib.metadata as metadata
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import parts

ROOT = Path(__file__).resolve().parent.parent

RUST_BUILDERS = ("maturin", "setuptools-rust", "setuptools_rust")
RUST_SYMBOLS = (b"rust_eh_personality", b"rust_begin_unwind", b"/rustc/", b"__rust_alloc")


def declared() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["ucx"]]


def closure(
    requirements: list[str], requires: Callable[[str], list[str] | None]
) -> dict[str, list[str]]:
    """Name -> chain that leads to it, of all that an installation takes in."""
    found: dict[str, list[str]] = {}
    waiting = [(Requirement(text), ["kvtier"]) for text in requirements]
    while waiting:
        requirement, chain = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        extras = requirement.extras or {""}
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name in found:
            continue
        found[name] = [*chain, name]
        for text in requires(requirement.name) or []:
            inner = Requirement(text)
            if inner.marker is None or any(
                inner.marker.evaluate({"extra": extra}) for extra in extras
            ):
                inner.marker = None
                waiting.append((inner, found[name]))
    return found


def rust_in(distribution: metadata.Distribution) -> list[str]:
    """Signs that a distribution was built in Rust."""
    wheel = distribution.read_text("WHEEL") or ""
    signs = [
        line
        for line in wheel.splitlines()
        if line.startswith("Generator:") and any(word in line for word in RUST_BUILDERS)
    ]
    for file in distribution.files or []:
        if file.name in ("Cargo.toml", "Cargo.lock") or file.suffix == ".rs":
            signs.append(str(file))
        elif ".so" in file.suffixes:
            content = Path(str(distribution.locate_file(file))).read_bytes()
            signs += [f"{file}: {word.decode()}" for word in RUST_SYMBOLS if word in content]
    return signs


def test_no_run_time_dependency_is_built_in_rust() -> None:
    found = closure(declared(), metadata.requires)
    assert {"libucx-cu12", "msgspec", "numpy", "prometheus-client", "pyyaml", "uvloop"} <= set(
        found
    )
    for name, chain in found.items():
        distribution = metadata.distribution(name)
        assert distribution.files, f"{name} has no list of files to look through"
        assert rust_in(distribution) == [], " -> ".join(chain)


@pytest.mark.needs("rust")
def test_the_check_sees_rust_where_there_is_some() -> None:
    for name in parts.installed(parts.RUST_PACKAGES):
        assert rust_in(metadata.distribution(name)), name


def test_the_closure_follows_requirements_extras_and_markers() -> None:
    tree = {
        "a": ["b[fast]>=1", "w; sys_platform == 'win32'"],
        "b": ["c", "d; extra == 'fast'", "e; extra == 'slow'"],
        "d": ["a"],
    }
    found = closure(["a>=1"], lambda name: tree.get(name, []))
    assert found == {
        "a": ["kvtier", "a"],
        "b": ["kvtier", "a", "b"],
        "c": ["kvtier", "a", "b", "c"],
        "d": ["kvtier", "a", "b", "d"],
    }


def test_the_pinned_requirements_cover_the_declared_ones() -> None:
    pinned = (ROOT / "requirements" / "base.txt").read_text()
    names = {line.split("==")[0].lower().replace("_", "-") for line in pinned.splitlines()}
    for text in declared():
        assert Requirement(text).name.lower() in names
