# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of the object tier."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

import msgspec

from kvtier.options import Bytes, Ratio, Seconds, Secret

Concurrency = Annotated[int, msgspec.Meta(ge=1, le=1024)]

MAX_PREFIX_BYTES = 512
"""Half of the longest name that S3 takes; the rest is for model, namespace and hash."""

_BUCKET = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_LABEL = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
_ENDPOINT = re.compile(
    rf"(?:(https?)://)?(\[[0-9A-Fa-f:.]+\]|{_LABEL}(?:\.{_LABEL})*\.?)(?::([0-9]{{1,5}}))?/?"
)
_TOKEN = re.compile(r"[!-~]+")


class ObjOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a tier of type ``obj``.

    Raises
    ------
    ValueError
        If values do not fit together.
    """

    bucket: str
    """Name of the bucket; it has to be there, unless `create_bucket`."""
    prefix: str = "kvtier"
    """First part of every object's name."""
    endpoint_override: str | None = None
    """``host``, ``host:port`` or a URL of the store; None is Amazon's of `region`."""
    scheme: Literal["auto", "http", "https"] = "auto"
    """Of an endpoint that does not say; auto is https."""
    region: str | None = None
    """None is what the AWS environment or files say, else us-east-1."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Whether the bucket is in the path or in the host's name; auto: in the name at Amazon."""
    ca_bundle: str | None = None
    """File of the certificates to trust in place of the system's."""

    access_key: Secret | None = None
    """None, like `secret_key`: the AWS chain, which is environment, files, web identity, and the
    role of container or instance."""
    secret_key: Secret | None = None
    session_token: Secret | None = None

    create_bucket: bool = False
    """Make the bucket if it is not there."""
    sse: Literal["AES256", "aws:kms"] | None = None
    """Encryption that the store is to apply; None is the bucket's own setting."""
    storage_class: str | None = None
    """Such as STANDARD_IA; None is the bucket's own setting."""
    sign_payload: Literal["auto", "always", "never"] = "auto"
    """Whether the signature covers the body, for which it has to be hashed; auto: over http only.
    The checksum of a chunk is compared in any case."""

    concurrency: Concurrency = 64
    """Requests at the same time, at most; how many at present follows from what they move."""
    connect_seconds: Seconds = 3.0
    """For a connection to be made, TLS included."""
    stall_seconds: Seconds = 5.0
    """Without a byte for so long, a request is tried again on another connection."""
    absent_seconds: Seconds = 1.0
    """How long an object that was not there is not asked for again."""
    presence_requests: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 8192
    """Questions for one request of the model server, at most; the rest counts as absent."""
    warm_up: bool = False
    """List the namespace at the start: what is there then is known without asking."""

    capacity_bytes: Bytes | None = None
    """Most that the chunks below `prefix` may take; the oldest are deleted. None is no limit."""
    low_watermark: Ratio = 0.85
    """Part of the capacity at which deletion ends."""

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise ValueError(
                f"bucket {self.bucket!r:.80} is no bucket's name: 3 to 63 letters, digits, dots, "
                f"hyphens"
            )
        if self.endpoint_override is not None:
            match = _ENDPOINT.fullmatch(self.endpoint_override)
            if match is None or not (0 < int(match[3] or 1) < 65536 and _is_host(match[2])):
                raise ValueError(
                    f"endpoint_override {self.endpoint_override!r:.120} is no address: give "
                    f"http://HOST:PORT or https://HOST"
                )
            if match[1] and self.scheme not in ("auto", match[1]):
                raise ValueError(
                    f"scheme {self.scheme} does not fit endpoint_override "
                    f"{self.endpoint_override!r}; leave one of them out"
                )
        if (self.access_key is None) != (self.secret_key is None):
            missing = "access_key" if self.access_key is None else "secret_key"
            raise ValueError(f"{missing} is missing beside the other one; give both or neither")
        if self.session_token is not None and self.access_key is None:
            raise ValueError("session_token needs access_key and secret_key")
        parts = self.prefix.removesuffix("/").split("/")
        if (
            not {"", ".", ".."}.isdisjoint(parts)
            or not self.prefix.isprintable()
            or len(self.prefix.encode()) > MAX_PREFIX_BYTES
        ):
            raise ValueError(
                f"prefix {self.prefix!r:.80} has a part that is empty, . or .., a character that "
                f"cannot be printed, or over {MAX_PREFIX_BYTES} bytes; write it like kv/cache"
            )
        if self.storage_class is not None and not _TOKEN.fullmatch(self.storage_class):
            raise ValueError(
                f"storage_class {self.storage_class!r:.80} is no word; write it like STANDARD_IA"
            )

    @property
    def endpoint_url(self) -> str | None:
        """URL of `endpoint_override`; None for Amazon's own."""
        if self.endpoint_override is None:
            return None
        match = _ENDPOINT.fullmatch(self.endpoint_override)
        assert match is not None
        scheme = match[1] or ("http" if self.scheme == "http" else "https")
        return f"{scheme}://{match[2]}" + (f":{match[3]}" if match[3] else "")


def _is_host(text: str) -> bool:
    """Whether a host of `_ENDPOINT` may be one."""
    if not text.startswith("["):
        return True
    try:
        ipaddress.IPv6Address(text[1:-1])
    except ValueError:
        return False
    return True
