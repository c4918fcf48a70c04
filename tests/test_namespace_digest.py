# SPDX-License-Identifier: Apache-2.0
"""The digest of a namespace: one value for one set of fields, whatever their order."""

import hashlib

from kvtier.namespace import namespace_digest


def test_bytes_are_as_documented() -> None:
    text = b"kvtier-namespace-1" + b"\0\0\0\x01a" + b"\0\0\0\x02bc" + b"\0\0\0\x02\xc3\xa9"
    text += b"\0\0\0\0"
    assert namespace_digest({"é": "", "a": "bc"}) == hashlib.sha256(text).digest()


def test_borders_between_fields_count() -> None:
    fields = [{}, {"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": "", "b": "c"}, {"a": "b"}]
    assert len({namespace_digest(each) for each in fields}) == len(fields)
