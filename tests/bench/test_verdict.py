# SPDX-License-Identifier: Apache-2.0
"""Each clause of the verdict can hold, fail, and go unmeasured."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvtier.bench.copies import CopyCounters
from kvtier.bench.results import Clause, EngineCounts, Run, Spread, Verdict, middle
from kvtier.bench.tierdir import SweepCounters
from kvtier.bench.verdict import judge, judge_server
from tests.bench.helpers import ACCELERATOR, HOST, SIZES, change, make_run, runs


def verdict(found: list[Run], workload: str = "multiturn") -> Verdict:
    return judge(found, workload, ACCELERATOR, HOST)


def failing(result: Verdict) -> list[str]:
    return [clause.text for clause in result.clauses if clause.holds is False]


def test_good_results_hold() -> None:
    result = verdict(runs())
    assert result.holds
    assert all(clause.holds for clause in result.clauses if "the disk" not in clause.text)
    assert result.summary.startswith("HOLDS, up to 3.0 times")


@pytest.mark.parametrize(
    ("resident", "in_memory", "holds"), [(10, False, True), (11, False, False), (100, True, None)]
)
def test_a_tier_in_the_page_cache_is_refused_unless_wanted(
    resident: int, in_memory: bool, holds: bool | None
) -> None:
    found = change(runs(), sweeps=SweepCounters(sampled_pages=100, resident_pages=resident))
    result = judge(found, "multiturn", ACCELERATOR, HOST, tier_in_memory=in_memory)
    assert [clause.holds for clause in result.clauses if "the disk" in clause.text] == [holds]
    assert result.holds == (holds is not False)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"host_2": 650.0}, "all alike"),
        ({"host_fs_2": 740.0}, "all alike"),
        ({"host_7": 530.0}, "host at least 2 times none"),
        ({"host_fs_20": 450.0, "host_20": 250.0}, r"host\+fs at least 2 times none"),
        ({"host_20": 450.0}, r"host\+fs at least 1.5 times host"),
    ],
)
def test_each_clause_of_the_effect_can_fail(changed: dict[str, float], words: str) -> None:
    result = verdict(runs(**changed))
    assert not result.holds
    (text,) = failing(result)
    assert re.search(words, text)
    assert result.summary.startswith("DOES NOT HOLD")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"copies": CopyCounters(load_bytes=9, verified_bytes=9, differing_blocks=1)},
            "every reloaded byte",
        ),
        ({"copies": CopyCounters(load_bytes=9, verified_bytes=8)}, "every reloaded byte"),
        ({"engine": EngineCounts(failures={"corrupt": 1})}, "corrupt"),
        ({"engine": EngineCounts(failures={"full": 3})}, "no tier failed otherwise"),
        ({"requests": 9}, "every request was answered"),
        ({"sweeps": SweepCounters(sampled_pages=100, resident_pages=11)}, "read from the disk"),
    ],
)
def test_each_clause_of_soundness_can_fail(changes: dict[str, object], words: str) -> None:
    result = verdict(change(runs(), **changes))
    assert not result.holds
    (text,) = failing(result)
    assert words in text
    assert result.summary.startswith("FAILED")


def test_points_that_are_missing_are_not_judged() -> None:
    only = [run for run in runs() if run.point == "7"]
    result = verdict(only)
    assert result.holds
    held = [clause.text for clause in result.clauses[4:] if clause.holds is not None]
    assert len(held) == 1
    assert "host at least 2 times none" in held[0]
    alone = verdict([run for run in only if run.strategy == "none"])
    assert not alone.holds
    assert alone.summary.startswith("NOT JUDGED")


def test_a_working_set_between_two_sizes_judges_nothing() -> None:
    between = [make_run(name, "3", 140, 500) for name in ("none", "host", "host+fs")]
    assert all(clause.holds is None for clause in verdict(between).clauses[4:])


def test_no_gain_is_said() -> None:
    found = [
        make_run(name, point, size, 900.0)
        for point, size in SIZES.items()
        for name in ("none", "host", "host+fs")
    ]
    result = verdict(found)
    assert not result.holds
    assert result.summary.startswith("NO GAIN")
    assert result.summary.endswith("recomputing is as cheap as loading here")
    unused = [msgspec.structs.replace(run, host_tokens=0, tier_tokens={}) for run in found]
    nothing = verdict(unused).summary
    assert nothing.startswith("NO GAIN")
    assert nothing.endswith("nothing that kvtier had kept was asked for again")


def test_trace_must_do_no_harm() -> None:
    found = [make_run(name, "trace", 900, 500) for name in ("none", "host", "host+fs")]
    assert verdict(found, "trace").holds
    slow = change(found, first_token=Spread(9.0, 9.0, 9.0, 9.0))
    assert not verdict(slow, "trace").holds
    alone = verdict(found[:1], "trace")
    assert not alone.holds
    assert alone.clauses[-1] == Clause(alone.clauses[-1].text, None, "not measured")


def test_middle_keeps_the_damage_of_all_repeats() -> None:
    bad = CopyCounters(differing_blocks=2)
    repeats = [
        make_run("host", "2", 88, 100, copies=bad, engine=EngineCounts(failures={"io": 1})),
        make_run("host", "2", 88, 300, sweeps=SweepCounters(sampled_pages=9, resident_pages=9)),
        make_run("host", "2", 88, 200, sweeps=SweepCounters(sampled_pages=9)),
    ]
    chosen = middle(repeats)
    assert chosen.tokens_per_second == pytest.approx(200_000)
    assert chosen.copies.differing_blocks == 2
    assert chosen.engine.failures == {"io": 1}
    assert chosen.sweeps is not None
    assert chosen.sweeps.resident_ratio == 1
    assert len(chosen.throughputs) == 3


def test_stock_is_compared_with_files_where_the_accelerator_no_longer_holds() -> None:
    def judged(**speeds: float) -> Verdict:
        mine = [make_run("stock", point, SIZES[point], speed) for point, speed in speeds.items()]
        return verdict(runs() + mine)

    names = {"2": 400.0, "7": 770.0, "20": 590.0}  # below the accelerator's size it is not judged
    good = judged(**names)
    assert good.holds, failing(good)
    assert good.clauses[-1].text.startswith("host+fs at least 0.95 times stock")
    assert good.clauses[-1].measured == "1.01 times at 7"
    assert failing(judged(**names | {"20": 640.0})) == [good.clauses[-1].text]
    assert not any("stock" in clause.text for clause in verdict(runs()).clauses)


def test_stocks_gain_is_not_kvtiers() -> None:
    alike = [make_run(name, "7", SIZES["7"], 500) for name in ("none", "host", "host+fs")]
    result = verdict([*alike, make_run("stock", "7", SIZES["7"], 2000)])
    assert result.summary.startswith("NO GAIN")


def test_bytes_that_nobody_compared_are_not_said_to_be_right() -> None:
    found = change(runs(), copies=CopyCounters(load_bytes=9))
    assert failing(verdict(found)) == ["every reloaded byte is the one that was computed"]
    result = judge(found, "multiturn", ACCELERATOR, HOST, bytes_compared=False)
    assert result.clauses[0].holds is None
    assert result.clauses[0].measured == "not compared in this engine"


def test_a_server_is_judged_by_its_answers_alone() -> None:
    run = make_run("server", "7", 0, 500)
    good = judge_server([run])
    assert good.holds
    assert good.summary.startswith("ANSWERED")
    bad = judge_server([make_run("server", "7", 0, 500, requests=8, errors={"timeout": 2})])
    assert not bad.holds
    assert bad.clauses[0].measured == "2 left, timeout: 2"
