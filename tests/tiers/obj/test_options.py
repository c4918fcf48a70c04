# SPDX-License-Identifier: Apache-2.0
"""Configuration of the object tier: what no request can carry is refused before there is one."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.tiers.obj.options import MAX_PREFIX_BYTES, ObjOptions


@pytest.mark.fault("U02")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bucket", "kv"),
        ("bucket", "a..b"),
        ("bucket", "kv\r\nX-A: 1"),
        ("prefix", "/"),
        ("prefix", "/a"),
        ("prefix", "a//b"),
        ("prefix", "a//"),
        ("prefix", "."),
        ("prefix", "a/../../b"),
        ("prefix", "a\nb"),
        ("prefix", "a\x7f"),
        ("prefix", "ü" * (MAX_PREFIX_BYTES // 2 + 1)),
        ("endpoint_override", "http://a..b:80"),
        ("endpoint_override", "http://-a.b"),
        ("endpoint_override", "http://a-"),
        ("endpoint_override", "http://" + "a" * 64),
        ("endpoint_override", "http://[1]:80"),
        ("endpoint_override", "http://[::::]"),
        ("endpoint_override", "http://host:65536"),
        ("endpoint_override", "http://host/path"),
        ("endpoint_override", "http://host\r\nX-A: 1"),
        ("storage_class", "COLD\r\nX-A: 1"),
        ("storage_class", "kühl"),
        ("storage_class", " COLD"),
    ],
)
def test_what_no_request_can_carry(key: str, value: str) -> None:
    made: dict[str, Any] = {"bucket": "kv-cache", key: value}
    with pytest.raises(ValueError, match=key) as caught:
        ObjOptions(**made)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bucket", "a.b-c_D"),
        ("prefix", "a/b/"),
        ("prefix", "..a/b..c/ü 1"),
        ("prefix", "a" * MAX_PREFIX_BYTES),
        ("endpoint_override", "host"),
        ("endpoint_override", "a-b.c:9000/"),
        ("endpoint_override", "http://host.example.:80"),
        ("endpoint_override", "https://[::1]:9000"),
        ("storage_class", "STANDARD_IA"),
    ],
)
def test_what_may_be_set(key: str, value: str) -> None:
    made: dict[str, Any] = {"bucket": "kv-cache", key: value}
    assert getattr(ObjOptions(**made), key) == value
