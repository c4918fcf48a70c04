# SPDX-License-Identifier: Apache-2.0
"""A UCX worker driven by an asyncio loop, and its operations as coroutines.

Owns the worker, the loop's reader of its event descriptor and the next call of `_turn`. Runs on the
loop that is current at `open`, uvloop or asyncio. Idle, it waits for the descriptor and costs
nothing; while something happens, it has a turn of at most `ucx.TURN_SECONDS` (and what one chunk
takes) in each round of the loop.

Invariant: a coroutine of `UcxLoop` returns, raises or is cancelled only when nothing of its
operation touches local memory any more. UCX cannot cancel a get or put, so what is under way is
waited for, and when that takes too long, the connection is broken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ClosedError, InternalError, TierLostError

if TYPE_CHECKING:
    from kvtier._core import ucx  # left out of a build without UCX's headers

CANCEL_SECONDS = 1.0
"""How long a cancelled operation may take until its endpoint is closed by force."""
FORCE_SECONDS = 5.0
"""How long a close by force may take; it needs nothing of the peer."""

Addresses = NDArray[np.int64]
_Callback = Callable[[str | None], None]


class UcxLoop:
    """Coroutines over the endpoints of one worker.

    None of them has a deadline of its own: cancel it (``asyncio.timeout_at``).

    Parameters
    ----------
    worker : ucx.Worker
        Driven by nobody else, and closed with this.
    """

    def __init__(self, worker: ucx.Worker) -> None:
        self.worker = worker
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: asyncio.Handle | None = None

    def open(self) -> None:
        """Drive the worker from now on."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.worker.fileno(), self._wake)
        self._wake()

    def close(self) -> None:
        """Close the worker; coroutines under way end with TierLostError. Harmless when repeated."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.remove_reader(self.worker.fileno())
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self.worker.close()

    def _wake(self) -> None:
        if self._next is None and self._loop is not None:
            self._next = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._next = None
        steps = self.worker.progress()
        # A callback may have closed this.
        if self._loop is not None and (steps or not self.worker.arm()):
            self._wake()

    def connect(self, address: bytes, on_error: _Callback) -> ucx.Endpoint:
        """Connect to the worker of this address; see `ucx.Worker.connect`."""
        endpoint = self.worker.connect(address, on_error)
        self._wake()
        return endpoint

    async def get_batch(
        self,
        endpoint: ucx.Endpoint,
        local: Addresses,
        remote: Addresses,
        lengths: Addresses,
        key: ucx.RemoteKey,
    ) -> None:
        """Read chunks of the peer's memory; see `ucx.Endpoint.get_batch`.

        Raises
        ------
        TierLostError
            A chunk could not be read. Any part of the local memory may have been written.
        CancelledError
            No chunk is begun after the cancellation, and those under way have ended. After
            `CANCEL_SECONDS` this closes the endpoint, with all its operations.
        InternalError
            UCX does not let go of the memory even so: it must not be used again.
        """
        await self._run(
            endpoint, lambda ended: endpoint.get_batch(local, remote, lengths, key, ended)
        )

    async def put_batch(
        self,
        endpoint: ucx.Endpoint,
        local: Addresses,
        remote: Addresses,
        lengths: Addresses,
        key: ucx.RemoteKey,
    ) -> None:
        """Write chunks into the peer's memory, where they are seen when this returns.

        Raises
        ------
        TierLostError, CancelledError, InternalError
            As `get_batch`; any part of the peer's memory may have been written.
        """
        await self._run(
            endpoint, lambda ended: endpoint.put_batch(local, remote, lengths, key, ended)
        )

    async def flush(self, endpoint: ucx.Endpoint) -> None:
        """Wait for all operations of the endpoint that were started before. Errors as above."""
        await self._run(endpoint, endpoint.flush)

    async def close_endpoint(self, endpoint: ucx.Endpoint, *, force: bool = False) -> None:
        """Close a connection; with `force` at once, else when its operations have ended.

        When this is cancelled, the connection is broken before it returns. Harmless when done
        twice.

        Raises
        ------
        InternalError
            UCX does not let go of the connection's memory: it must not be used again.
        """
        if self.worker.closed:
            return
        ended = self._future()
        endpoint.close(force=force, callback=ended.set_result)
        self._wake()
        try:
            await asyncio.wait([ended], timeout=FORCE_SECONDS if force else None)
        finally:
            if not ended.done():
                await self._break(endpoint)

    async def _run(self, endpoint: ucx.Endpoint, start: Callable[[_Callback], ucx.Request]) -> None:
        if self._loop is None:
            raise ClosedError("nobody drives the UCX worker")
        ended = self._future()
        request = start(ended.set_result)
        self._wake()
        try:
            await asyncio.wait([ended])
        finally:
            # Cancelled: memory is given back only when nothing is under way.
            if not ended.done():
                endpoint.cancel(request)
                self._wake()
                if not await self._within(ended, CANCEL_SECONDS):
                    await self._break(endpoint)
                    await self._within(ended, FORCE_SECONDS)
        error = ended.result()
        if error is not None:
            raise TierLostError(f"UCX: {error}")

    async def _break(self, endpoint: ucx.Endpoint) -> None:
        closed = self._future()
        endpoint.close(force=True, callback=closed.set_result)
        self._wake()
        if not await self._within(closed, FORCE_SECONDS):
            raise InternalError("UCX does not close a connection; its memory is not to be used")

    def _future(self) -> asyncio.Future[str | None]:
        return asyncio.get_running_loop().create_future()

    @staticmethod
    async def _within(future: asyncio.Future[str | None], seconds: float) -> bool:
        """Whether it was done in time. For one that is cancelled: more of that changes nothing."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not future.done() and loop.time() < until:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future], timeout=until - loop.time())
        return future.done()
