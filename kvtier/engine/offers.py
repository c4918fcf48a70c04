# SPDX-License-Identifier: Apache-2.0
"""How often chunks have been offered for storage.

Owner's thread. Owns the counts; bounded. The rule is that of vLLM's ``CPUOffloadingManager``
(``_record_accesses``), so that equal settings store equal chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Offers:
    """Counts of the chunks offered last.

    Parameters
    ----------
    most : int
        Chunks that are counted. An offer makes room for its new ones among those that it does not
        name; of what finds no room it is not known that it was offered.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: OrderedDict[bytes, int] = OrderedDict()  # the one offered longest ago first

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, keys: Sequence[bytes]) -> None:
        """These are offered, together."""
        counts = self._counts
        known = {key for key in keys if key in counts}
        for key in keys:
            if key in known:
                counts[key] += 1
                counts.move_to_end(key)
        others = len(counts) - len(known)
        for key in keys:
            if key in counts:
                continue
            if len(counts) >= self._most:
                if not others:
                    break
                counts.popitem(last=False)
                others -= 1
            counts[key] = 1

    def count(self, key: bytes) -> int:
        """Offers of a chunk, this one included; 0 if it is not counted."""
        return self._counts.get(key, 0)
