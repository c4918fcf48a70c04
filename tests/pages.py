# SPDX-License-Identifier: Apache-2.0
"""Pages that are made from tables in the code; ``python -m tests.pages`` writes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier.obs.metrics import METRICS, MetricDef
from kvtier.tiers.fs.metrics import METRICS as FS_METRICS
from kvtier.tiers.obj.metrics import METRICS as OBJ_METRICS
from kvtier.tiers.p2p.metrics import METRICS as P2P_METRICS
from kvtier.types import Outcome

ROOT = Path(__file__).resolve().parent.parent
METRICS_PAGE = ROOT / "docs" / "metrics.md"

_OUTCOMES = {
    Outcome.DONE: "the chunk is where it should be",
    Outcome.EXISTS: "the tier had it already",
    Outcome.MISSING: "the tier does not have it: a miss",
    Outcome.DROPPED: "not tried: open breaker, or a tier that is paused or has no room",
    Outcome.CANCELLED: "its request or the service ended first",
    Outcome.TIMEOUT: "no end by its deadline",
    Outcome.CORRUPT: "bytes or metadata differ from what was stored",
    Outcome.FULL: "no space: ENOSPC, EDQUOT, or a capacity without a victim",
    Outcome.READ_ONLY: "EROFS",
    Outcome.DENIED: "EACCES, EPERM, 403",
    Outcome.NO_HANDLES: "EMFILE, ENFILE",
    Outcome.STALE: "ESTALE",
    Outcome.IO: "EIO, and every other error of the medium",
    Outcome.LOST: "the tier, its peer or the service is gone",
    Outcome.INTERNAL: "a bug, in kvtier or in an out-of-tree tier",
}

_HEAD = """\
# Metrics

kvtier serves these at its own port (`metrics.port`, page `/metrics`), in Prometheus' text format;
`/healthz` beside it has one line for all and one JSON object a tier. Inside vLLM
they are at vLLM's own `/metrics` as well. Values are in base units: seconds,
bytes, ratios from 0 to 1. The tier `host` is host memory. A gauge that nobody has set yet is
absent, not 0. Made from the tables in the code by `python -m tests.pages`.

Useful questions:

- Share of chunks that only a slower tier had:
  `sum by (tier) (rate(kvtier_lookup_chunks_total{result="hit"}[5m]))`
- Is anything failing:
  `rate(kvtier_chunks_total{outcome!~"done|exists|missing|dropped|cancelled"}[5m]) > 0`
- Is a tier away: `kvtier_tier_up == 0`, and why an object store fails:
  `sum by (tier, cause) (rate(kvtier_obj_errors_total{cause!~"missing|exists"}[5m]))`
- Is host memory too small: `rate(kvtier_evicted_unsaved_total[5m]) > 0`
- 99th percentile of a load:
  `histogram_quantile(0.99, rate(kvtier_transfer_seconds_bucket{direction="load"}[5m]))`
"""


def _table(definitions: Sequence[MetricDef]) -> list[str]:
    lines = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for definition in definitions:
        labels = ", ".join(definition.labels)
        lines.append(f"| `{definition.name}` | {definition.kind} | {labels} | {definition.help} |")
    return lines


def metrics_page() -> str:
    """``docs/metrics.md``."""
    lines = [_HEAD, *_table(METRICS)]
    lines += ["", "## File tier", "", *_table(FS_METRICS)]
    lines += ["", "## Object tier", "", *_table(OBJ_METRICS)]
    lines += ["", "## Peer tier", "", *_table(P2P_METRICS)]
    lines += ["", "## Outcomes", "", "Values of the label `outcome`.", ""]
    lines += ["| outcome | meaning | failure |", "| --- | --- | --- |"]
    for outcome in Outcome:
        failure = "yes" if outcome.failed else "no"
        lines.append(f"| `{outcome.name.lower()}` | {_OUTCOMES[outcome]} | {failure} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    METRICS_PAGE.write_text(metrics_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
