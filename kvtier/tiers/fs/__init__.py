# SPDX-License-Identifier: Apache-2.0
"""The file tier."""

from kvtier.tiers.fs.options import FsOptions
from kvtier.tiers.fs.tier import FsTier

__all__ = ["FsOptions", "FsTier"]
