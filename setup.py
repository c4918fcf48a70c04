# SPDX-License-Identifier: Apache-2.0
"""Build of the Cython extensions; all other metadata stands in pyproject.toml.

``KVTIER_CHECKS=1`` turns on bounds checks and the C invariant walks.
"""

import importlib.util
import os
import platform
from pathlib import Path

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup

CHECKS = os.environ.get("KVTIER_CHECKS", "0") == "1"

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": CHECKS,
    "wraparound": CHECKS,
    "initializedcheck": CHECKS,
    "cdivision": not CHECKS,
    "embedsignature": True,
    "binding": True,
}

CFLAGS = ["-O3", "-fno-strict-aliasing", "-Wall", "-Wextra"]
if os.environ.get("KVTIER_WERROR", "0") == "1":
    CFLAGS.append("-Werror")
# Generated code trips these two; hand-written code is still held to the rest.
CFLAGS += ["-Wno-unused-parameter", "-Wno-missing-field-initializers"]

if platform.system() != "Linux":
    raise SystemExit("kvtier needs Linux: it uses O_TMPFILE, flock and /dev/shm")


def ucx_headers() -> str | None:
    """Folder of UCX's headers: those of the wheel ``libucx-cu12``, else the system's."""
    wheel = importlib.util.find_spec("libucx")
    places = [f"{folder}/include" for folder in (wheel and wheel.submodule_search_locations) or ()]
    for place in (*places, "/usr/include"):
        if Path(place, "ucp/api/ucp.h").is_file():
            return place
    return None


def extension(name: str) -> Extension:
    source = f"kvtier/_core/{name}.pyx"
    return Extension(
        f"kvtier._core.{name}",
        [source],
        define_macros=[
            ("KVTIER_CHECKS", "1" if CHECKS else "0"),
            ("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION"),
        ],
        include_dirs=[np.get_include()],
        extra_compile_args=CFLAGS,
        depends=sorted(str(path) for path in Path("kvtier/_core").glob("*.h")),
    )


EXTENSIONS = {
    path.stem: extension(path.stem) for path in sorted(Path("kvtier/_core").glob("*.pyx"))
}
headers = ucx_headers()
if headers is None:
    del EXTENSIONS["ucx"]
    print("kvtier._core.ucx is left out: no UCX headers (pip install libucx-cu12)")
else:
    # As a system's, so that their warnings are not ours.
    EXTENSIONS["ucx"].extra_compile_args = [*CFLAGS, "-isystem", headers]

setup(
    ext_modules=cythonize(
        list(EXTENSIONS.values()),
        compiler_directives=DIRECTIVES,
        build_dir="build/checked" if CHECKS else "build/plain",
    ),
    options={"build_ext": {"parallel": True}},  # a compiler on each core
)
