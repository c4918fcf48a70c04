# SPDX-License-Identifier: Apache-2.0
"""Build of the Cython extensions; all other metadata stands in pyproject.toml.

``KVTIER_CHECKS=1`` turns on bounds checks and the C invariant walks.
"""

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


EXTENSIONS = [extension(path.stem) for path in sorted(Path("kvtier/_core").glob("*.pyx"))]

setup(
    ext_modules=cythonize(
        EXTENSIONS,
        compiler_directives=DIRECTIVES,
        build_dir="build/checked" if CHECKS else "build/plain",
    )
)
