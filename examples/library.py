# SPDX-License-Identifier: Apache-2.0
"""Store chunks, load them again: ``python examples/library.py [DIRECTORY]``.

With kvtier installed, or in a checkout that is built with ``PYTHONPATH=.`` before it.
"""

import asyncio
import sys
import tempfile

import kvtier

CHUNK_BYTES = 1 << 20


async def main(root_dir: str) -> None:
    config = {
        "capacity_bytes": "16MiB",
        "tiers": [{"type": "fs", "root_dir": root_dir}],
    }
    namespace = {"model": "demo", "kv_dtype": "bfloat16"}
    async with kvtier.open(config, chunk_bytes=CHUNK_BYTES, namespace=namespace) as cache:
        # Four times what host memory holds: most of it goes to files and comes back from there.
        keys = [kvtier.make_key(number.to_bytes(32, "big")) for number in range(64)]
        for start in range(0, 64, 8):
            chunks = {
                key: bytes([number]) * CHUNK_BYTES
                for number, key in enumerate(keys[start : start + 8], start)
            }
            await cache.store(chunks)
        await cache.flush()
        for start in range(0, 64, 8):
            for number, view in enumerate(await cache.load(keys[start : start + 8]), start):
                assert view == bytes([number]) * CHUNK_BYTES
        await cache.flush()  # the numbers of the tiers come with it
        print(cache.stats())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(dir=".") as directory:
            asyncio.run(main(directory))
