# SPDX-License-Identifier: Apache-2.0
"""Another process pins while the owner evicts and reuses."""

from __future__ import annotations

import json
import mmap
import os
import random
import subprocess
import sys

import pytest

from kvtier._core.index import Index
from tests.parts import ROOT

from .build import assert_quiet, key
from .pinner import PAYLOAD_BYTES, size, views

NUM_SLOTS, NUM_KEYS = 16, 40


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.slow
def test_no_reader_ever_sees_a_wrong_key(policy: str) -> None:
    fd = os.memfd_create("kvtier-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, size(NUM_SLOTS))
    memory = mmap.mmap(fd, size(NUM_SLOTS))
    table, payloads, stop = views(memory, NUM_SLOTS)
    index = Index(table, [PAYLOAD_BYTES], policy)
    index.grow(NUM_SLOTS)
    command = [sys.executable, "-m", "tests.core.pinner", str(fd), str(NUM_SLOTS), str(NUM_KEYS)]
    children = [
        subprocess.Popen(
            [*command, str(seed)], pass_fds=[fd], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for seed in range(2)
    ]
    os.close(fd)
    rng = random.Random(9)
    evictions = put_off = 0
    seen_pins = 0
    try:
        # On a full machine one of them may start when the other one is nearly done.
        assert [child.stdout and child.stdout.readline() for child in children] == 2 * ["ready\n"]
        # Until the children have met the owner often enough; the bound is for a broken build.
        for turn in range(2_000_000):
            wanted = [key(rng.randrange(NUM_KEYS)) for _ in range(3)]
            got = index.reserve(wanted)
            put_off += not got.complete
            for one, slot in zip(got.keys, got.slots.tolist(), strict=True):
                start = slot * PAYLOAD_BYTES
                payloads[start : start + 32] = one[:32]
            index.commit(got.keys)
            index.touch(wanted)
            evictions += len(got.evicted)
            if turn % 64 == 0:
                index.reap()
                seen_pins += table.totals()["service_pins"] > 0
                if seen_pins > 300 and evictions > 50_000:
                    break
        stop[0] = 1
        results = [json.loads(child.communicate(timeout=60)[0]) for child in children]
    finally:
        stop[0] = 1
        for child in children:
            child.wait(timeout=60)
            if child.stdout:
                child.stdout.close()
    assert evictions > 50_000
    for result in results:
        assert result["wrong"] == result["moved"] == 0
        assert result["pinned"] > 500
    index.reap()
    assert_quiet(table, index)
