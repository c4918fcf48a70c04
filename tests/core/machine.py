# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for the index and its twin whatever the sizes of the chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvtier._core._pure import READY, WRITING, Chunk


def machine(one_key: st.SearchStrategy[bytes], some: st.SearchStrategy[list[bytes]]) -> Any:
    """Base of a state machine over these keys.

    A subclass sets `table`, `index`, `pure`, `pinned` and `serviced`, and defines ``reap``.
    """

    class Machine(RuleBasedStateMachine):
        table: Any
        index: Any
        pure: Any
        pinned: list[tuple[Chunk, int, int]]
        serviced: list[tuple[Chunk, int, int]]
        reap: Any

        def chunk(self, one: bytes) -> Chunk:
            chunk = self.pure.get(one)
            assert chunk is not None
            return chunk

        @rule(wanted=some)
        def commit(self, wanted: list[bytes]) -> None:
            assert self.index.commit(wanted) == self.pure.commit(wanted)

        @rule(wanted=some)
        def abort(self, wanted: list[bytes]) -> None:
            assert self.index.abort(wanted) == len(self.pure.remove(wanted, WRITING))

        @rule(wanted=some)
        def drop(self, wanted: list[bytes]) -> None:
            assert self.index.drop(wanted) == self.pure.remove(wanted, READY)

        @rule(wanted=some)
        def touch(self, wanted: list[bytes]) -> None:
            self.index.touch(wanted)
            self.pure.touch(wanted)

        @precondition(lambda self: self.pinned)
        @rule(data=st.data())
        def unpin(self, data: st.DataObject) -> None:
            number = data.draw(st.integers(0, len(self.pinned) - 1))
            chunk, slot, generation = self.pinned.pop(number)
            chunk.owner -= 1
            self.index.unpin(np.array([slot]), np.array([generation], np.uint32))

        @rule(one=one_key)
        def service_pin(self, one: bytes) -> None:
            found = self.table.find_and_pin_service(one)
            assert (found is not None) == (self.pure.lookup(one) == READY)
            if found:
                self.chunk(one).service += 1
                self.serviced.append((self.chunk(one), *found))

        @precondition(lambda self: self.serviced)
        @rule(data=st.data())
        def service_unpin(self, data: st.DataObject) -> None:
            number = data.draw(st.integers(0, len(self.serviced) - 1))
            chunk, slot, generation = self.serviced.pop(number)
            chunk.service -= 1
            self.table.unpin_service(slot, generation)
            self.reap()

    return Machine
