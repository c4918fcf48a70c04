# SPDX-License-Identifier: Apache-2.0
"""kvtier: a tiering engine for the KV cache of model servers."""

__version__ = "0.1.0"
