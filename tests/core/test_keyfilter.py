# SPDX-License-Identifier: Apache-2.0
"""The key filter against a plain set: whatever was added is in it, and little else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier._core.keyfilter import KeyFilter
from kvtier.types import make_key

ALL_KEYS = st.binary(min_size=5, max_size=40)
# Keys that differ little from each other too: by their length, their last byte, their group.
POOL = [bytes(n) for n in range(5, 41)] + [
    make_key(number.to_bytes(32, "big"), group) for number in range(8) for group in range(3)
]
KEYS = ALL_KEYS | st.sampled_from(POOL)
ROOMS = st.integers(1, 200)


def random_keys(count: int, seed: int, length: int = 36) -> list[bytes]:
    draw = random.Random(seed)
    return [draw.randbytes(length) for _ in range(count)]


@given(room=ROOMS, added=st.lists(st.lists(KEYS, max_size=40), max_size=5), asked=st.lists(KEYS))
def test_what_was_added_is_in_it(room: int, added: list[list[bytes]], asked: list[bytes]) -> None:
    one = KeyFilter(room)
    twin: set[bytes] = set()
    for part in added:
        one.add(iter(part))
        twin.update(part)
        assert all(key in one for key in twin)
    if not twin:
        assert not any(key in one for key in asked)
    mixed = asked + sorted(twin)
    for start in range(len(mixed) + 1):
        first = one.first_absent(mixed, start)
        assert start <= first <= len(mixed)
        # Never a false absence; and it says what ``in`` says.
        assert first == len(mixed) or mixed[first] not in twin
        assert first == next((i for i in range(start, len(mixed)) if mixed[i] not in one), first)
        assert all(key in one for key in mixed[start:first])


@given(
    room=st.integers(1, 2000),
    old=st.lists(KEYS, max_size=60),
    new=st.lists(KEYS, max_size=60),
    late=st.lists(KEYS, max_size=20),
    step=st.integers(1, 50),
)
def test_parts_make_the_union(
    room: int, old: list[bytes], new: list[bytes], late: list[bytes], step: int
) -> None:
    """As one filter is sent in parts into another, which is added to meanwhile."""
    source, target, both = KeyFilter(room), KeyFilter(room), KeyFilter(room)
    source.add(old)
    target.add(new)
    both.add([*old, *new, *late])
    part = 8 * step
    for number, offset in enumerate(range(0, source.nbytes, part)):
        if number == 1:
            target.add(late)
        bits = source.read(offset, min(part, source.nbytes - offset))
        # Parts that did not come yet take nothing away.
        assert all(key in target for key in new)
        target.merge(offset, bits)
    target.add(late)
    assert all(key in target for key in (*old, *new, *late))
    assert target.read(0, target.nbytes) == both.read(0, both.nbytes)
    assert all(key in source for key in old)


def test_parts_in_any_order_and_twice() -> None:
    source, target = KeyFilter(500), KeyFilter(500)
    source.add(random_keys(500, 1))
    parts = [(at, source.read(at, 8)) for at in range(0, source.nbytes, 8)]
    random.Random(2).shuffle(parts)
    for at, bits in parts + parts[:50]:
        target.merge(at, bits)
    assert target.read(0, target.nbytes) == source.read(0, source.nbytes)
    target.merge(0, b"")
    assert target.read(target.nbytes, 0) == b""


def sequence(n: int, length: int) -> bytes:
    return n.to_bytes(length, "big")


@pytest.mark.parametrize(
    "make", ["random", "hash and group", "counted, 5 bytes", "counted, 40 bytes"]
)
@pytest.mark.parametrize("room", [2_000, 60_000])
def test_false_presence(make: str, room: int) -> None:
    """The figures of the docstring, whatever keys look like."""
    asked = 200_000
    if make == "random":
        keys = random_keys(2 * room + asked, 3)
    elif make == "hash and group":
        keys = [make_key(key, 1) for key in random_keys(2 * room + asked, 4, 32)]
    else:
        keys = [sequence(n, 5 if "5" in make else 40) for n in range(2 * room + asked)]
    absent = keys[2 * room :]
    one = KeyFilter(room)
    one.add(keys[:room])
    at_room = asked / max(1, sum(key in one for key in absent))
    one.add(keys[room : 2 * room])
    at_twice = asked / max(1, sum(key in one for key in absent))
    assert 600 < at_room < 1200  # about one in 800
    assert 35 < at_twice < 55  # about one in 40


@pytest.mark.parametrize("room", [1, 31, 32, 33, 1000, 65_536, 1_000_001])
def test_two_bytes_a_key(room: int) -> None:
    assert KeyFilter(room).nbytes == -(-room // 32) * 64


@pytest.mark.parametrize("length", range(5, 41))
def test_keys_of_every_length(length: int) -> None:
    one = KeyFilter(300)
    keys = random_keys(300, length, length)
    one.add(keys[:150])
    assert all(key in one for key in keys[:150])
    assert sum(key in one for key in keys[150:]) < 10
    # A key is no prefix of itself.
    assert sum(key + b"\0" in one for key in keys[:150] if length < 40) < 10


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("text5", TypeError),
        (bytearray(36), TypeError),
        (memoryview(bytes(36)), TypeError),
        (12345, TypeError),
        (None, TypeError),
        (b"", ValueError),
        (bytes(4), ValueError),
        (bytes(41), ValueError),
    ],
)
def test_what_is_no_key(key: object, error: type[Exception]) -> None:
    one = KeyFilter(10)
    good = bytes(36)
    calls = (
        lambda: one.add([key]),
        lambda: one.add([good, key]),
        lambda: key in one,
        lambda: one.first_absent([key]),
        lambda: one.first_absent([good, key]),
    )
    for call in calls:
        with pytest.raises(error, match="a key"):
            call()
    assert good in one  # those before it were added


def test_wrong_arguments() -> None:
    one = KeyFilter(10)
    with pytest.raises(TypeError):
        one.add(None)
    with pytest.raises(TypeError):
        one.first_absent((bytes(36),))
    with pytest.raises(TypeError):
        one.first_absent(None)
    for data in (None, bytearray(8), memoryview(bytes(8)), "12345678"):
        with pytest.raises(TypeError):
            one.merge(0, data)
    for start in (-1, 1, 2**62):
        with pytest.raises(IndexError):
            one.first_absent([], start)
    assert one.first_absent([], 0) == 0


BAD_PARTS = [
    (-8, 8),
    (-8, 16),
    (1, 8),
    (4, 8),
    (0, 4),
    (8, 7),
    (64, 8),
    (0, 72),
    (56, 16),
    (128, 0),
    (2**63 - 8, 8),  # their sum is no 64-bit number
    (2**62, 2**62),
]


@pytest.mark.parametrize(("offset", "length"), [*BAD_PARTS, (0, -8), (64, -64), (-(2**63), 0)])
def test_a_part_that_is_not_there_cannot_be_read(offset: int, length: int) -> None:
    with pytest.raises(ValueError, match=r"\["):
        KeyFilter(32).read(offset, length)


@pytest.mark.parametrize(("offset", "length"), [part for part in BAD_PARTS if part[1] < 100])
def test_a_part_that_is_not_there_cannot_be_merged(offset: int, length: int) -> None:
    one = KeyFilter(32)
    with pytest.raises(ValueError, match=r"\["):
        one.merge(offset, b"\xff" * length)
    assert one.read(0, 64) == bytes(64)


@pytest.mark.parametrize("room", [0, -1, -(2**63)])
def test_no_room(room: int) -> None:
    with pytest.raises(ValueError, match="at least one key"):
        KeyFilter(room)


@pytest.mark.parametrize("room", [2**59, 2**62, 2**63 - 1])
def test_more_room_than_memory(room: int) -> None:
    with pytest.raises(MemoryError, match=f"{room} keys"):
        KeyFilter(room)
