# SPDX-License-Identifier: Apache-2.0
"""Tiers of other people that lack what a tier must have."""

from __future__ import annotations

from typing import Any, ClassVar

from kvtier.tiers.base import Tier


class HalfATier(Tier):
    """Not all methods."""

    options_type: ClassVar[Any] = None

    async def open(self) -> None: ...

    async def exists(self, keys: Any, ctx: Any) -> Any: ...

    async def store(self, items: Any, ctx: Any) -> Any: ...


class WithoutOptions(HalfATier):
    """No ``options_type`` worth the name."""

    async def load(self, items: Any, ctx: Any) -> Any: ...

    async def aclose(self, deadline: float) -> None: ...


class WrongOptions(WithoutOptions):
    """Its options are no struct."""

    options_type = dict
