# SPDX-License-Identifier: Apache-2.0
"""Faults that systems of this kind have met in the field, and the tests that show they are met.

``python -m tests.faults`` writes ``docs/faults.md`` from this table and from the marks
``@pytest.mark.fault("C26")`` of the tests, which it reads without importing them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "faults.md"

AREAS: Mapping[str, str] = {
    "C": "Correctness: wrong KV, hence wrong tokens",
    "H": "Hangs, deadlocks, livelocks",
    "L": "Leaks: pins, slots, descriptors, memory",
    "K": "Crash safety and persistence",
    "E": "Capacity and eviction",
    "F": "Permissions and filesystems",
    "O": "Object stores",
    "P": "Peers",
    "U": "Configuration and use",
    "M": "Metrics and events",
    "Y": "Hybrid models",
    "R": "Parallelism",
    "V": "Speed",
}

FAULTS: Mapping[str, str] = {
    "C01": "a chunk counts as ready before its copy from the device has ended",
    "C02": "output differs between runs at high concurrency",
    "C04": "a layout is guessed from its shape and read wrongly",
    "C05": "runs with different layouts of equal size share a directory",
    "C06": "the word auto goes into the identity, so two dtypes share",
    "C07": "two revisions of a model share",
    "C09": "bytes of another parallel size are read as if they were portable",
    "C10": "two checkpoints under one served name share",
    "C11": "a backend's own keys leave out a field of the identity",
    "C13": "two adapters share the KV of equal tokens",
    "C15": "a failed load is reported as finished",
    "C17": "a slot is freed twice and gets two owners",
    "C18": "a slot is evicted while a copy into it still runs",
    "C20": "a partial key finds a whole chunk of another prompt",
    "C22": "a store reads device blocks that were given away by a preemption",
    "C23": "a transfer from before a reset writes into a slot that is in use again",
    "C24": "a tier still serves what a cache reset should have hidden",
    "C26": "wrong bytes of the right length are used",
    "C27": "a reused descriptor crosses the connections of two servers",
    "C29": "a chunk is listed though its write failed",
    "H02": "a key that stays pending defers its requests for ever",
    "H03": "a silent peer is waited for without a deadline",
    "H05": "loads and a large request starve each other",
    "H07": "an early return keeps a lock",
    "H08": "a native call blocks with the GIL held",
    "H10": "ranks take different decisions from local state",
    "H11": "ranks make a collective call with different arguments",
    "H12": "a slow start of a worker runs into a timeout",
    "H13": "a load through two tiers waits for slots for ever",
    "H14": "a request to the store never returns",
    "H15": "closing an endpoint waits for a thread that waits for the GIL",
    "H16": "a readiness callback comes again before its task has ended",
    "H17": "the process does not end because of unsent messages",
    "H20": "sockets or loops are used after a fork",
    "H21": "a fork by foreign code hangs in the child",
    "H23": "a key whose writer died can never be written again",
    "H24": "ranks on another host wait for shared memory that is not theirs",
    "H25": "an idle engine waits for its tiers before it takes a new request",
    "H27": "stalled calls of one tier hold up the others",
    "L01": "the region's file survives a kill and the next start does not fit",
    "L03": "shared memory is left after other signals than an interrupt",
    "L04": "mappings of engines that died pile up",
    "L06": "accounting drifts until nothing hits",
    "L07": "a path forgets to give its pin back",
    "L09": "an aborted load is cleaned up under another name",
    "L10": "small views keep large buffers alive",
    "L13": "blocks wait for a report that never comes",
    "L14": "a peer that vanished keeps its pins",
    "L15": "a session a call makes memory grow",
    "L16": "a body that was not read keeps its connection",
    "L17": "timers keep messages alive",
    "L19": "a descriptor is closed twice",
    "L20": "blocks parked for a peer expire too soon or never",
    "K02": "after a restart the usage on disk counts as zero",
    "K03": "what is on disk is not found after a restart",
    "K04": "the scan at start grows with the number of files",
    "K07": "memory of an owner that restarted is touched",
    "K08": "a restart of the cache side needs a restart of the engine",
    "K09": "an abort or a preemption at the wrong moment trips an assertion",
    "K10": "a refused store ends in an index error",
    "K12": "ranks disagree about the length of a hit",
    "K13": "a second writer of a key trips a check",
    "E01": "a region larger than the free memory ends in SIGBUS",
    "E03": "shared memory counts against the limit of the container",
    "E04": "waiting requests evict each other's promotions",
    "E06": "ghost lists are not bounded by the capacity",
    "E09": "a new chunk is the first victim",
    "E10": "a limit counts for each process instead of the directory",
    "E12": "the free space reported is not the quota",
    "E13": "an unlimited tier fills its disk",
    "E15": "a rank has fewer slots than the scheduler believes",
    "E16": "one large registration fails and its error shows elsewhere",
    "E17": "blocks evicted in the middle are never stored again",
    "E18": "eviction walks over pinned chunks",
    "F02": "direct I/O with odd addresses or lengths is refused",
    "F03": "the filesystem cannot preallocate",
    "F04": "every store fails and nobody is told why",
    "F07": "the path of a socket is too long",
    "F09": "a mapped cache file is truncated",
    "F10": "a fixed path belongs to another user",
    "F11": "extended attributes are not available",
    "F12": "the sweeper ends because the directory is not there yet",
    "F14": "the directory becomes read-only or vanishes",
    "F15": "a young file reads as empty",
    "O01": "the store is asked in a style of address it does not have",
    "O03": "checksum headers come back through a helper layer",
    "O06": "retries answer an overload with a storm",
    "O07": "waiting for a connection counts as a timeout",
    "O09": "a cached presence outlives the object",
    "O10": "errors in callbacks vanish and a failed put counts as done",
    "O11": "a wrong first connection ends the engine later",
    "O12": "temporary credentials are renewed late, or by everybody at once",
    "O13": "an error without a body has no code",
    "O15": "cleaning up after a failed registration crashes",
    "O17": "thousands of presence requests keep a request waiting",
    "O18": "a skewed clock looks like a miss",
    "P02": "a peer that restarted is used through its old session",
    "P03": "every rank finds out on its own that a host is gone",
    "P04": "an address that everybody has serves as identity",
    "P06": "keys that are being written are dropped from what was promised",
    "P07": "the size of a row depends on the parallel size",
    "P09": "different versions of the transport crash at connecting",
    "P10": "an IPv6 address is cut at the wrong colon",
    "P11": "the advertised address cannot be reached",
    "P12": "the transport picks a bridge or the loopback",
    "P14": "an open socket takes pickles",
    "P17": "a busy peer counts as dead",
    "P18": "the names of transfer parameters differ",
    "P19": "a dead registration blocks the new one",
    "P21": "an idle link is cut in silence",
    "P22": "chunks leave with their owner",
    "U01": "keys differ between processes because hashes are seeded at random",
    "U02": "a misspelt or impossible option is ignored",
    "U03": "a budget below one chunk",
    "U04": "the log says direct I/O, the page cache is used",
    "U05": "the identity depends on the process that computes it",
    "U06": "a subclass does not match the interface installed",
    "U07": "the capacity is shown as zero",
    "U08": "a tier is dead while the server looks healthy",
    "U09": "a broken tier is noticed at its first use",
    "M02": "the hit rate is counted where it is always one",
    "M03": "counters of an idle engine grow",
    "M04": "metrics are missing with several processes, or survive them",
    "M06": "queries are counted twice",
    "M07": "events name what cannot be fetched alone",
    "M08": "consumers drop events that lack fields",
    "M10": "a removal does not say from which tier",
    "M11": "replayed messages have other frames than live ones",
    "M13": "data-parallel ranks publish on one port",
    "M14": "an eviction or a reset emits nothing",
    "Y02": "store and lookup disagree about windows",
    "Y04": "a hit without its recurrent state",
    "Y05": "a failed load in one of several groups",
    "Y06": "block sizes of groups that do not divide each other",
    "Y08": "groups are evicted unevenly",
    "R02": "endpoint names repeat across pipeline stages",
    "R03": "ranks truncate each other's files",
    "R04": "context-parallel ranks race for one key",
    "R07": "a rank without work in a step",
    "R08": "a slot is chosen by device number",
    "R09": "only the leader's node gets the promoted bytes",
    "R10": "one port for all data-parallel ranks",
    "R11": "replicated rows that are not equal",
    "V02": "I/O threads fight the scheduler for the GIL",
    "V04": "what the device already has is read again",
    "V05": "loading is slower than computing when the host is full",
    "V06": "pinning memory delays the start",
    "V08": "all pages of the region lie on one NUMA node",
}
"""Fault to what was seen."""

REASONS: Mapping[str, str] = {
    "L17": "No socket has a receive timeout, and a message has a megabyte at most.",
    "F11": "No extended attributes are used: checksums stand in the files.",
    "L19": "Pipes are not given to an event loop.",
}
"""Why a fault cannot happen, where the code that it needs does not exist."""


def marks(source: str) -> Iterator[tuple[str, str]]:
    """(fault, test) of each mark in the source of a test module; '' where it is the whole module.

    Raises
    ------
    ValueError
        If a mark is not given its faults as literal text.
    """
    tree = ast.parse(source)
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, name = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name if not name else f"{name}.{node.name}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.fault"):
            for argument in node.args:
                if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                    raise ValueError(f"line {node.lineno}: a fault is named by a literal")
                yield argument.value, name
        stack.extend((child, name) for child in ast.iter_child_nodes(node))


def collect(folder: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Fault to the tests that show it, as ``file::test``.

    Raises
    ------
    ValueError
        If a mark names a fault that is not in the table.
    """
    found: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        where = path.relative_to(folder.parent).as_posix()
        for fault, test in marks(path.read_text()):
            if fault not in FAULTS:
                raise ValueError(f"{where}: {fault} is not in the table of tests/faults.py")
            found.setdefault(fault, set()).add(f"{where}::{test}" if test else where)
    return {fault: sorted(tests) for fault, tests in found.items()}


def render(found: Mapping[str, list[str]]) -> str:
    """The page."""
    lines = [
        "# Faults met in the field",
        "",
        "What went wrong in systems of this kind, and the tests that show how kvtier behaves.",
        "`pytest --fault C26` runs those of one fault. Made by `python -m tests.faults`.",
    ]
    for letter, title in AREAS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| fault | what was seen | shown by |",
            "| --- | --- | --- |",
        ]
        for fault, text in FAULTS.items():
            if fault[0] != letter:
                continue
            shown = [f"`{test}`" for test in found.get(fault, [])]
            if fault in REASONS:
                shown.append(REASONS[fault])
            lines.append(f"| {fault} | {text} | {'<br>'.join(shown) or 'not yet'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    found = collect()
    PAGE.write_text(render(found))
    missing = [fault for fault in FAULTS if fault not in found and fault not in REASONS]
    print(f"{PAGE}: {len(FAULTS) - len(missing)} of {len(FAULTS)} faults; not yet: {missing}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
