# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between kvtier and an S3-compatible store, by kind.

Owns no state. A kind is a metric label, says whether another try makes sense, and what one chunk's
outcome is when none is left.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

from kvtier.errors import KVTierError
from kvtier.types import Outcome


class Kind(enum.StrEnum):
    """Causes, also the label ``cause`` of ``kvtier_obj_errors_total``."""

    MISSING = "missing"
    NO_BUCKET = "no_bucket"
    FORBIDDEN = "forbidden"
    REGION = "region"
    EXPIRED = "expired"
    """Credentials that are to be renewed."""
    SKEWED = "skewed"
    """The clocks of this host and the store are too far apart."""
    SLOW_DOWN = "slow_down"
    SERVER = "server"
    CONFLICT = "conflict"
    """Another writer is at the same object."""
    CHANGED = "changed"
    """The rest of an object is not to be had; the whole may be."""
    EXISTS = "exists"
    """A conditional write met an object: the chunk is there."""
    UNSUPPORTED = "unsupported"
    """The store does not know what was asked of it."""
    FULL = "full"
    """A quota, or the store's disks."""
    REFUSED = "refused"
    """Any other 4xx."""
    CORRUPT = "corrupt"
    """Another length or encoding than what was stored."""
    RESET = "reset"
    STALLED_HEAD = "stalled_head"
    STALLED_BODY = "stalled_body"
    PROTOCOL = "protocol"
    """Not HTTP as it should be."""
    CONNECT = "connect"
    DNS = "dns"
    TLS = "tls"

    @property
    def retried(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self in _RETRIED

    @property
    def slows(self) -> bool:
        """Whether it asks for fewer requests at a time."""
        return self is Kind.SLOW_DOWN

    @property
    def outcome(self) -> Outcome:
        """Of a chunk whose last try ended so."""
        return _OUTCOMES.get(self, Outcome.IO)


_RETRIED = frozenset(
    {
        Kind.SLOW_DOWN,
        Kind.SERVER,
        Kind.CONFLICT,
        Kind.CHANGED,
        Kind.RESET,
        Kind.STALLED_HEAD,
        Kind.STALLED_BODY,
        Kind.PROTOCOL,
        Kind.CONNECT,
    }
)

_OUTCOMES = {
    Kind.MISSING: Outcome.MISSING,
    Kind.EXISTS: Outcome.EXISTS,
    Kind.CORRUPT: Outcome.CORRUPT,
    Kind.FULL: Outcome.FULL,
    Kind.FORBIDDEN: Outcome.DENIED,
    Kind.EXPIRED: Outcome.DENIED,
    Kind.SKEWED: Outcome.DENIED,
    Kind.REGION: Outcome.DENIED,
    Kind.NO_BUCKET: Outcome.LOST,
    Kind.CONNECT: Outcome.LOST,
    Kind.DNS: Outcome.LOST,
    Kind.TLS: Outcome.LOST,
    Kind.SLOW_DOWN: Outcome.DROPPED,
    Kind.STALLED_HEAD: Outcome.TIMEOUT,
    Kind.STALLED_BODY: Outcome.TIMEOUT,
}


class StoreError(KVTierError):
    """A request did not do what it was for.

    Parameters
    ----------
    kind : Kind
    message : str
        For people.
    retry_after : float
        Seconds that the store asks for.
    """

    def __init__(self, kind: Kind, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{kind.value}: {message}")
        self.kind = kind
        self.message = message
        self.retry_after = retry_after


_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>")
_TEXT = re.compile(rb"<Message>([^<]{0,300})")
_REGION = re.compile(rb"<Region>\s*([a-z0-9-]{1,64})\s*</Region>")

_BY_CODE = {
    b"NoSuchKey": Kind.MISSING,
    b"NoSuchBucket": Kind.NO_BUCKET,
    b"PermanentRedirect": Kind.REGION,
    b"TemporaryRedirect": Kind.REGION,
    b"AuthorizationHeaderMalformed": Kind.REGION,
    b"IllegalLocationConstraintException": Kind.REGION,
    b"InvalidLocationConstraint": Kind.REGION,
    b"ExpiredToken": Kind.EXPIRED,
    b"ExpiredTokenException": Kind.EXPIRED,
    b"TokenRefreshRequired": Kind.EXPIRED,
    b"RequestTimeTooSkewed": Kind.SKEWED,
    b"RequestExpired": Kind.SKEWED,
    b"SlowDown": Kind.SLOW_DOWN,
    b"SlowDownRead": Kind.SLOW_DOWN,
    b"SlowDownWrite": Kind.SLOW_DOWN,
    b"RequestLimitExceeded": Kind.SLOW_DOWN,
    b"Throttling": Kind.SLOW_DOWN,
    b"TooManyRequests": Kind.SLOW_DOWN,
    b"RequestTimeout": Kind.SERVER,
    b"InternalError": Kind.SERVER,
    b"PreconditionFailed": Kind.EXISTS,
    b"ConditionalRequestConflict": Kind.CONFLICT,
    b"OperationAborted": Kind.CONFLICT,
    b"NotImplemented": Kind.UNSUPPORTED,
    b"QuotaExceeded": Kind.FULL,
    b"EntityTooLarge": Kind.FULL,  # what Swift says when a quota is reached
    b"XMinioStorageFull": Kind.FULL,
}


def error_of(status: int, headers: Mapping[bytes, bytes], body: bytes) -> StoreError:
    """The error that a response tells, by its code where it has one, else by its status.

    Parameters
    ----------
    status : int
        A 2xx only if the body is that of an error.
    headers : mapping of bytes to bytes
        Names in lower case.
    body : bytes
        Empty for a HEAD.
    """
    code = match[1] if (match := _CODE.search(body)) else b""
    region = headers.get(b"x-amz-bucket-region", b"")
    if not region and (match := _REGION.search(body)):
        region = match[1]
    kind = _BY_CODE.get(code) or _by_status(status, bool(region))
    text = _line(match[1] if (match := _TEXT.search(body)) else b"" if code else body)
    said = " ".join(word for word in (str(status), code.decode(), text) if word)
    if 300 <= status < 400 and not code and b"location" in headers:
        said += f"; it sends on to {_line(headers[b'location'])}"
    if kind is Kind.REGION:
        right = region.decode("ascii", "replace")
        said += f"; the bucket is in region {right}" if right else "; the region is wrong"
    return StoreError(kind, said, _retry_after(headers))


def _by_status(status: int, has_region: bool) -> Kind:
    if status in (301, 307, 400) and has_region:
        return Kind.REGION
    if status == 404:
        return Kind.MISSING
    if status in (401, 403):
        return Kind.FORBIDDEN
    if status == 409:
        return Kind.CONFLICT
    if status == 412:
        return Kind.EXISTS
    if status in (429, 503):
        return Kind.SLOW_DOWN
    if status == 501:
        return Kind.UNSUPPORTED
    if status == 507:
        return Kind.FULL
    return Kind.SERVER if status >= 500 or status == 408 else Kind.REFUSED


def _line(text: bytes) -> str:
    """What somebody else wrote, as a part of a line of ours: XML's and HTML's marks left out."""
    plain = re.sub(rb"<[^>]*>", b" ", text[:1000]).decode("utf-8", "replace")
    shown = "".join(one if one.isprintable() else " " for one in plain)
    return " ".join(shown.split())[:200]


def _retry_after(headers: Mapping[bytes, bytes]) -> float:
    """Seconds of the header Retry-After; its other form, a date, is not waited for."""
    value = headers.get(b"retry-after", b"").strip()
    return min(float(value), 60.0) if re.fullmatch(rb"[0-9]{1,6}", value) else 0.0
