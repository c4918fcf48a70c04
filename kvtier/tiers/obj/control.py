# SPDX-License-Identifier: Apache-2.0
"""The rare calls to the store, through aiobotocore: credentials, endpoint, bucket, list, delete.

One session and one client a loop. Owns both, and the credentials, which all requests of the bulk
path are signed with: one task at a time asks their source for new ones, and no request waits for it
while those it has are good. Runs on the service's loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import exceptions
from botocore.credentials import RefreshableCredentials
from botocore.parsers import ResponseParserError

from kvtier.errors import ConfigError, KVTierError, TierLostError
from kvtier.tiers.fs import naming
from kvtier.tiers.obj.errors import Kind, StoreError, error_of
from kvtier.tiers.obj.options import ObjOptions
from kvtier.tiers.obj.sign import Credentials

CALL_SECONDS = 10.0
SOURCE_SECONDS = 4.0
"""When the tier opens, the source of credentials (a file, a metadata server, STS) has answered by
then."""
STS_SECONDS = 2.0
"""For one of two calls that take a role; botocore's own patience is five minutes."""
AGAIN_SECONDS = 2.0
"""From the end of one question to it to the next."""
DELETE_AT_ONCE = 100
"""Objects that one call deletes. The S3 API allows a thousand, for which a store that deletes one
after the other takes longer than a call may."""
DEFAULT_REGION = "us-east-1"


class Listed(msgspec.Struct, frozen=True):
    """One object of a listing."""

    name: str
    size: int
    modified: float
    """Seconds since 1970."""

    @property
    def key(self) -> bytes | None:
        """Of the chunk; None if the object is none."""
        return naming.chunk_key(self.name.rpartition("/")[2])


class Control:
    """See the head of this module.

    Parameters
    ----------
    options : ObjOptions
    clock : callable
        Monotonic seconds.
    """

    def __init__(self, options: ObjOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._stack = contextlib.AsyncExitStack()
        self._before = contextlib.AsyncExitStack()  # of the client that a listing may still use
        self._client: Any = None
        # Of botocore's descriptions, which it reads for a tenth of a second: once, so that renewed
        # credentials do not hold up the loop.
        self._loader: Any = None
        self._chain: Any = None
        self._current: Credentials | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._failure = ""  # of the last renewal
        self._again_at = -math.inf
        self.region = DEFAULT_REGION
        self.endpoint_url = ""
        self.ca_bundle = options.ca_bundle
        """Whom to trust: AWS's variable and files name it where the options do not."""

    async def open(self) -> None:
        """Find credentials and endpoint; no request is sent to the store.

        Raises
        ------
        ConfigError
            There are no credentials, or their source refuses them.
        TierLostError
            Their source fails, or does not answer within `SOURCE_SECONDS`.
        """
        try:
            async with asyncio.timeout(SOURCE_SECONDS):
                await self._open()
        except Exception as exc:
            await self._stack.aclose()
            raise _source_error(exc) from exc

    async def _open(self) -> None:
        options = self._options
        session = AioSession()
        session.set_default_client_config(
            AioConfig(
                connect_timeout=STS_SECONDS,
                read_timeout=STS_SECONDS,
                retries={"total_max_attempts": 2},
            )
        )
        if self._loader is None:
            self._loader = session.get_component("data_loader")
        else:
            session.register_component("data_loader", self._loader)
        if options.access_key is not None and options.secret_key is not None:
            token = options.session_token
            session.set_credentials(
                options.access_key.reveal(),
                options.secret_key.reveal(),
                token.reveal() if token is not None else None,
            )
        chain = await session.get_credentials()
        if chain is None:
            raise ConfigError(
                "obj: no credentials: give access_key and secret_key, set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or run where a role gives them (a metadata server that is "
                "slow needs a larger AWS_METADATA_SERVICE_TIMEOUT)"
            )
        current = await _frozen(chain)
        self.ca_bundle = options.ca_bundle or session.get_config_variable("ca_bundle")
        region = options.region or session.get_config_variable("region") or DEFAULT_REGION
        client = await self._stack.enter_async_context(
            session.create_client(
                "s3",
                region_name=region,
                endpoint_url=options.endpoint_url,
                use_ssl=options.scheme != "http",
                verify=self.ca_bundle,
                config=AioConfig(
                    signature_version="s3v4",
                    connect_timeout=options.connect_seconds,
                    read_timeout=CALL_SECONDS,
                    retries={"mode": "standard", "max_attempts": 3},
                    s3={"addressing_style": options.addressing},
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                ),
            )
        )
        client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
        self._chain, self._client, self.region = chain, client, region
        self._current, self.endpoint_url = current, client.meta.endpoint_url

    async def aclose(self) -> None:
        """Let go of the client. Idempotent."""
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait({self._renewal})
        await self._before.aclose()
        await self._stack.aclose()
        self._client = None

    async def credentials(self, refused: Credentials | None = None) -> Credentials:
        """What to sign with now; others than `refused`, which the store has called expired.

        They are renewed ahead of their end, and once for all requests that met it. Cancellation
        ends the wait, not the renewal.

        Raises
        ------
        StoreError
            EXPIRED: they have ended, and their source gives no others.
        """
        chain = self._chain
        ended = refused is not None and refused == self._current
        if ended or (isinstance(chain, RefreshableCredentials) and chain.refresh_needed()):
            if self._renewal is None and self._clock() >= self._again_at:
                self._renewal = asyncio.create_task(
                    self._renew(self._anew if ended else self._ask),
                    name="kvtier-obj-credentials",
                )
            if ended or chain.refresh_needed(0):
                if self._renewal is not None:
                    await asyncio.wait({self._renewal})
                if self._failure or self._current == refused:
                    failure = self._failure or "they have expired, and there are no others"
                    raise StoreError(Kind.EXPIRED, f"credentials: {failure}")
        assert self._current is not None
        return self._current

    async def _renew(self, way: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """The task that asks for others. Whoever waits for it has a deadline; the sources have
        theirs, but for a process, of which a second one would hang as well."""
        try:
            await way()
            self._failure = ""
        except Exception as exc:  # noqa: BLE001 - told to the requests that wait for others
            self._failure = str(_source_error(exc))
        finally:
            self._again_at = self._clock() + AGAIN_SECONDS
            self._renewal = None

    async def _ask(self) -> None:
        """Their source gives others ahead of their end."""
        self._current = await _frozen(self._chain)

    async def _anew(self) -> None:
        """The whole chain again: a file may have been written anew, a role taken again."""
        now, self._stack = self._stack, contextlib.AsyncExitStack()
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            self._stack = now
            raise
        retired, self._before = self._before, now
        await retired.aclose()

    async def create_bucket(self) -> None:
        """Make the bucket, in the client's region.

        Raises
        ------
        StoreError
        """
        more: dict[str, Any] = {}
        if self.region != DEFAULT_REGION:
            more["CreateBucketConfiguration"] = {"LocationConstraint": self.region}
        with _errors():
            try:
                await self._client.create_bucket(Bucket=self._options.bucket, **more)
            except (
                self._client.exceptions.BucketAlreadyOwnedByYou,
                self._client.exceptions.BucketAlreadyExists,
            ):
                # Another instance was first, or whose it is the next call tells.
                return

    async def list(self, prefix: str) -> AsyncIterator[list[Listed]]:
        """Objects whose names begin so, a page at a time.

        Raises
        ------
        StoreError
        """
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._options.bucket, Prefix=prefix
        )
        with _errors():
            async for page in pages:
                if "Contents" not in page and "IsTruncated" not in page:
                    # Of a page that is no listing botocore makes an empty one.
                    raise StoreError(Kind.PROTOCOL, "an answer that is no listing")
                yield [
                    Listed(one["Key"], one["Size"], one["LastModified"].timestamp())
                    for one in page.get("Contents", ())
                ]

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are not there do not matter.

        Raises
        ------
        StoreError
            Of the first that could not be deleted.
        """
        for start in range(0, len(names), DELETE_AT_ONCE):
            objects = [{"Key": name} for name in names[start : start + DELETE_AT_ONCE]]
            with _errors():
                answer = await self._client.delete_objects(
                    Bucket=self._options.bucket, Delete={"Objects": objects, "Quiet": True}
                )
            for error in answer.get("Errors", ()):
                if error.get("Code") != "NoSuchKey":
                    raise StoreError(
                        Kind.FORBIDDEN if error.get("Code") == "AccessDenied" else Kind.REFUSED,
                        f"{error.get('Key')}: {error.get('Code')} {error.get('Message', '')}",
                    )


_PASSING = (
    exceptions.HTTPClientError,
    exceptions.MetadataRetrievalError,
    exceptions.CredentialRetrievalError,
    ResponseParserError,
)


async def _frozen(chain: Any) -> Credentials:
    frozen = await chain.get_frozen_credentials()
    return Credentials(frozen.access_key, frozen.secret_key, frozen.token)


def _source_error(exc: Exception) -> KVTierError:
    """What to do when there are no credentials: their sources raise anything."""
    if isinstance(exc, KVTierError):
        return exc
    if isinstance(exc, TimeoutError):
        return TierLostError(
            f"obj: the source of the credentials has not answered within {SOURCE_SECONDS:g} s: "
            "check the role's metadata server or STS, or give access_key and secret_key"
        )
    said = " ".join(f"{type(exc).__name__}: {exc}".split())[:400]
    passing = isinstance(exc, _PASSING)
    if isinstance(exc, exceptions.ClientError):
        passing = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500
    if passing:
        return TierLostError(f"obj: the source of the credentials fails: {said}")
    return ConfigError(f"obj: the source of the credentials gives none: {said}")


def _add_md5(params: dict[str, Any], **more: Any) -> None:
    """Some stores, Swift among them, delete nothing without it; botocore sends other checksums."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


@contextlib.contextmanager
def _errors() -> Any:
    """botocore's errors as ours."""
    try:
        yield
    except exceptions.ClientError as exc:
        error = exc.response.get("Error", {})
        meta = exc.response.get("ResponseMetadata", {})
        headers = {
            str(name).lower().encode(): str(value).encode()
            for name, value in meta.get("HTTPHeaders", {}).items()
        }
        body = f"<Code>{error.get('Code', '')}</Code><Message>{error.get('Message', '')}".encode()
        raise error_of(int(meta.get("HTTPStatusCode", 0)), headers, body) from exc
    except exceptions.SSLError as exc:
        raise StoreError(Kind.TLS, str(exc)) from exc
    except exceptions.ConnectionError as exc:
        raise StoreError(Kind.CONNECT, str(exc)) from exc
    except exceptions.ReadTimeoutError as exc:
        raise StoreError(Kind.STALLED_HEAD, str(exc)) from exc
    except exceptions.HTTPClientError as exc:
        raise StoreError(Kind.RESET, str(exc)) from exc
    except (exceptions.BotoCoreError, OSError, RuntimeError) as exc:
        # The last two are what a source of credentials raises, asked before a call.
        raise StoreError(Kind.REFUSED, str(exc)) from exc
    except (LookupError, ValueError) as exc:
        # From botocore's parser, or an entry of a listing that has no name, size or date.
        raise StoreError(Kind.PROTOCOL, f"an answer that cannot be read: {exc!r}") from exc
