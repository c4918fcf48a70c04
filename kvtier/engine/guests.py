# SPDX-License-Identifier: Apache-2.0
"""Host memory lent to peers: free slots that a tier may fill with chunks of other instances.

Part of the planner, on the owner's thread. Owns the slots lent so, until they come back.
Invariants: only what is free is lent, and nothing while less than `KEEP` of all slots would stay
free; when that becomes scarce, it is asked back, before this instance's own chunks have to go for
want of it.
"""

from __future__ import annotations

from kvtier.engine.state import State
from kvtier.engine.transfers import Lent
from kvtier.runtime import messages as m

KEEP = 0.25
"""Part of all slots that stays free when slots are lent."""
SCARCE = 0.125
"""When less is free, slots are asked back."""
PORTION = 1 / 16
"""Of all slots, lent at a time; no fewer are asked back."""


class Guests:
    """Lends free slots to the tiers that host chunks of others.

    Parameters
    ----------
    state : State
    """

    def __init__(self, state: State) -> None:
        self.lent = Lent()
        """Slots that peers may fill."""
        self._state = state
        self._index = state.index
        self._before: list[Lent] = []  # from before resets, still to come back
        self._asked_back = 0
        # One tier hosts; chunks of several sizes would each need slots of their own kind.
        hosting = [i for i, tier in enumerate(state.tiers) if tier.hosts > 0.0]
        uniform = len(set(state.geometry.widths)) == 1
        self._tier = hosting[0] if hosting and uniform else None
        self._most = 0.0 if self._tier is None else state.tiers[self._tier].hosts

    @property
    def slots(self) -> int:
        """With the service, those from before a reset included."""
        return len(self.lent) + sum(map(len, self._before))

    def flush(self) -> None:
        """End of a step: lend what is free, or ask back what is needed."""
        if self._tier is None:
            return
        available = self._index.available
        free = self._index.free_for(0)
        portion = max(1, int(PORTION * available))
        if free > KEEP * available + portion:
            room = int(self._most * available) - self.slots + self._asked_back
            n = min(portion, room)
            if n > 0 and self._state.tiers[self._tier].readable:
                slots, generations = self._index.lend(n, 0)
                self.lent.add(slots.tobytes(), generations.tobytes())
                self._state.out.append(m.Host(self._tier, slots.tobytes(), generations.tobytes()))
        elif free < SCARCE * available and self._asked_back < self.slots:
            # All that is missing: a burst may go on in the next step.
            n = min(max(portion, int(KEEP * available) - free), self.slots - self._asked_back)
            self._asked_back += n
            self._state.out.append(m.Reclaim(self._tier, n))

    def take(self, message: m.Left) -> None:
        """Slots that have come back."""
        left = m.numbers(message.slots).tolist()
        self._asked_back = max(0, self._asked_back - len(left))
        for before in self._before:
            old = set(before)
            back = m.packed([slot for slot in left if slot in old])
            self._index.release(m.numbers(back), before.take(back))
            left = [slot for slot in left if slot not in old]
        self._before = [before for before in self._before if len(before)]
        back = m.packed(left)
        self._index.give_back(m.numbers(back), self.lent.take(back))

    def undeliverable(self, message: m.Host | m.Reclaim) -> None:
        """The service did not take it."""
        if isinstance(message, m.Host):
            self.take(m.Left(message.slots))
        else:
            self._asked_back -= message.count

    def service_lost(self) -> None:
        """The service has ended and touches nothing any more."""
        for lent in (*self._before, self.lent):
            if len(lent):
                self.take(m.Left(m.packed(list(lent))))
        self._asked_back = 0

    def reset(self) -> None:
        """Everything is forgotten. A service that goes on with another namespace gives these back
        before; one that keeps its own goes on with them, and gives them back when asked."""
        if len(self.lent):
            self._before.append(self.lent)
        self.lent = Lent()
