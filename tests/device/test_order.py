# SPDX-License-Identifier: Apache-2.0
"""What must come after what, over the fake device; and that every single wait is needed.

A scenario is a test of its own, and all of them together judge in ``test_every_wait_counts``, which
takes one wait at a time out of the code and expects one of them to fail.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

from kvtier.device import jobs, streams
from kvtier.errors import ClosedError
from tests.device.rig import Rig, ints, make_rig, slow_pool

pytestmark = pytest.mark.needs("torch")

Make = Callable[..., contextlib.AbstractContextManager[Rig]]


def make(*args: Any, **settings: Any) -> contextlib.AbstractContextManager[Rig]:
    return make_rig("fake", *args, **settings)


# Direct, through the host's buffer for want of pinned slots, and because the rank has a part only.
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("halves", {}),
    ("halves", {"register_limit": 0}),
    ("part of the heads", {}),
)


def a_store_follows_the_model(make: Make) -> None:
    for name, settings in WAYS:
        with make(name, **settings) as rig:
            rig.model_writes(0, [1, 2], 77)
            rig.finish(rig.store((0, [0, 1], [1, 2])))
            assert rig.slot(0) == rig.expected(0, 0, [1])
            assert set(rig.local(0, 1)[0]) == {77}
            rig.model_ends()


def a_load_follows_the_model(make: Make) -> None:
    for name, settings in WAYS:
        with make(name, **settings) as rig:
            rig.finish(rig.store((0, [0], [1])))
            old = [tensor[[20]].clone() for tensor in rig.tensors[0]]
            seen = rig.model_reads(0, [20])
            rig.finish(rig.load((0, [0], [20])))
            rig.model_ends()
            assert all(one.equal(other) for one, other in zip(old, seen, strict=True))
            assert rig.local(0, 20) == rig.local(0, 1)


def a_batch_of_many_pieces(make: Make) -> None:
    for name, settings in WAYS:
        with make(name, staging_bytes=1, **settings) as rig:
            slots, blocks, back = range(10), range(1, 11), range(21, 31)
            wanted = [rig.expected(0, slot, [slot + 1]) for slot in slots]
            rig.finish(rig.store((0, slots, blocks)))
            assert [rig.slot(slot) for slot in slots] == wanted
            slow_pool(rig)
            rig.finish(rig.load((0, slots, back)))
            for old, new in zip(blocks, back, strict=True):
                assert rig.local(0, new) == rig.local(0, old)


def nothing_is_published_before_its_copies_have_ended(make: Make) -> None:
    for name, settings in WAYS:
        with make(name, staging_bytes=1, **settings) as rig:
            publish_late(rig)


def publish_late(rig: Rig) -> None:
    wanted = {slot: rig.expected(0, slot, [slot + 1]) for slot in range(3)}
    found = []
    rig.on_publish = lambda number: found.append({s: rig.slot(s) for s in wanted} == wanted)
    rig.device.gate.clear()
    job = rig.store((0, [0, 1, 2], [1, 2, 3]))
    assert rig.device.waiting.wait(5)
    assert rig.jobs.take_finished() == []
    assert rig.region.finished(rig.layout.rank) == -1
    rig.device.gate.set()
    rig.finish(job)
    assert found == [True, True, True]
    rig.on_publish = lambda number: found.append(rig.local(0, 20) == rig.local(0, 1))
    rig.finish(rig.load((0, [0, 1, 2], [20, 21, 22])))
    assert found == [True] * 4


def blocks_are_given_away_after_a_wait(make: Make) -> None:
    """Preemption, abort: vLLM waits for the job, and the next step writes its blocks."""
    for name, settings in WAYS:
        with make(name, staging_bytes=1, **settings) as rig:
            wanted = [rig.expected(0, slot, [slot + 1]) for slot in range(3)]
            rig.device.delay_seconds = 0.01
            job = rig.store((0, [0, 1, 2], [1, 2, 3]))
            rig.wait(job)
            rig.model_writes(0, [1, 2, 3], 99)
            rig.model_ends()
            assert [rig.slot(slot) for slot in range(3)] == wanted
            job = rig.load((0, [0, 1, 2], [20, 21, 22]))
            rig.wait(job)
            rig.model_writes(0, [20, 21, 22], 98)
            rig.model_ends()
            assert set(rig.local(0, 22)[0]) == {98}
            rig.jobs.take_finished()


def a_failed_batch_ends_after_what_was_launched(make: Make) -> None:
    for name, settings in WAYS:
        with make(name, staging_bytes=1, **settings) as rig:
            wanted = rig.expected(0, 0, [1])
            found: list[None] = []

            def note(number: int, rig: Rig = rig, found: list[None] = found) -> None:
                found.append(rig.device.check())

            rig.on_publish = note
            # Two copies a piece: that of the block ids, and that of the bytes.
            rig.device.fail_copies = {3}
            job = rig.store((0, [0, 1, 2], [1, 2, 3]))
            rig.wait(job)
            (ended,) = rig.jobs.take_finished()
            assert "copy 3 was refused" in str(ended.error)
            assert rig.published == {0: False, 1: False, 2: False}
            assert found == [None] * 3
            rig.finish(rig.store((0, [0], [1])))
            assert rig.slot(0) == wanted
            rig.device.fail_copies = {rig.device.copies + 3}
            job = rig.load((0, [0, 0, 0], [20, 21, 22]))
            rig.wait(job)
            (ended,) = rig.jobs.take_finished()
            assert "was refused" in str(ended.error)


def shutdown_carries_out_what_was_submitted(make: Make) -> None:
    for name, settings in WAYS:
        with make(name, staging_bytes=1, **settings) as rig:
            wanted = [rig.expected(0, slot, [slot + 1]) for slot in range(3)]
            old = rig.local(0, 1)
            rig.finish(rig.store((0, [5], [1])))
            rig.device.gate.clear()
            rig.device.waiting.clear()
            rig.store((0, [0, 1, 2], [1, 2, 3]))
            rig.load((0, [5, 5], [20, 21]))
            assert rig.device.waiting.wait(10)
            timer = threading.Timer(0.05, rig.device.gate.set)
            timer.start()
            rig.jobs.close()
            timer.join()
            rig.device.check()
            assert [rig.slot(slot) for slot in range(3)] == wanted
            assert rig.local(0, 21) == old
            assert len(rig.jobs.take_finished()) == 2
            with pytest.raises(ClosedError):
                rig.engine.load(0, ints([]), ints([]).astype("uint64"))


def test_copies_end_out_of_order() -> None:
    for name, settings in WAYS:
        with make(name, **settings) as rig:
            rig.finish(rig.store((0, [5], [6])))
            rank = rig.layout.rank
            gate = rig.device.gates[rig.engine._stores._stream.number] = threading.Event()
            wanted = rig.expected(0, 0, [1])
            late = rig.store((0, [0], [1]))
            early = rig.load((0, [5], [20]))
            rig.finish(early)
            assert rig.local(0, 20) == rig.local(0, 6)
            # The rank's line is a water mark: the store has the lower number.
            assert rig.region.finished(rank) == 0
            gate.set()
            rig.finish(late)
            assert rig.region.finished(rank) == 2
            assert rig.slot(0) == wanted


SCENARIOS = (
    a_store_follows_the_model,
    a_load_follows_the_model,
    a_batch_of_many_pieces,
    nothing_is_published_before_its_copies_have_ended,
    blocks_are_given_away_after_a_wait,
    a_failed_batch_ends_after_what_was_launched,
    shutdown_carries_out_what_was_submitted,
)


@pytest.mark.fault("C01", "C22")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_order(scenario: Callable[[Make], None]) -> None:
    scenario(make)


WAITS = (
    *("wait_event", "record", "synchronize", "on"),  # of the device
    *("_land", "_settle", "join", "result", "wait_for"),
)


class Remover(ast.NodeTransformer):
    """Takes the wait number `index` out of a module, and counts them all."""

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.found: list[str] = []

    def _is_it(self, call: ast.AST) -> bool:
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            return False
        if call.func.attr not in WAITS:
            return False
        self.found.append(ast.unparse(call))
        return len(self.found) - 1 == self.index

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not self._is_it(node.value):
            return node
        call: Any = node.value
        # The work itself stays, only nobody waits for it.
        kept = call.func.value if call.func.attr == "result" else ast.Constant(None)
        return ast.copy_location(ast.Expr(kept), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if "_land" not in ast.unparse(node.value) or not self._is_it(node.value):
            return node
        call: Any = node.value
        return ast.copy_location(ast.Expr(call.args[0].value), node)

    def visit_With(self, node: ast.With) -> Any:
        removed = self._is_it(node.items[0].context_expr)
        self.generic_visit(node)
        return node.body if removed else node


def without(module: ModuleType, index: int | None) -> tuple[ModuleType, list[str]]:
    """A copy of `module` that lacks one wait, and all waits that it has."""
    remover = Remover(index)
    tree = ast.fix_missing_locations(remover.visit(ast.parse(inspect.getsource(module))))
    made = ModuleType(module.__name__)
    made.__file__ = module.__file__
    exec(compile(tree, f"{module.__file__}#{index}", "exec"), made.__dict__)
    return made, remover.found


MUTANTS = [
    pytest.param(module, index, id=f"{module.__name__.split('.')[-1]}-{index}-{label}")
    for module in (streams, jobs)
    for index, label in enumerate(without(module, None)[1])
]


def test_the_waits_are_found() -> None:
    found = sorted(without(streams, None)[1] + without(jobs, None)[1])
    assert found == [
        "device.on(self._stream)",
        "landed.record(self._stream)",
        "landed.synchronize()",
        "landed.synchronize()",
        "self._changed.wait_for(lambda: self._running.keys().isdisjoint(job_ids))",
        "self._device.on(self._stream)",
        "self._land(*flying.popleft())",
        "self._land(*flying.popleft())",
        "self._pool.load(group.host_plan, piece.row_ids, piece.addresses).result()",
        "self._settle()",
        "self._stream.synchronize()",
        "self._stream.wait_event(batch.submitted)",
        "self._thread.join()",
        "submitted.record(self._device.current_stream())",
    ]


@pytest.mark.leaves("what lacks a wait may leave anything")
@pytest.mark.parametrize(("module", "index"), MUTANTS)
def test_every_wait_counts(module: ModuleType, index: int) -> None:
    broken, _ = without(module, index)
    which = {"streams" if module is streams else "jobs": broken}

    def make_broken(*args: Any, **settings: Any) -> Any:
        return make_rig("fake", *args, **which, **settings)

    failed = []
    with quiet():
        for scenario in SCENARIOS:
            try:
                scenario(make_broken)
            except Exception as error:  # noqa: BLE001 - how it fails is open
                failed.append((scenario.__name__, str(error)))
                break
    assert failed, "nobody misses it"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Threads of broken code may end with an error; that is no finding."""
    hook, threading.excepthook = threading.excepthook, lambda args: None
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        threading.excepthook = hook
        logging.disable(logging.NOTSET)
