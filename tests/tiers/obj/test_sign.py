# SPDX-License-Identifier: Apache-2.0
"""Signatures against botocore's own signer, and against the example of Amazon's reference."""

from __future__ import annotations

import datetime
import hashlib
from typing import Any

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.tiers.obj.sign import EMPTY_SHA256, UNSIGNED, Credentials, Signer, quoted

NOW = 1_790_000_000.25


def oracle(
    method: str,
    host: str,
    path: str,
    query: dict[str, str],
    headers: dict[str, str],
    payload: str,
    credentials: Credentials,
    region: str,
    now: float,
) -> dict[str, str]:
    """Headers that botocore adds."""

    class Fixed(botocore.auth.S3SigV4Auth):
        def payload(self, request: Any) -> str:
            return payload

    boto = BotoCredentials(credentials.access_key, credentials.secret_key, credentials.token)
    signer = Fixed(boto, "s3", region)
    request = AWSRequest(
        method=method, url=f"http://{host}{path}", params=query, headers=headers, data=b""
    )
    moment = datetime.datetime.fromtimestamp(int(now), datetime.UTC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.auth, "get_current_datetime", lambda *a, **k: moment)
        signer.add_auth(request)
    return {name.lower(): value for name, value in request.headers.items()}


NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=12)
VALUES = st.text("abcXYZ0123456789/=+:_-", min_size=1, max_size=30)


@given(
    method=st.sampled_from(["GET", "PUT", "HEAD", "DELETE"]),
    path=st.text("abcAZ09-_.~/ +%é&=", min_size=1, max_size=40),
    query=st.dictionaries(st.text("abc-", min_size=1), st.text("aZ0-_", max_size=8), max_size=3),
    metadata=st.dictionaries(NAMES, VALUES, max_size=4),
    token=st.none() | st.text("abcXYZ/+=", min_size=1, max_size=40),
    secret=st.text("abcXYZ/+=", min_size=1, max_size=40),
    signed=st.booleans(),
    seconds=st.floats(1e9, 4e9),
)
def test_botocore_signs_the_same(
    method: str,
    path: str,
    query: dict[str, str],
    metadata: dict[str, str],
    token: str | None,
    secret: str,
    signed: bool,
    seconds: float,
) -> None:
    host = "bucket.store.example:9000"
    line = quoted("/" + path.lstrip("/"))
    meta = {f"x-amz-meta-{name}": value for name, value in metadata.items()}
    credentials = Credentials("AKID", secret, token)
    payload = hashlib.sha256(b"body").hexdigest() if signed else UNSIGNED
    expected = oracle(
        method, host, line, query, meta, payload, credentials, "eu-central-1", seconds
    )
    words = "&".join(f"{quoted(name)}={quoted(value)}" for name, value in sorted(query.items()))
    got = Signer("eu-central-1").headers(
        method, line, words, [("host", host), *meta.items()], payload, credentials, seconds
    )
    assert dict(got) == {name: expected[name] for name, _ in got}
    assert {"authorization", "x-amz-date", "x-amz-content-sha256"} <= set(dict(got))
    assert ("x-amz-security-token" in dict(got)) == (token is not None)


def test_the_example_of_the_reference() -> None:
    """GET of an object, from Amazon's description of the signature."""
    credentials = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    headers = [("host", "examplebucket.s3.amazonaws.com"), ("range", "bytes=0-9")]
    now = datetime.datetime(2013, 5, 24, tzinfo=datetime.UTC).timestamp()
    got = Signer("us-east-1").headers(
        "GET", "/test.txt", "", headers, EMPTY_SHA256, credentials, now
    )
    assert dict(got)["authorization"].endswith(
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )


def test_keys_follow_secret_and_day() -> None:
    """One signer serves renewed credentials and goes past midnight."""
    signer = Signer("us-east-1")
    headers = [("host", "store")]
    moments = [(secret, NOW + day * 86_400) for secret in ("one", "two") for day in (0, 1, 0)]
    for secret, now in moments:
        credentials = Credentials("AKID", secret)
        fresh = Signer("us-east-1").headers("GET", "/a", "", headers, UNSIGNED, credentials, now)
        assert signer.headers("GET", "/a", "", headers, UNSIGNED, credentials, now) == fresh


def test_credentials_are_shown_to_nobody() -> None:
    shown = Credentials("AKID", "secret", "token")
    assert "secret" not in f"{shown!r} {shown}"
    assert "token" not in f"{shown!r} {shown}"


@pytest.mark.parametrize("text", ["AKID\n", " AKID", "a\r\nX-A: 1", "a\tb", "a\x00"])
@pytest.mark.parametrize("part", ["access key", "secret key", "session token"])
def test_credentials_that_no_header_can_carry(part: str, text: str) -> None:
    """A file or a variable with a line break at its end is the usual one."""
    parts = {"access key": "AKID", "secret key": "hush", "session token": "t"} | {part: text}
    with pytest.raises(ConfigError, match=part) as caught:
        Credentials(*parts.values())
    assert text not in str(caught.value)
    assert "\n" not in str(caught.value)
