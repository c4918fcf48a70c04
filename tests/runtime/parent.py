# SPDX-License-Identifier: Apache-2.0
"""A model server that is going to be killed: ``python -m tests.runtime.parent FOLDER``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.engine.rig import keys, rig


def main() -> None:
    folder = sys.argv[1]
    tier = {
        "type": "GatedTier",
        "module_path": "tests.runtime.gated",
        "name": "gated",
        "folder": folder,
    }
    with rig(slots=8, tiers=[tier], isolation="process") as one:
        one.store(keys(1))
        one.settle()
        if Path(folder, "hang").exists():
            one.engine.lookup_batch(keys(7), one.context())
            one.engine.end_step()
        Path(folder, "parent.ready").write_text("x")
        time.sleep(3600)


if __name__ == "__main__":
    main()
