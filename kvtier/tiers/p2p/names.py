# SPDX-License-Identifier: Apache-2.0
"""Addresses of hosts' names, looked up in threads of their own.

A name server that does not answer holds a look-up for half a minute. In ZeroMQ's thread that would
stop the sessions with all peers, in the loop's own threads it would keep the tier from closing.
Nobody waits for a thread here. Invariant: one look-up of a name at a time, `MAX_NAMES` in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket as sockets
import threading

MAX_NAMES = 64
"""Looked up at the same time."""


class Names:
    """Look-ups under way. Belongs to one loop."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[list[str]]] = {}

    async def find(self, host: str) -> list[str]:
        """The addresses of `host`, the one to try first at the beginning.

        Raises
        ------
        OSError
            It is unknown.
        """
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host.partition("%")[0])
            return [host]
        future = self._asked.get(host)
        if future is None:
            if len(self._asked) >= MAX_NAMES:
                raise OSError(f"host {host!r}: {MAX_NAMES} other names are being looked up")
            loop = asyncio.get_running_loop()
            future = self._asked[host] = loop.create_future()
            threading.Thread(
                target=self._look, args=(loop, host), name="kvtier-name", daemon=True
            ).start()
        # Whoever gives up does not end it for the others.
        return await asyncio.shield(future)

    def _look(self, loop: asyncio.AbstractEventLoop, host: str) -> None:
        found: list[str] | OSError
        try:
            infos = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
            found = list(dict.fromkeys(str(info[4][0]) for info in infos))
        except OSError as exc:
            found = OSError(f"host {host!r} is unknown: {exc.strerror}")
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(self._found, host, found)

    def _found(self, host: str, found: list[str] | OSError) -> None:
        future = self._asked.pop(host)
        if isinstance(found, OSError):
            future.set_exception(found)
            future.exception()  # all who asked may have given up
        else:
            future.set_result(found)
