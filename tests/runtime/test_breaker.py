# SPDX-License-Identifier: Apache-2.0
"""Breaker on a virtual clock."""

from __future__ import annotations

import pytest

from kvtier.runtime.breaker import MAX_OPEN_SECONDS, Breaker


def opened(failures: int = 1, open_seconds: float = 10.0) -> Breaker:
    breaker = Breaker(failures, open_seconds)
    for _ in range(failures):
        assert breaker.allow(0.0)
        breaker.failure(0.0, "io")
    assert not breaker.closed
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(3, 10.0)
    for _ in range(5):
        assert not breaker.failure(0.0, "io")
        assert not breaker.failure(0.0, "io")
        assert not breaker.success()
    assert not breaker.failure(0.0, "io")
    assert not breaker.failure(0.0, "io")
    assert breaker.closed
    assert breaker.failure(1.0, "eio")
    assert (breaker.closed, breaker.state, breaker.until, breaker.cause) == (False, 2, 11.0, "eio")


def test_one_trial_at_a_time() -> None:
    breaker = opened()
    assert not breaker.allow(9.9)
    assert not breaker.would_allow(9.9)
    assert breaker.would_allow(10.0)
    assert breaker.state == 2  # asking is no trial
    assert breaker.allow(10.0)
    assert breaker.state == 1
    assert not breaker.allow(10.0)
    assert not breaker.allow(1000.0)
    assert breaker.success()
    assert breaker.closed
    assert breaker.allow(10.0)
    assert breaker.allow(10.0)


def test_inconclusive_trial_allows_another() -> None:
    breaker = opened()
    assert breaker.allow(10.0)
    breaker.inconclusive()
    assert breaker.allow(10.0)


def test_failures_from_before_the_opening_do_not_prolong_it() -> None:
    breaker = opened()
    until = breaker.until
    assert not breaker.failure(5.0, "late")
    assert breaker.until == until
    assert breaker.cause == "io"


@pytest.mark.parametrize("open_seconds", [0.001, 10.0, 300.0])
def test_a_tier_that_is_down_for_days(open_seconds: float) -> None:
    """The pause grows to its bound and stays there; thousands of trials overflow nothing."""
    breaker = opened(open_seconds=open_seconds)
    now, pauses = 0.0, []
    for _ in range(3000):
        assert breaker.until is not None
        pauses.append(breaker.until - now)
        now = breaker.until
        assert breaker.allow(now)
        assert breaker.failure(now, "io")
    assert pauses[0] == open_seconds
    assert max(pauses) <= max(MAX_OPEN_SECONDS, open_seconds) + 0.001
    assert pauses[-1] == pytest.approx(max(MAX_OPEN_SECONDS, open_seconds))
    now = breaker.until or now
    assert breaker.allow(now)
    assert breaker.success()
    breaker.failure(now, "io")
    assert breaker.until == pytest.approx(now + open_seconds)  # starts anew
