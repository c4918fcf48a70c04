# SPDX-License-Identifier: Apache-2.0
"""Compiled parts. A missing one is an ImportError that names the build command.

But for ``ucx``, which is built where UCX's headers are; who wants it handles its ImportError.
"""

from importlib.util import find_spec
from pathlib import Path

OPTIONAL = ("ucx",)

# Each has a stub, and only they have.
_missing = [
    path.stem
    for path in sorted(Path(__file__).parent.glob("*.pyi"))
    if path.stem not in OPTIONAL and find_spec(f"{__name__}.{path.stem}") is None
]
if _missing:
    raise ImportError(
        f"kvtier's compiled parts are missing ({', '.join(_missing)}): build them with `make setup`"
    )
