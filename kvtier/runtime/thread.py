# SPDX-License-Identifier: Apache-2.0
"""Carrier that runs the service in a thread of this process, on a loop of its own.

Owns the thread. Messages pass as objects: a deque in one direction, ``call_soon_threadsafe`` in the
other; this is the one place where the owner's thread and the loop meet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import uvloop

from kvtier.config import Config
from kvtier.errors import InternalError, TierLostError
from kvtier.runtime import messages as m
from kvtier.runtime.carrier import Carrier
from kvtier.runtime.memory import Memory
from kvtier.runtime.service import TierService

log = logging.getLogger(__name__)


class ThreadCarrier(Carrier):
    """Service in a thread.

    Parameters
    ----------
    config : Config
    namespace : dict of str
    memory : callable
        Makes the service's view of the region; called on its thread.
    new_loop : callable
        Event loop factory, uvloop unless told otherwise.
    replica : int
        Number of this instance among equally configured ones on this host.
    """

    def __init__(
        self,
        config: Config,
        namespace: dict[str, str],
        memory: Callable[[], Memory],
        new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
        *,
        replica: int = 0,
    ) -> None:
        self._replica = replica
        self._config = config
        self._namespace = namespace
        self._memory = memory
        self._new_loop = new_loop
        self._outbox: deque[m.ToOwner] = deque()
        self._came = threading.Event()
        self._wake: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: TierService | None = None
        self._thread: threading.Thread | None = None
        self._ended = False  # the service is through; its thread is about to end

    def start(self, timeout_seconds: float) -> list[m.ToOwner]:
        self._spawn()
        deadline = time.monotonic() + timeout_seconds
        messages: list[m.ToOwner] = []
        while not any(isinstance(message, m.Ready) for message in messages):
            came = self._came.wait(max(0.0, deadline - time.monotonic()))
            # Read before the messages: what the service said at last is among them.
            ended = self._ended
            messages += self.receive()
            if not came or (ended and not any(isinstance(one, m.Ready) for one in messages)):
                raise TierLostError(
                    "the tier service ended while it started"
                    if ended
                    else f"the tier service did not start within {timeout_seconds:g} seconds"
                )
        return messages

    def _spawn(self) -> None:
        self._ended = False
        self._thread = threading.Thread(target=self._main, name="kvtier-service", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=self._new_loop) as runner:
            self._loop = runner.get_loop()
            try:
                runner.run(self._serve())
            except Exception:
                log.exception("the tier service ended with an error")
            finally:
                # From here on a send says False instead of reaching a loop that no longer runs.
                self._service = None
                self._ended = True
                self._came.set()
                if self._wake is not None:
                    self._wake()

    async def _serve(self) -> None:
        service = TierService(
            self._config,
            self._namespace,
            self._memory(),
            self._deliver,
            in_scheduler_process=True,
            replica=self._replica,
        )
        service.owner_has_read = lambda: not self._outbox
        self._service = service
        await service.run()

    def _deliver(self, messages: list[m.ToOwner]) -> None:
        self._outbox.extend(messages)
        self._came.set()
        wake = self._wake
        if wake is not None:
            wake()

    def send(self, messages: Sequence[m.ToService]) -> bool:
        service, loop = self._service, self._loop
        if service is None or loop is None:
            return False
        try:
            loop.call_soon_threadsafe(self._hand_over, service, messages)
        except RuntimeError:
            # The loop closed between the check and the call.
            return False
        return True

    @staticmethod
    def _hand_over(service: TierService, messages: Sequence[m.ToService]) -> None:
        for message in messages:
            service.deliver(message)

    def receive(self) -> list[m.ToOwner]:
        self._came.clear()
        messages = []
        while self._outbox:
            messages.append(self._outbox.popleft())
        return messages

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def restart(self, namespace: dict[str, str]) -> None:
        if self.alive:
            raise InternalError("the service still runs")
        self._namespace = namespace
        self._spawn()

    def on_message(self, wake: Callable[[], None] | None) -> None:
        self._wake = wake

    def close(self, deadline: float) -> str:
        thread = self._thread
        if thread is None:
            return ""
        self.send([m.Close(deadline)])
        # Closing the tiers takes a little longer than draining them.
        thread.join(max(0.0, deadline - time.monotonic()) + 5.0)
        if thread.is_alive():
            return "the tier service did not end: a call into a tier hangs"
        self._thread = None
        errors = [message.error for message in self.receive() if isinstance(message, m.Closed)]
        return errors[-1] if errors else ""
