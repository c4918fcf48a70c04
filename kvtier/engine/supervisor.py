# SPDX-License-Identifier: Apache-2.0
"""The tier service's life as the engine sees it: started, lost, cleaned up after, started again.

Owner's thread; only the start of a new service runs on a thread of its own, because it takes
milliseconds. Owns the carrier. Invariant: no new service starts before the pins of the dead one
are back.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvtier.config import Config
from kvtier.engine.planner import Planner
from kvtier.engine.state import TierState
from kvtier.errors import ConfigError, InternalError, TierLostError
from kvtier.host.region import Region
from kvtier.obs.metrics import Recorder, Registry
from kvtier.runtime import messages as m
from kvtier.runtime.carrier import Carrier
from kvtier.runtime.memory import Memory
from kvtier.runtime.process import ProcessCarrier
from kvtier.runtime.thread import ThreadCarrier
from kvtier.tiers.registry import is_adapted

log = logging.getLogger(__name__)

START_SECONDS = 10.0
"""Process start and the tiers' self-tests; the latter have five seconds of it."""

RESTART_SECONDS = 0.5
MAX_RESTART_SECONDS = 30.0
ALIVE_SECONDS = 0.1
"""So often, at most, the system is asked whether the service lives."""
STABLE_SECONDS = 300.0
"""A service that lived this long starts again without a longer pause."""

POLL_WORK = 64
"""Work of one poll, in chunks, if no more than four times as much is waiting."""


def make_carrier(
    config: Config, namespace: dict[str, str], region: Region, replica: int = 0
) -> Carrier | None:
    """The carrier that the configuration asks for; None if there is nothing for a service to do."""
    if not config.tiers and config.verify_host == "off":
        return None
    adapted = [tier.name for tier in config.tiers if is_adapted(tier)]
    if config.isolation == "process" and adapted:
        # Their classes expect to live beside the scheduler.
        log.info("isolation: thread instead of process, because of %s", ", ".join(adapted))
    elif config.isolation == "process":
        return ProcessCarrier(config, namespace, region, log.getEffectiveLevel(), replica)
    return ThreadCarrier(config, namespace, lambda: Memory(region), replica=replica)


class Supervisor:
    """Keeps a tier service running.

    Parameters
    ----------
    carrier : Carrier
    planner : Planner
    registry : Registry
    recorder : Recorder
    take : callable
        Takes the service's messages.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self,
        carrier: Carrier,
        planner: Planner,
        registry: Registry,
        recorder: Recorder,
        take: Callable[[m.ToOwner], None],
        clock: Callable[[], float],
    ) -> None:
        self.carrier = carrier
        self.up = False
        """Whether there is a service to talk to."""
        self.restarts = 0
        """Deaths in a row."""
        self.restart_at: float | None = None
        self._planner = planner
        self._registry = registry
        self._recorder = recorder
        self._take = take
        self._clock = clock
        self._started_at = clock()
        self._alive_at = 0.0
        """Not asked whether the service lives before then."""
        self._restarter: threading.Thread | None = None
        self._wake: Callable[[], None] | None = None
        # Messages not handled yet, with their work, and the sum of that. What is here is bounded by
        # what the planner has under way: slots lent, bytes in flight.
        self._inbox: deque[tuple[int, m.ToOwner]] = deque()
        self._inbox_work = 0

    def on_message(self, wake: Callable[[], None] | None) -> None:
        """Have `wake` called, from any thread, when ``poll`` has something to take."""
        self._wake = wake
        self.carrier.on_message(wake)

    def open(self, tiers: Sequence[TierState]) -> None:
        """Start the service and wait for the tiers' self-tests.

        Raises
        ------
        ConfigError
            A tier says that something has to be changed; the service has been ended again.
        """
        try:
            messages = self.carrier.start(START_SECONDS)
        except TierLostError as exc:
            # The model server starts without its tiers rather than not at all.
            log.error("%s; going on with host memory, and trying again", exc)
            self.restart_at = self._clock() + RESTART_SECONDS
            return
        ready = [message for message in messages if isinstance(message, m.Ready)][-1]
        wrong = [
            f"tier {tier.name}: {cause}"
            for tier, cause, fatal in zip(tiers, ready.causes, ready.fatal, strict=True)
            if fatal
        ]
        if wrong:
            self.carrier.close(self._clock() + 1.0)
            raise ConfigError("; ".join(wrong))
        for tier, cause in zip(tiers, ready.causes, strict=True):
            if cause:
                log.warning("tier %s is down, and is tried again: %s", tier.name, cause)
        for message in messages:
            self._take(message)
        self.up = True
        self._recorder.set("kvtier_service_up", 1.0)

    def poll(self, now: float, namespace: dict[str, str]) -> None:
        """Take what the service says, or bring a dead one back, under this namespace.

        Answers come in bursts, and one that is long costs the step that takes it. So a poll handles
        a quarter of what is waiting, in order, or ``POLL_WORK`` if that is more: bursts are spread,
        while under steady load as much is handled as comes.
        """
        if not self.up:
            self._revive(now, namespace)
            return
        self._planner.listen(self._receive(), now)
        if self._inbox:
            self._handle(max(POLL_WORK, self._inbox_work // 4))
        if now >= self._alive_at:
            self._alive_at = now + ALIVE_SECONDS
            if not self.carrier.alive:
                self._lost(now)
                return
        if self._inbox and self._wake is not None:
            self._wake()

    def _receive(self) -> bool:
        """Whether there was anything."""
        messages = self.carrier.receive()
        for message in messages:
            work = m.work_of(message)
            self._inbox_work += work
            self._inbox.append((work, message))
        return bool(messages)

    def _handle(self, work: float) -> None:
        """Take messages until so much is done; always one, so that none waits for ever."""
        inbox = self._inbox
        while inbox and work > 0:
            one, message = inbox.popleft()
            self._inbox_work -= one
            work -= one
            self._take(message)

    def send(self, messages: Sequence[m.ToService]) -> None:
        """Hand messages to the service, or back to the planner."""
        if not self.up:
            self._planner.undeliverable(messages)
        elif not self.carrier.send(messages):
            self._recorder.add("kvtier_service_overload_total", 1)
            self._planner.undeliverable(messages)

    def _lost(self, now: float) -> None:
        # All of it: its jobs end now, and nothing may be said of them afterwards.
        self._receive()
        self._handle(math.inf)
        self.up = False
        if now - self._started_at > STABLE_SECONDS:
            self.restarts = 0
        # The exponent is bounded: 2**1024 is no float, and a night has that many restarts.
        pause = min(RESTART_SECONDS * 2 ** min(self.restarts, 30), MAX_RESTART_SECONDS)
        self.restarts += 1
        self.restart_at = now + pause
        log.error("the tier service has died; starting another in %.1f seconds", pause)
        self._registry.forget("service")
        self._recorder.set("kvtier_service_up", 0.0)
        self._planner.service_lost()

    def _revive(self, now: float, namespace: dict[str, str]) -> None:
        """A dead service: take its pins back, a part a step, then start a new one."""
        if self._restarter is not None:
            if self._restarter.is_alive():
                return
            self._restarter = None
            for message in self.carrier.receive():
                self._take(message)
            self.up = self.carrier.alive
            if self.up:
                self._started_at = now
                self._recorder.set("kvtier_service_up", 1.0)
            else:
                self.restart_at = now + MAX_RESTART_SECONDS
            return
        if not self._planner.clear_pins() or self.restart_at is None:
            return
        if now < self.restart_at:
            return
        self.restart_at = None
        self._recorder.add("kvtier_service_restarts_total", 1)
        self._restarter = threading.Thread(
            target=self._restart, args=(namespace,), name="kvtier-restart"
        )
        try:
            self._restarter.start()
        except RuntimeError as exc:  # no more threads; later perhaps
            log.error("the tier service cannot be started again now: %s", exc)
            self._restarter = None
            self.restart_at = now + MAX_RESTART_SECONDS

    def _restart(self, namespace: dict[str, str]) -> None:
        try:
            self.carrier.restart(namespace)
        except (OSError, InternalError):
            log.exception("the tier service could not be started again")

    def close(self, deadline: float) -> str:
        """End the service: what it met, or an empty string."""
        if self._restarter is not None:
            self._restarter.join()
        return self.carrier.close(deadline)
