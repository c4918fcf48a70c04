# SPDX-License-Identifier: Apache-2.0
"""Compiled parts. A missing one is an ImportError that names the build command."""

from importlib.util import find_spec

EXTENSIONS = ("fileio", "index", "layout", "slots", "words")

_missing = [name for name in EXTENSIONS if find_spec(f"{__name__}.{name}") is None]
if _missing:
    raise ImportError(
        f"kvtier's compiled parts are missing ({', '.join(_missing)}): build them with `make setup`"
    )
