# SPDX-License-Identifier: Apache-2.0
"""Sizes of the key table for a tree in which the slot extension is not built yet.

Imported by the tests of the region, which need only two numbers of that extension.
"""

import importlib.util
import sys
import types

if importlib.util.find_spec("kvtier._core.slots") is None:
    module = types.ModuleType("kvtier._core.slots")
    module.RECORD_BYTES = 64
    module.table_bytes = lambda num_slots: (-(-num_slots // 4) + 8) * 64
    sys.modules["kvtier._core.slots"] = module
