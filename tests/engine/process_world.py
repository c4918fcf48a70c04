# SPDX-License-Identifier: Apache-2.0
"""The world of the engine's model over a child process, which is killed, stopped and overloaded."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from kvtier.runtime.process import ProcessCarrier
from tests.engine.filed import FiledFaults
from tests.engine.world import LENGTH, PREFIXES, World


class ProcessWorld(World):
    """The same over a child process, which can be killed at any moment, and stopped.

    Parameters
    ----------
    folder : Path
        For the media of the tiers, which outlive the process, and their faults.
    chance : Random
        Decides when it is killed.
    """

    def __init__(self, folder: Path, chance: random.Random, **config: Any) -> None:
        self.folder = folder
        self._chance = chance
        self._killers: list[threading.Timer] = []
        self.kills = 0
        super().__init__(isolation="process", **config)

    def make_faults(self) -> Sequence[FiledFaults]:
        return [FiledFaults(self.folder, "first"), FiledFaults(self.folder, "second")]

    @property
    def carrier(self) -> ProcessCarrier:
        supervisor = self.engine._supervisor
        assert supervisor is not None
        assert isinstance(supervisor.carrier, ProcessCarrier)
        return supervisor.carrier

    def _signal(self, number: int) -> bool:
        # By its descriptor: the number of a process that was reaped may be another one's.
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.carrier._pidfd, number)
            return True
        return False

    def _kill(self) -> None:
        self.kills += self._signal(signal.SIGKILL)

    def crash(self) -> None:
        """Killed, now or at some moment soon: in the middle of a call of the owner, perhaps, or
        while it starts."""
        if self._chance.random() < 0.3:
            self._kill()
            return
        killer = threading.Timer(self._chance.random() * 0.05, self._kill)
        self._killers.append(killer)
        killer.start()

    def wait_ready(self) -> None:
        """Until a service that is just starting has its tiers open, if they can be opened."""
        end = time.monotonic() + 1.0
        while not any(tier.readable for tier in self.engine._tiers) and time.monotonic() < end:
            self.step()
            time.sleep(0.005)

    def stall(self) -> None:
        """Stopped for a while, while the owner goes on."""
        self._signal(signal.SIGSTOP)
        try:
            self._go_on()
        finally:
            self._signal(signal.SIGCONT)

    def overload(self) -> None:
        """Its socket takes nothing for a while."""
        with mock.patch.object(self.carrier, "send", return_value=False):
            self._go_on()

    def _go_on(self) -> None:
        chance = self._chance
        for _ in range(chance.randrange(20)):
            self.reserve(chance.randrange(PREFIXES), LENGTH)
            self.end_write(good=chance.random() < 0.9)
            self.ask(chance.randrange(PREFIXES), LENGTH)
            self.end_read(finish_first=chance.random() < 0.5)
            self.finish(chance.randrange(10))
            if chance.random() < 0.05:
                self.reset()
            self.step()
            self.check()

    def end_killers(self) -> None:
        """No process is killed from now on but by another `crash`."""
        for killer in self._killers:
            killer.join()
        self._killers.clear()

    def end_all(self) -> None:
        self.end_killers()
        super().end_all()

    def close(self) -> None:
        self.end_killers()
        super().close()
