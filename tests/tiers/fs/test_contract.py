# SPDX-License-Identifier: Apache-2.0
"""The file tier passes the contract of all tiers, with O_DIRECT and through the page cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvtier.testing.contract import TierContract
from kvtier.tiers.base import Tier, TierEnv
from kvtier.tiers.fs import FsOptions, FsTier
from kvtier.tiers.fs.naming import chunk_path


class FsContract(TierContract):
    options: ClassVar[dict[str, Any]] = {}

    def make_tier(self, env: TierEnv, tmp_path: Path) -> Tier:
        return FsTier("fs", FsOptions(root_dir=str(tmp_path / "root"), **self.options), env)

    def definitions(self) -> Sequence[Any]:
        return FsTier.metric_definitions()

    def raw_get(self, tier: FsTier, key: bytes) -> bytes | None:
        path = Path(tier.path, chunk_path(key))
        return path.read_bytes() if path.exists() else None

    def raw_put(self, tier: FsTier, key: bytes, data: bytes) -> None:
        Path(tier.path, chunk_path(key)).write_bytes(data)


class TestDirect(FsContract):
    options: ClassVar[dict[str, Any]] = {"direct": "auto"}


class TestBuffered(FsContract):
    options: ClassVar[dict[str, Any]] = {"direct": "off", "read_threads": 2, "write_threads": 1}


class TestPrivateWithLimit(FsContract):
    options: ClassVar[dict[str, Any]] = {
        "private": True,
        "capacity_bytes": 1 << 30,
        "fsync": True,
        "preallocate": True,
    }
