# SPDX-License-Identifier: Apache-2.0
"""A thread that makes blocking calls one after the other, for coroutines that wait for them.

Owns the thread, from ``start`` to ``stop``. It is a daemon: foreign code that never returns must
not keep the interpreter alive. Invariant: who waits for a call learns of its end, never before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from kvtier.errors import ClosedError


class Caller:
    """Calls in one thread.

    Parameters
    ----------
    name : str
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[
            tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]] | None
        ] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Start the thread; on the loop that will wait for its calls."""
        self._ended = asyncio.get_running_loop().create_future()
        self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Have ``function(*args)`` called; the future ends with it. Cancelling it changes nothing.

        Raises
        ------
        ClosedError
            After ``stop``.
        """
        if self._stopped:
            raise ClosedError(f"{self._name} has been stopped")
        future = asyncio.get_running_loop().create_future()
        self._calls.put((future, function, args))
        return future

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Its result. A call cannot be cancelled: a cancelled waiter still waits for its end."""
        future = self.call(function, *args)
        if await wait_out(future):
            raise asyncio.CancelledError
        return future.result()

    def stop(self) -> None:
        """End the thread after the calls that wait. Idempotent, does not wait."""
        if not self._stopped:
            self._stopped = True
            self._calls.put(None)

    async def stopped(self, seconds: float) -> bool:
        """Whether the thread has ended `seconds` after ``stop``, at the latest."""
        thread = self._thread
        if thread is None:
            return True
        assert self._ended is not None
        await asyncio.wait((self._ended,), timeout=seconds)
        if not self._ended.done():
            return False
        # It has said so with its last breath.
        thread.join()
        return True

    def _main(self) -> None:
        while (one := self._calls.get()) is not None:
            future, function, args = one
            try:
                result = function(*args)
            except BaseException as exc:  # noqa: BLE001 - handed to the one who waits
                _tell(future, future.set_exception, exc)
            else:
                _tell(future, future.set_result, result)
        assert self._ended is not None
        _tell(self._ended, self._ended.set_result, None)


def _tell(future: asyncio.Future[Any], setter: Callable[[Any], None], value: Any) -> None:
    def tell() -> None:
        if not future.done():
            setter(value)

    # Without a loop nobody waits any more.
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(tell)


async def wait_out(future: asyncio.Future[Any]) -> bool:
    """Wait for the end of `future` however often this task is cancelled; whether it was."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        future.exception()  # looked at, so that nobody warns of it
    return cancelled
