"""The numbers, against ones worked out by hand."""

import pytest

from inferry.domain.jobs import Lane
from inferry.sim.calls import CallRow, RunRow
from inferry.sim.lateness import LatenessSeries
from inferry.sim.report import attains, jain, lane_report, quantile


def a_row(
    ttft_s: float | None = 0.1,
    end_s: float = 1.1,
    late_s: float | None = 0.1,
    outcome: str = "done",
    produced: int = 11,
) -> CallRow:
    assert outcome in ("done", "failed", "cancelled", "expired")
    return CallRow("r", "s", "t", Lane.P0, 100, 11, 0.0, ttft_s, end_s, late_s, outcome, produced)  # type: ignore[arg-type]


def a_run(planned: int = 1, *, ok: bool = True, cancelled: bool = False, latency_s: float = 1.0) -> RunRow:
    return RunRow("r", Lane.P0, "t", 0.0, latency_s, planned, ok, cancelled)


def test_quantiles_are_values_that_were_there() -> None:
    assert quantile([4, 1, 3, 2], 0.5) == 3
    assert quantile(range(100), 0.95) == 95
    assert quantile([7], 0.99) == 7
    assert quantile([], 0.5) is None


def test_jain_is_one_for_equals_and_one_over_n_for_a_monopoly() -> None:
    assert jain([5, 5, 5]) == pytest.approx(1.0)
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain([1, 3]) == pytest.approx(16 / 20)
    assert jain([0, 0]) == 1.0


def test_planned_calls_are_the_denominator_of_attainment() -> None:
    rows = [a_row(), a_row(late_s=0.6), a_row(outcome="failed", ttft_s=None, late_s=None, produced=0)]
    runs = [a_run(4), a_run(1, ok=False), a_run(3, cancelled=True, ok=False)]
    lane = lane_report(rows, runs, 0.5)
    assert (lane.planned, lane.attained) == (5, 1)
    assert lane.attainment == pytest.approx(0.2)
    assert (lane.failed, lane.cancelled, lane.calls) == (1, 1, 3)
    assert lane.ttft_p50 == 0.1
    assert lane.gap_p50 == pytest.approx(0.1)
    assert lane.run_p50 == 1.0


def test_calls_of_runs_that_walked_away_do_not_count_as_broken_promises() -> None:
    lane = lane_report([a_row(), a_row(outcome="cancelled", late_s=None)], [a_run(1), a_run(2, cancelled=True)], 0.5)
    assert lane.attainment == 1.0


def test_a_stall_in_the_middle_breaks_the_promise_even_if_the_end_is_in_time() -> None:
    """Token i is due at 0.5 + 0.1 i. Tokens at 0.1, 0.2, 0.9, 0.91: the third is due by 0.7."""
    series = LatenessSeries(0.1)
    for step, at in enumerate([0.1, 0.2, 0.9, 0.91], 1):
        series.add(step, at)
    worst = series.worst_since(1, 1)
    assert worst == pytest.approx(0.9 - 0.2)
    assert not attains(a_row(late_s=worst), 0.5)
    assert attains(a_row(late_s=worst), 0.7 + 1e-9)
    assert series.worst_since(4, 4) == pytest.approx(0.91)


def test_lateness_over_any_suffix_is_the_maximum_over_its_tokens() -> None:
    ends = [0.1, 0.5, 0.55, 0.6, 1.4, 1.45, 1.5, 1.55]
    series = LatenessSeries(0.2)
    for step, at in enumerate(ends, 1):
        series.add(step, at)
    for begin in range(1, len(ends) + 1):
        by_hand = max(ends[s - 1] - 0.2 * (s - begin) for s in range(begin, len(ends) + 1))
        assert series.worst_since(begin, begin) == pytest.approx(by_hand)
