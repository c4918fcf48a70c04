# SPDX-License-Identifier: Apache-2.0
"""Writes small chunks in a process of its own, for the presence case of ``benchmarks.fs``.

Keys of 36 bytes come on standard input; arguments: the tier's root and, optionally, the peer's.
"""

import asyncio
import sys
import time

from kvtier.testing.contract import Arena, context, make_env
from kvtier.tiers.fs import FsOptions, FsTier
from kvtier.types import Outcome

BATCH = 512


async def write(root: str, keys: list[bytes]) -> None:
    """All keys, with pages of zeros."""
    arena = Arena(1, 4096)
    env = make_env(sizes=(4096,), definitions=FsTier.metric_definitions())
    tier = FsTier("fs", FsOptions(root_dir=root, min_free_bytes=1), env)
    await tier.open()
    try:
        for start in range(0, len(keys), BATCH):
            slots = [arena.slot(0, key, 4096) for key in keys[start : start + BATCH]]
            if set(await tier.store(slots, context(60))) != {Outcome.DONE}:
                raise SystemExit("a store failed")
    finally:
        await tier.aclose(time.monotonic() + 10)


def main() -> None:
    data = sys.stdin.buffer.read()
    keys = [data[at : at + 36] for at in range(0, len(data), 36)]
    asyncio.run(write(sys.argv[1], keys))
    if len(sys.argv) > 2:
        from benchmarks.vllm_tiers import vllm_fs  # lazy: needs vLLM

        peer = vllm_fs(sys.argv[2], len(keys), 4096, 16)
        peer.store(keys, BATCH)
        peer.close()


if __name__ == "__main__":
    main()
