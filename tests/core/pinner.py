# SPDX-License-Identifier: Apache-2.0
"""Child of `test_concurrent`: pins keys through a table that the parent keeps changing.

``pinner.py FD NUM_SLOTS NUM_KEYS SEED``. Each payload starts with the number of its key.
Prints "ready" before it starts, and what it saw as one JSON line when the parent sets the stop
byte.
"""

from __future__ import annotations

import json
import mmap
import random
import sys

from kvtier._core.slots import READY, RECORD_BYTES, SlotTable, table_bytes

from .build import key

PAYLOAD_BYTES = 64


def views(memory: mmap.mmap, num_slots: int) -> tuple[SlotTable, memoryview, memoryview]:
    """Table, payloads and stop byte of the shared memory."""
    whole = memoryview(memory)
    first = num_slots * RECORD_BYTES
    second = first + table_bytes(num_slots)
    third = second + num_slots * PAYLOAD_BYTES
    table = SlotTable(whole[:first], whole[first:second], num_slots)
    return table, whole[second:third], whole[third:]


def size(num_slots: int) -> int:
    return num_slots * (RECORD_BYTES + PAYLOAD_BYTES) + table_bytes(num_slots) + 64


def main() -> None:
    fd, num_slots, num_keys, seed = map(int, sys.argv[1:])
    memory = mmap.mmap(fd, size(num_slots))
    table, payloads, stop = views(memory, num_slots)
    rng = random.Random(seed)
    pinned = wrong = moved = 0
    print("ready", flush=True)
    while not stop[0]:
        number = rng.randrange(num_keys)
        one = key(number)
        found = table.find_and_pin_service(one)
        if found is None:
            continue
        slot, generation = found
        for _ in range(3):
            start = slot * PAYLOAD_BYTES
            if bytes(payloads[start : start + 32]) != number.to_bytes(32, "little"):
                wrong += 1
            if table.key(slot) != one or table.state(slot) != READY:
                wrong += 1
            moved += table.generation(slot) != generation
        table.unpin_service(slot, generation)
        pinned += 1
    print(json.dumps({"pinned": pinned, "wrong": wrong, "moved": moved}))


if __name__ == "__main__":
    main()
