# SPDX-License-Identifier: Apache-2.0
"""What the engine knows of the way to its service: send, receive, alive, close."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

from kvtier.runtime.messages import ToOwner, ToService


class Carrier(abc.ABC):
    """Carries messages between owner and service. Called by the owner's thread; never blocks."""

    @abc.abstractmethod
    def start(self, timeout_seconds: float) -> list[ToOwner]:
        """Start the service and wait for its ``Ready``, which is the last message returned.

        Raises
        ------
        TierLostError
            If it does not come in time.
        """

    @abc.abstractmethod
    def send(self, messages: Sequence[ToService]) -> bool:
        """Hand messages over; False, and none of them is delivered, if the service does not take
        any more. To a dead one they are lost; `alive` tells."""

    @abc.abstractmethod
    def receive(self) -> list[ToOwner]:
        """Messages that have come since the last call."""

    @property
    @abc.abstractmethod
    def alive(self) -> bool:
        """False once the service has ended and touches nothing any more."""

    @abc.abstractmethod
    def restart(self, namespace: dict[str, str]) -> None:
        """Start a new service in place of a dead one; its ``Ready`` comes with ``receive``."""

    @abc.abstractmethod
    def on_message(self, wake: Callable[[], None] | None) -> None:
        """Have `wake` called, from any thread, when something has come in."""

    @abc.abstractmethod
    def close(self, deadline: float) -> str:
        """Ask the service to drain, wait until `deadline`, then end it: what it met, or ""."""
