# SPDX-License-Identifier: Apache-2.0
"""The trial of a bucket when the tier opens: what it can do, or what has to be changed."""

from __future__ import annotations

import base64
import contextlib
import logging
import secrets
from collections.abc import Mapping

import msgspec

from kvtier import namespace
from kvtier.errors import ConfigError, TierLostError
from kvtier.tiers.obj.bulk import Bulk
from kvtier.tiers.obj.control import Control
from kvtier.tiers.obj.errors import Kind, StoreError
from kvtier.tiers.obj.options import ObjOptions

logger = logging.getLogger(__name__)

NAMESPACE_OBJECT = "namespace.json"

_ADVICE = {
    Kind.NO_BUCKET: "there is no such bucket: make it, or set create_bucket: true",
    Kind.MISSING: "there is no such bucket, or no S3 store: make it, set create_bucket: true, or "
    "check endpoint_override",
    Kind.FORBIDDEN: "not permitted: check access_key and secret_key, and that the policy allows "
    "s3:GetObject, s3:PutObject and s3:DeleteObject below the prefix",
    Kind.REGION: "set region to the bucket's; leave it out where the store knows none",
    Kind.EXPIRED: "renew the credentials",
    Kind.SKEWED: "the clock of this host is wrong: set it (NTP)",
    Kind.FULL: "nothing can be stored: make room, or raise the quota",
    Kind.TLS: "no trust in its certificate: set ca_bundle to the file of its authority; or it "
    "speaks no TLS: write http:// in endpoint_override",
    Kind.DNS: "its name is unknown: check endpoint_override and the DNS; where the bucket's name "
    "stands before it, set addressing: path",
    Kind.CONNECT: "no connection: check host and port of endpoint_override, and firewalls",
    Kind.RESET: "it hangs up: where the store speaks TLS, write https:// in endpoint_override",
    Kind.PROTOCOL: "it does not speak HTTP there: check scheme and port of endpoint_override",
}
_UP_AGAIN = frozenset({Kind.DNS, Kind.CONNECT, Kind.FULL})
"""Beside what is tried again: may go by itself, so it is no error of the configuration."""


class Features(msgspec.Struct, frozen=True):
    """What a store can do."""

    conditional: bool
    """It takes ``If-None-Match``."""
    checksums: bool
    """It compares ``x-amz-checksum-crc32c`` with what it got."""
    hides_missing: bool
    """It answers 403 for what is not there, because listing is not permitted."""


def checksum_header(crc: int) -> tuple[str, str]:
    """The header in which S3 takes a CRC-32C."""
    return "x-amz-checksum-crc32c", base64.b64encode(crc.to_bytes(4, "big")).decode()


def put_headers(options: ObjOptions) -> list[tuple[str, str]]:
    """What every object is written with: a policy of the bucket may ask for it."""
    headers: list[tuple[str, str]] = []
    if options.sse is not None:
        headers.append(("x-amz-server-side-encryption", options.sse))
    if options.storage_class is not None:
        headers.append(("x-amz-storage-class", options.storage_class))
    return headers


def advice(error: StoreError, where: str) -> ConfigError | TierLostError:
    """What to do about an error of the trial, in one line."""
    text = f"obj: {where}: {_ADVICE.get(error.kind, 'it does not work')} ({error})"
    passing = error.kind.retried and error.kind is not Kind.PROTOCOL
    return TierLostError(text) if passing or error.kind in _UP_AGAIN else ConfigError(text)


async def try_bucket(
    bulk: Bulk, control: Control, options: ObjOptions, name: str, until: float
) -> Features:
    """Write, read and delete the object `name`, which nobody else has, before `until`.

    A store that is full is tried as far as it goes: what it holds can be loaded.

    Raises
    ------
    StoreError
    """
    payload = secrets.token_bytes(64)
    body = memoryview(payload)
    always = put_headers(options)

    async def said(method: str, *headers: tuple[str, str]) -> Kind | None:
        put = method == "PUT"
        try:
            await bulk.request(
                method,
                name,
                until,
                headers=[*always, *headers] if put else headers,
                body=body if put else None,
            )
        except StoreError as exc:
            if exc.kind.retried:
                raise
            return exc.kind
        return None

    try:
        await bulk.request("PUT", name, until, headers=always, body=body)
    except StoreError as exc:
        if exc.kind is Kind.FULL:
            logger.warning("obj: bucket %s: %s (%s)", options.bucket, _ADVICE[Kind.FULL], exc)
            missing = await said("GET")
            return Features(False, False, missing is Kind.FORBIDDEN)
        if exc.kind not in (Kind.NO_BUCKET, Kind.MISSING) or not options.create_bucket:
            raise
        await control.create_bucket()
        await bulk.request("PUT", name, until, headers=always, body=body)
    back = memoryview(bytearray(len(payload)))
    try:
        await bulk.request("GET", name, until, into=back)
        if bytes(back) != payload:
            raise StoreError(Kind.CORRUPT, "an object came back with other bytes")
    except StoreError:
        with contextlib.suppress(StoreError):  # the first error is the one to be told
            await bulk.request("DELETE", name, until)
        raise
    # A feature shows in what it refuses: the object is there, the checksum is that of nothing.
    conditional = await said("PUT", ("if-none-match", "*")) is Kind.EXISTS
    checksums = await said("PUT", checksum_header(0)) is Kind.REFUSED
    await bulk.request("DELETE", name, until)
    missing = await said("GET")
    return Features(conditional, checksums, missing is Kind.FORBIDDEN)


async def put_namespace(
    bulk: Bulk, options: ObjOptions, fields: Mapping[str, str], prefix: str, until: float
) -> None:
    """Write ``namespace.json``, whatever stands there.

    Raises
    ------
    StoreError
    """
    body = memoryview(namespace.encode_json(fields))
    name = f"{prefix}{NAMESPACE_OBJECT}"
    await bulk.request("PUT", name, until, headers=put_headers(options), body=body)


async def write_namespace(
    bulk: Bulk, options: ObjOptions, fields: Mapping[str, str], prefix: str, until: float
) -> None:
    """``namespace.json`` beside the data, for people and for the proof that reading is permitted.

    Raises
    ------
    StoreError
    ConfigError
        What stands there is of another namespace, or no such file.
    """
    name = f"{prefix}{NAMESPACE_OBJECT}"
    try:
        found = await bulk.request("GET", name, until)
    except StoreError as exc:
        if exc.kind not in (Kind.MISSING, Kind.FORBIDDEN):
            raise
        try:
            await put_namespace(bulk, options, fields, prefix, until)
        except StoreError as full:
            if full.kind is not Kind.FULL:
                raise
        return
    try:
        theirs = namespace.decode_json(found.body)
    except ConfigError as exc:
        raise ConfigError(f"obj: {name}: {exc}; delete that object, or set another prefix") from exc
    if theirs != dict(fields):
        raise ConfigError(f"obj: {name} is of another namespace; set another prefix")
