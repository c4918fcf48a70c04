# SPDX-License-Identifier: Apache-2.0
"""Chunks through UCX: a reader gets them from the memory of an owner that does nothing for it.

Runs on the service's loop. Owns the UCX context and worker, the registration of host memory (for
reading), and the links made here. Nobody writes into another's memory. A lease is not seen by this
transport: what is read after its end may be another chunk's, which the checksum tells; the slot of
the reader is touched by the reader's own process only, so nothing comes late.

A peer that has a worker's address is inside the process (see ``_core/ucx.pyi``): an instance gives
its own only to peers that have proven the token, or of this host.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from kvtier.errors import ClosedError, ConfigError, TierLostError
from kvtier.tiers.base import HostMemory
from kvtier.tiers.p2p.transport import Link, Target, Transport
from kvtier.tiers.p2p.ucx_loop import Addresses, UcxLoop

log = logging.getLogger(__name__)

TRIAL_BYTES = 64
"""Read before a link is trusted: that a transport leads there shows only then."""


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a reader needs."""

    worker: Annotated[bytes, msgspec.Meta(max_length=16 << 10)]
    key: Annotated[bytes, msgspec.Meta(max_length=16 << 10)]
    slot_bytes: Annotated[int, msgspec.Meta(ge=1)]


class UcxTransport(Transport):
    """See the head of this module.

    Parameters
    ----------
    host : HostMemory
    slot_bytes : int
    everywhere : bool
        Also to other hosts where no network card of this one reads memory by itself: correct, and
        slower than TCP.
    """

    name: ClassVar[str] = "ucx"

    def __init__(self, host: HostMemory, slot_bytes: int, *, everywhere: bool) -> None:
        self._host = host
        self._slot_bytes = slot_bytes
        self._everywhere = everywhere
        self._driver: UcxLoop | None = None
        self._memory: Any = None
        self._links: set[UcxLink] = set()
        self._has_rdma = False
        self.version = ""

    async def open(self) -> None:
        try:
            from kvtier._core import ucx  # lazy: left out of a build without UCX's headers
        except ImportError as exc:
            raise ConfigError(
                "p2p: this kvtier was built without UCX: install libucx-cu12 and build it again, "
                "or set transport: tcp"
            ) from exc
        has_card = ucx.has_rdma()
        self.version = ucx.load()
        self._has_rdma = ucx.has_rdma()
        if has_card and not self._has_rdma:
            log.warning(
                "p2p: %s does not know this host's card for RDMA: install the system's UCX "
                "(libucx0), or bytes between hosts go over TCP",
                self.version,
            )
        try:
            context = ucx.Context()
            self._driver = UcxLoop(ucx.Worker(context))
            self._memory = context.register(
                self._host.address, self._host.length_bytes, writable=False
            )
        except TierLostError as exc:
            raise OSError(str(exc)) from exc
        self._driver.open()

    def suits(self, boot: bytes) -> bool:
        return self._everywhere or self._has_rdma or boot == boot_id()

    def offer(self, session: bytes) -> bytes:
        assert self._driver is not None
        offer = Offer(self._driver.worker.address, self._memory.rkey, self._slot_bytes)
        return msgspec.msgpack.encode(offer)

    async def revoke(self, session: bytes) -> None:
        """Nothing of it is known here."""

    async def connect(self, host: str, offer: bytes, deadline: float) -> Link:
        if self._driver is None:
            raise ClosedError("the transport is closed")
        try:
            made = msgspec.msgpack.decode(offer, type=Offer)
            link = UcxLink(self._driver, made, self._links.discard)
        except (msgspec.MsgspecError, ValueError, TierLostError) as exc:
            raise OSError(f"UCX: an offer that leads nowhere: {exc}") from exc
        self._links.add(link)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await link.try_out()
        except BaseException:
            await link.aclose()
            raise
        return link

    async def aclose(self) -> None:
        for link in list(self._links):
            await link.aclose()
        driver, self._driver = self._driver, None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if driver is not None:
            driver.close()


class UcxLink(Link):
    """An endpoint to an owner's worker."""

    def __init__(self, driver: UcxLoop, offer: Offer, on_end: Any) -> None:
        self._driver = driver
        self._slot_bytes = offer.slot_bytes
        self._on_end = on_end
        self._broken = ""
        self._endpoint = driver.connect(offer.worker, self._take_error)
        try:
            self._key = self._endpoint.unpack(offer.key)
        except BaseException:
            self._endpoint.close(force=True, callback=_ignored)
            raise

    def _take_error(self, error: str | None) -> None:
        self._broken = self._broken or error or "it ended"

    @property
    def is_usable(self) -> bool:
        return not self._broken

    async def try_out(self) -> None:
        """Read a few bytes."""
        into = np.zeros(TRIAL_BYTES, dtype=np.uint8)
        await self._get([into.ctypes.data], [self._key.address], [TRIAL_BYTES])

    async def read(self, lease: int, first: int, targets: Sequence[Target]) -> None:
        remote = [self._key.address + target.slot * self._slot_bytes for target in targets]
        await self._get(
            [target.address for target in targets],
            remote,
            [target.view.nbytes for target in targets],
        )

    async def _get(
        self, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]
    ) -> None:
        if self._broken:
            raise OSError(f"UCX: {self._broken}")
        parts = joined(*(np.array(one, dtype=np.int64) for one in (local, remote, lengths)))
        try:
            await self._driver.get_batch(self._endpoint, *parts, self._key)
        except (TierLostError, ClosedError, ValueError) as exc:
            self._take_error(str(exc))
            raise OSError(str(exc)) from exc

    async def aclose(self) -> None:
        self._take_error("closed")
        self._on_end(self)
        await self._driver.close_endpoint(self._endpoint, force=True)


def joined(
    local: Addresses, remote: Addresses, lengths: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """Neighbours on both sides are one transfer: a third of a small one's time is its call."""
    follows = np.zeros(len(lengths), dtype=bool)
    follows[1:] = (local[1:] == local[:-1] + lengths[:-1]) & (
        remote[1:] == remote[:-1] + lengths[:-1]
    )
    starts = np.flatnonzero(~follows)
    return local[starts], remote[starts], np.add.reduceat(lengths, starts)


def _ignored(error: str | None) -> None:
    """Nobody waits for it."""


@functools.cache
def boot_id() -> bytes:
    """Names the host since its start: the same in all its containers."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().strip()
