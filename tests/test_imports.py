# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check: imports go one way, and the core needs no torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "kvtier"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("kvtier._core",),
    ("kvtier.config", "kvtier.options", "kvtier._yaml", "kvtier.namespace", "kvtier.types",
     "kvtier.errors"),
    ("kvtier.host", "kvtier.layout", "kvtier.obs"),
    ("kvtier.device",),
    ("kvtier.tiers",),
    ("kvtier.runtime",),
    ("kvtier.engine",),
    ("kvtier.vllm", "kvtier.bench", "kvtier.testing"),
)  # fmt: skip
"""From the bottom. A module imports from its own layer and from those below."""

RULER = re.compile(r"^ *# ?(-{3}|={3})", re.MULTILINE)

EXCEPTIONS = {
    # The core raises the errors and speaks the constants of everybody; these two import nothing.
    ("kvtier._core", "kvtier.errors"),
    ("kvtier._core", "kvtier.types"),
}

BARE = ("kvtier.runtime", "kvtier.tiers", "kvtier.host", "kvtier._core", "kvtier.config",
        "kvtier.namespace", "kvtier.obs", "kvtier.layout", "kvtier.types",
        "kvtier.device")  # fmt: skip
"""What loads without torch and vLLM."""

# vLLM's way in may import torch and vLLM; so may these when they are asked to.
HEAVY_ALLOWED = ("kvtier.vllm", "kvtier.bench", "kvtier.device.cuda")


def module_name(path: Path, root: Path = PACKAGE) -> str:
    parts = [root.name, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, name: str, *, package: bool) -> set[tuple[str, bool]]:
    """(module, whether it is imported at load time) that a module's source asks for.

    What stands under ``if TYPE_CHECKING`` is never executed, but its direction counts as well:
    types that point upwards are a knot in the design.
    """
    found: set[tuple[str, bool]] = set()

    def walk(node: ast.AST, at_load: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inside = at_load and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.Import):
                found.update((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = name.split(".")
                if child.level:
                    base = base[: len(base) - child.level + (1 if package else 0)]
                    start = ".".join([*base, *([child.module] if child.module else [])])
                else:
                    start = child.module or ""
                found.add((start, inside))
                found.update((f"{start}.{alias.name}", inside) for alias in child.names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                walk(child, False)
                continue
            walk(child, inside)

    walk(ast.parse(source), True)
    return found


def layer(name: str) -> int | None:
    for index, parts in enumerate(LAYERS):
        if any(name == part or name.startswith(f"{part}.") for part in parts):
            return index
    return None


def part(name: str) -> str:
    return ".".join(name.split(".")[:2])


def violations(sources: dict[str, tuple[str, bool]]) -> list[str]:
    """Imports that point upwards, in modules given as name -> (source, is a package)."""
    wrong = []
    for name, (source, package) in sources.items():
        mine = layer(name)
        if mine is None:
            if name != "kvtier":
                wrong.append(f"{name} is in no layer")
            continue
        for target, _ in imports(source, name, package=package):
            theirs = layer(target)
            if theirs is None or theirs <= mine or (part(name), part(target)) in EXCEPTIONS:
                continue
            wrong.append(f"{name} imports {target}")
    return sorted(wrong)


def sources() -> dict[str, tuple[str, bool]]:
    return {
        module_name(path): (path.read_text(), path.name == "__init__.py")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def test_imports_go_one_way() -> None:
    found = sources()
    assert "kvtier.obs.metrics" in found
    assert violations(found) == []


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("kvtier.host.cache", "from kvtier.tiers.base import Tier", True),
        ("kvtier.host.cache", "from ..tiers import base", True),
        ("kvtier.host.cache", "from kvtier import tiers", True),
        ("kvtier.host.cache", "def f():\n    import kvtier.engine", True),
        ("kvtier.host.cache", "if TYPE_CHECKING:\n    import kvtier.engine", True),
        ("kvtier._core.x", "import kvtier.config", True),
        ("kvtier._core.x", "import kvtier.errors", False),
        ("kvtier.engine.x", "import kvtier.tiers.fs\nimport kvtier._core", False),
        ("kvtier.elsewhere", "", True),
    ],
)
def test_the_walk_sees_wrong_imports(name: str, source: str, wrong: bool) -> None:
    assert bool(violations({name: (source, False)})) is wrong


def test_heavy_packages_are_imported_where_they_may_be() -> None:
    for name, (source, package) in sources().items():
        if name.startswith(HEAVY_ALLOWED):
            continue
        for target, at_load in imports(source, name, package=package):
            if at_load:
                assert target.split(".")[0] not in ("torch", "vllm"), f"{name} imports {target}"


def test_imports_inside_functions_say_why() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for child in ast.walk(node):
                if isinstance(child, ast.Import | ast.ImportFrom):
                    around = "\n".join(lines[max(0, child.lineno - 3) : child.end_lineno])
                    assert "# lazy:" in around, f"{path}:{child.lineno} has no '# lazy:' reason"


def test_every_file_starts_with_its_licence_and_its_job() -> None:
    for name, (source, package) in sources().items():
        first, _, rest = source.partition("\n")
        assert first == "# SPDX-License-Identifier: Apache-2.0", name
        if rest.strip() or not package:
            assert ast.get_docstring(ast.parse(source)), f"{name} does not say what it does"


def test_no_file_is_divided_by_rulers() -> None:
    """A module that needs them has two jobs."""
    for name, (source, _) in sources().items():
        assert not RULER.search(source), name
    assert RULER.search("class A:\n    # --- life ---\n")


PROBE = """
import importlib, importlib.util, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
heavy = ["kvtier.device.cuda"]
if importlib.util.find_spec("kvtier._core.ucx") is None:
    heavy.append("kvtier.tiers.p2p.ucx")  # whoever uses it handles its absence
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
        if not info.name.endswith("__main__") and not info.name.startswith(tuple(heavy)):
            importlib.import_module(info.name)
print(*(name for name in sys.modules if name.partition(".")[0] in ("torch", "vllm")))
"""


def load_bare(*names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, *names],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("name", BARE)
def test_loads_without_torch_and_vllm(name: str) -> None:
    done = load_bare(name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_the_block_is_real() -> None:
    for name in ("vllm", "torch"):
        done = load_bare(name)
        assert done.returncode != 0
        assert f"{name} is blocked" in done.stderr
