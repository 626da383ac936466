"""Figures of the report against values computed by hand."""

import pytest

from inferry.domain.lanes import Lane
from inferry.sim.calls import CallRow, RunRow
from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.engine import Engine
from inferry.sim.lateness import LatenessSeries
from inferry.sim.report import (
    LaneReport,
    Report,
    Tally,
    attains,
    compare,
    jain_index,
    lane_report,
    quantile,
    unloaded_seconds,
)


def a_row(
    ttft_s: float | None = 0.1,
    end_s: float = 1.1,
    late_s: float | None = 0.1,
    outcome: str = "done",
    produced: int = 11,
    tenant: str = "t",
    lane: Lane = Lane.P0,
    at: float = 0.0,
) -> CallRow:
    assert outcome in ("done", "failed", "cancelled", "expired")
    return CallRow("r", "s", tenant, lane, 100, 11, at, ttft_s, end_s, late_s, outcome, produced)  # type: ignore[arg-type]


def a_run(planned: int = 1, *, ok: bool = True, cancelled: bool = False, latency_s: float = 1.0) -> RunRow:
    return RunRow("r", Lane.P0, "t", 0.0, latency_s, planned, ok, cancelled)


def test_quantiles_are_values_that_were_there() -> None:
    assert quantile([4, 1, 3, 2], 0.5) == 3
    assert quantile(range(100), 0.95) == 95
    assert quantile([7], 0.99) == 7
    assert quantile([], 0.5) is None


def test_jain_is_one_for_equals_and_one_over_n_for_a_monopoly() -> None:
    assert jain_index([5, 5, 5]) == pytest.approx(1.0)
    assert jain_index([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain_index([1, 3]) == pytest.approx(16 / 20)
    assert jain_index([0, 0]) == 1.0


def test_planned_calls_are_the_denominator_of_attainment() -> None:
    rows = [a_row(), a_row(late_s=0.6), a_row(outcome="failed", ttft_s=None, late_s=None, produced=0)]
    runs = [a_run(4), a_run(1, ok=False), a_run(3, cancelled=True, ok=False)]
    lane = lane_report(rows, runs, 0.5)
    assert (lane.planned, lane.attained) == (5, 1)
    assert lane.attainment == pytest.approx(0.2)
    assert (lane.failed, lane.cancelled, lane.calls) == (1, 1, 3)
    assert lane.ttft_p50 == 0.1
    assert lane.itl_p50 == pytest.approx(0.1)
    assert lane.run_p50 == 1.0


def test_calls_of_abandoned_runs_do_not_count_as_slo_misses() -> None:
    lane = lane_report([a_row(), a_row(outcome="cancelled", late_s=None)], [a_run(1), a_run(2, cancelled=True)], 0.5)
    assert lane.attainment == 1.0


def test_a_stall_in_the_middle_misses_the_slo_even_if_the_end_is_in_time() -> None:
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


COSTS = CostModel(base_s=0.01, prefill_token_s=0.001, sequence_s=0.0, kv_token_s=0.0)


def a_report(rows: list[CallRow], ttft_s: dict[Lane, float] | None = None) -> Report:
    tally = Tally(ttft_s or {Lane.P0: 0.5, Lane.P2: 90.0}, unloaded_seconds(COSTS))
    for row in rows:
        tally.call(row)
    return tally.report("a", [Engine(COSTS, EngineFlags())])


def test_goodput_is_the_output_per_second_of_calls_that_attained_their_slo() -> None:
    rows = [a_row(), a_row(late_s=3.0), a_row(lane=Lane.P2, at=8.9, late_s=89.0)]
    whole = a_report(rows)
    assert whole.wall_s == 10.0
    assert whole.goodput == pytest.approx(22 / 10)
    assert whole.output_rate == pytest.approx(33 / 10)
    assert whole.lanes["P0"].goodput == pytest.approx(11 / 10)
    assert whole.lanes["P2"].attained == 1


def test_a_lane_without_slo_attains_every_completed_call() -> None:
    whole = a_report([a_row(lane=Lane.P1, late_s=1e9), a_row(lane=Lane.P1, outcome="failed", late_s=None)])
    assert whole.lanes["P1"].attained == 1


def test_how_long_a_call_takes_alone_counts_what_it_really_has_to_compute() -> None:
    work = unloaded_seconds(COSTS)
    # A step of its own, 100 prompt tokens at a millisecond, eleven steps of ten.
    assert work(a_row()) == pytest.approx(0.01 + 0.1 + 0.11)


def test_fairness_is_one_when_tenants_are_slowed_down_alike_however_much_they_ask_for() -> None:
    alike = a_report([a_row(tenant="big") for _ in range(9)] + [a_row(tenant="small")])
    assert alike.fairness == pytest.approx(1.0)


def test_fairness_falls_when_one_tenant_waits_for_another() -> None:
    """Ten times slower: shares of 1 and 0.1."""
    unfair = a_report([a_row(tenant="first", end_s=1.0), a_row(tenant="last", end_s=10.0)])
    assert unfair.lanes["P0"].fairness == pytest.approx(jain_index([1.0, 0.1]))
    assert unfair.fairness == unfair.lanes["P0"].fairness


def test_lanes_are_not_held_against_each_other() -> None:
    whole = a_report([a_row(tenant="a", end_s=1.0), a_row(tenant="b", lane=Lane.P2, end_s=50.0)])
    assert whole.fairness == pytest.approx(1.0)


def test_several_seeds_are_medians_and_ranges_of_every_figure() -> None:
    reports = [a_report([a_row(ttft_s=ttft, end_s=end)]) for ttft, end in ((0.1, 1.0), (0.3, 3.0), (0.2, 7.0))]
    both = compare(reports)
    assert (both.over_seeds["wall_s"].low, both.over_seeds["wall_s"].median, both.over_seeds["wall_s"].high) == (
        1,
        3,
        7,
    )
    assert both.lanes["P0"]["ttft_p95"].median == 0.2
    figures = {name for name in LaneReport.__struct_fields__ if getattr(reports[0].lanes["P0"], name) is not None}
    assert set(both.lanes["P0"]) == figures
