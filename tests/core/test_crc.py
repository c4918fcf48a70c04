# SPDX-License-Identifier: Apache-2.0
"""CRC-32C against the vectors of RFC 3720 and a table version written out bit by bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier._core import layout

VECTORS = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (
        bytes.fromhex(
            "01c00000000000000000000000000000140000000000040000000014000000"
            "182800000000000000" + "0200000000000000"
        ),
        0xD9963A56,
    ),
    (b"123456789", 0xE3069283),
    (b"", 0),
]

VERSIONS = pytest.mark.parametrize("crc32c", [layout.crc32c, layout.crc32c_tables])


def _table():
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


TABLE = _table()


def oracle(data, value=0):
    crc = value ^ 0xFFFFFFFF
    for byte in bytes(data):
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


POOL = np.random.default_rng(7).integers(0, 256, 40_000, dtype=np.uint8)


@VERSIONS
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_known_vectors(crc32c, data, expected):
    assert crc32c(data) == expected


@VERSIONS
@settings(max_examples=200, deadline=None)
@given(start=st.integers(0, 130), length=st.integers(0, 10_000), value=st.integers(0, 2**32 - 1))
def test_any_length_alignment_and_start(crc32c, start, length, value):
    data = POOL[start : start + length]
    assert crc32c(data, value) == oracle(data, value)


@VERSIONS
@pytest.mark.parametrize("length", [767, 768, 769, 12_288, 24_575, 24_576, 24_577, 25_345, 39_000])
def test_around_the_joins(crc32c, length):
    """The lengths where the interleaved streams begin and end."""
    for start in (0, 1, 7):
        data = POOL[start : start + length]
        assert crc32c(data) == oracle(data)


@VERSIONS
@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=2000), cut=st.integers(0, 2000))
def test_continuation(crc32c, data, cut):
    assert crc32c(data[cut:], crc32c(data[:cut])) == oracle(data)


def test_every_flipped_bit_changes_it():
    data = POOL[:1500].copy()
    before = layout.crc32c(data)
    for bit in range(0, 1500 * 8, 37):
        data[bit // 8] ^= 1 << bit % 8
        assert layout.crc32c(data) != before
        data[bit // 8] ^= 1 << bit % 8
    assert layout.crc32c(data) == before


def test_ranges_by_address():
    lengths = np.array([0, 1, 800, 13_000, 20_001], dtype=np.int64)
    starts = np.array([5, 11, 3, 64, 17], dtype=np.uint64)
    found = layout.crc32c_address(starts + np.uint64(POOL.ctypes.data), lengths)
    assert found.dtype == np.uint32
    assert found.tolist() == [
        oracle(POOL[int(s) : int(s) + int(n)]) for s, n in zip(starts, lengths, strict=True)
    ]


def test_ranges_are_checked():
    one = np.array([POOL.ctypes.data], dtype=np.uint64)
    with pytest.raises(ValueError, match="2 lengths"):
        layout.crc32c_address(one, np.array([1, 2], dtype=np.int64))
    with pytest.raises(ValueError, match="-1 bytes"):
        layout.crc32c_address(one, np.array([-1], dtype=np.int64))
    with pytest.raises(ValueError, match="address 0"):
        layout.crc32c_address(np.array([0], dtype=np.uint64), np.array([1], dtype=np.int64))
    with pytest.raises(ValueError, match="dtype"):
        layout.crc32c_address(one, np.array([1], dtype=np.int32))


def test_refuses_what_is_no_contiguous_buffer():
    with pytest.raises((BufferError, ValueError)):
        layout.crc32c(POOL[::2])
    with pytest.raises(TypeError):
        layout.crc32c("text")
    with pytest.raises(OverflowError):
        layout.crc32c(b"x", 2**32)
