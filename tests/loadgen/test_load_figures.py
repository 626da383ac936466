"""Figures of a bench: what keeps a promise, what counts, and what a run costs."""

from array import array
from collections.abc import Sequence

import pytest

from inferry.domain.lanes import Lane
from inferry.loadgen.costs import Price, compute_costs
from inferry.loadgen.figures import itls_by_lane, lane_figures, tokens_by_second
from inferry.loadgen.load_generator import Call, RunRecord
from inferry.loadgen.report_page import in_flight
from inferry.loadgen.rows import CallRow, RunRow, call_rows, run_rows
from inferry.sim.calls import Run, Step
from inferry.sim.costs import load_model
from inferry.sim.workload import SloTarget

PROMISES = dict.fromkeys(Lane, SloTarget(0.5, 0.1))


def a_run(name: str = "r", *steps: Step, lane: Lane = Lane.P0, at: float = 0.0) -> Run:
    return Run(run_id=name, tenant="a", lane=lane, at=at, steps=steps or (Step("s", ((1, 0, 100),), 4),))


def a_call(times: Sequence[float], due: float = 0.0, produced: int | None = None, run: Run | None = None) -> Call:
    call = Call(run or a_run(), 0, due)
    call.times = array("d", times)
    call.produced = len(times) if produced is None else produced
    call.ended, call.sent, call.outcome = (times[-1] if times else due), due, "done"
    return call


def a_row(run: str = "r", lane: str = "P0", outcome: str = "done", due: float = 0.0, **more: object) -> CallRow:
    values: dict[str, object] = {
        "prompt": 100,
        "requested_tokens": 10,
        "produced": 10,
        "cached": 0,
        "lag_ms": 0.0,
        "sent_s": 0.0,
    }
    values |= {"ttft_s": 0.2, "end_s": 1.0, "late_s": 0.2}
    return CallRow(run=run, step="s", tenant="a", lane=lane, outcome=outcome, due_s=due, **(values | more))  # type: ignore[arg-type]


def a_run_row(run: str = "r", lane: str = "P0", planned: int = 1, ok: bool = True, **more: object) -> RunRow:
    values = {"at_s": 0.0, "latency_s": 1.0, "cancelled": False} | more
    return RunRow(run=run, tenant="a", lane=lane, planned=planned, ok=ok, **values)  # type: ignore[arg-type]


# -- SLO targets
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "produced", "kept"),
    [
        ([0.5, 0.6, 0.7], 3, True),
        ([0.51, 0.6, 0.7], 3, False),  # the first token is late
        ([0.1, 0.61, 0.7], 3, False),  # it stalls, and catches up
        ([0.1, 0.2, 0.3, 0.8], 4, True),  # a stall within what it had saved
        ([0.5, 0.8], 4, False),  # two tokens an event: the third comes with the second event
        ([0.5, 0.7], 4, True),
    ],
)
def test_a_call_attains_its_slo_if_every_token_is_in_time(times: list[float], produced: int, kept: bool) -> None:
    (row,) = call_rows([a_call([100 + t for t in times], 100.0, produced)], 100.0, PROMISES)
    figures = lane_figures([row], [a_run_row()], PROMISES[Lane.P0], None, 0.0, 1.0)
    assert figures.attainment == kept
    assert figures.goodput == (produced if kept else 0)


def test_a_run_that_breaks_loses_its_later_steps_and_one_that_was_left_plans_nothing() -> None:
    rows = [a_row("broken"), a_row("broken", outcome="reset", late_s=None), a_row("left"), a_row("whole")]
    rows.append(a_row("left", outcome="cancelled", late_s=None))
    runs = [
        a_run_row("broken", planned=4, ok=False),
        a_run_row("left", planned=3, ok=False, cancelled=True),
        a_run_row("whole"),
    ]
    figures = lane_figures(rows, runs, PROMISES[Lane.P0], None, 0.0, 10.0)
    assert (figures.planned, figures.attained, figures.attainment) == (5, 2, 0.4)
    assert (figures.done, figures.failed, figures.cancelled, figures.failures) == (3, 1, 1, {"reset": 1})


def test_the_warm_up_counts_for_nothing() -> None:
    rows = [a_row("cold", due=1.0, ttft_s=9.0, late_s=9.0), a_row("warm", due=5.0)]
    runs = [a_run_row("cold", at_s=1.0, latency_s=9.0), a_run_row("warm", at_s=5.0)]
    figures = lane_figures(rows, runs, PROMISES[Lane.P0], None, 2.0, 4.0)
    assert (figures.planned, figures.calls, figures.attainment) == (1, 1, 1.0)
    assert (figures.ttft_p99, figures.run_p95) == (0.2, 1.0)
    assert figures.output_rate == 2.5


def test_percentiles_are_of_all_calls_that_were_not_left() -> None:
    rows = [a_row(str(n), ttft_s=n / 100, end_s=n / 10) for n in range(100)] + [
        a_row("x", "P0", "cancelled", ttft_s=99)
    ]
    figures = lane_figures(rows, [], PROMISES[Lane.P0], None, 0.0, 1.0)
    assert (figures.ttft_p50, figures.ttft_p95, figures.ttft_p99) == (0.5, 0.95, 0.99)
    assert figures.e2e_p95 == 9.5
    assert (figures.ttft_p999, figures.ttft_max, figures.e2e_p999, figures.e2e_max) == (0.99, 0.99, 9.9, 9.9)


def test_the_thousandth_call_shows_in_the_tail_alone() -> None:
    rows = [a_row(str(n), ttft_s=n / 1000) for n in range(2000)]
    figures = lane_figures(rows, [], PROMISES[Lane.P0], None, 0.0, 1.0)
    assert (figures.ttft_p99, figures.ttft_p999, figures.ttft_max) == (1.98, 1.998, 1.999)


# -- gaps and rates ----------------------------------------------------------------------------------------------------


def test_several_tokens_in_one_event_are_one_itl_sample() -> None:
    calls = [a_call([10.0, 10.05, 10.25], 9.0, produced=9), a_call([11.0], 9.0)]
    itls = itls_by_lane(calls, 9.0, 0.0, PROMISES)["P0"]
    assert itls.p50 == pytest.approx(0.2)
    assert (itls.over, len(itls.curve)) == (0.5, 2)
    assert itls_by_lane(calls, 9.0, 5.0, PROMISES) == {}


def test_tokens_count_in_the_second_in_which_they_came() -> None:
    assert tokens_by_second([a_call([10.1, 10.9, 12.5], 10.0, produced=6)], 10.0) == {"P0": [4.0, 0, 2.0]}


def test_calls_are_in_flight_from_when_they_were_due() -> None:
    points = in_flight([a_row(due=0.0, end_s=2.0), a_row(due=1.0, end_s=2.0)], 4.0)
    by_second = dict(points)
    assert (by_second[0.5], by_second[1.5], by_second[2.5], by_second[4.0]) == (1, 2, 1, 0)


def test_a_repeated_prompt_counts_as_cached_where_the_server_does_not_report() -> None:
    first, second = Step("one", ((1, 0, 160),), 4), Step("two", ((1, 0, 160), (2, 0, 40)), 4)
    run, stranger = a_run("r", first, second), Run(run_id="o", tenant="b", lane=Lane.P0, at=0, steps=(second,))
    calls = [a_call([1.0], 1.0, run=run), Call(run, 1, 2.0), Call(stranger, 0, 3.0)]
    assert [row.cached for row in call_rows(calls, 0.0, PROMISES)] == [0, 160, 0]
    calls[1].cached = 32
    assert [row.cached for row in call_rows(calls, 0.0, PROMISES)] == [0, 32, 0]


def test_a_run_that_was_stopped_is_no_failure() -> None:
    (row,) = run_rows([RunRecord(a_run(), 1.0, 2.0, ok=False, cancelled=False, stopped=True)], 1.0)
    assert row.cancelled


# -- money and work ----------------------------------------------------------------------------------------------------


def bill(wall_s: float, budget: float | None = None) -> tuple[list[CallRow], list[RunRow], Price]:
    rows = [
        a_row("small", "P0", prompt=100, produced=10, end_s=1.0),
        a_row("large", "P1", prompt=4000, produced=400, end_s=3.0),
        a_row("digest", "P2", prompt=2000, produced=200, end_s=wall_s),
        a_row("broken", "P1", "reset", prompt=500, produced=5),
    ]
    runs = [
        a_run_row("small"),
        a_run_row("large", "P1"),
        a_run_row("digest", "P2"),
        a_run_row("broken", "P1", ok=False),
    ]
    return rows, runs, Price(gpu_per_hour=3600.0, run_budget=budget)


def test_runs_that_were_done_pay_the_whole_bill() -> None:
    rows, runs, price = bill(10.0)
    for model in (None, load_model()):
        cost_figures = compute_costs(rows, runs, 0.0, price, model)
        assert cost_figures.bill == pytest.approx(10.0)
        assert sum(cost_figures.cost_per_run_by_lane.values()) == pytest.approx(10.0)
        assert cost_figures.cost_per_run == pytest.approx(
            (cost_figures.cost_per_run_by_lane["P0"] + cost_figures.cost_per_run_by_lane["P1"]) / 2
        )


def test_the_same_work_in_twice_the_time_is_half_the_use_and_twice_the_cost() -> None:
    fast, slow = (compute_costs(rows, runs, 0.0, price, load_model()) for rows, runs, price in (bill(10.0), bill(20.0)))
    assert fast.utilisation is not None
    assert slow.utilisation == pytest.approx(fast.utilisation / 2)
    assert fast.cost_per_run is not None
    assert slow.cost_per_run == pytest.approx(fast.cost_per_run * 2)


def test_runs_that_cost_more_than_the_budget_are_over_budget() -> None:
    assert [
        compute_costs(*bill(10.0)[:2], 0.0, bill(10.0, budget)[2], None).over_budget for budget in (0.01, 1.0, 9.0)
    ] == [
        1.0,
        0.5,
        0.0,
    ]


def test_latency_and_cost_are_of_agents_and_batch_is_separate() -> None:
    cost_figures = compute_costs(*bill(10.0)[:2], 0.0, Price(), None)
    assert (cost_figures.step_p95_s, cost_figures.batch_done_s, cost_figures.runs) == (3.0, 10.0, 2)
    assert (cost_figures.cost_per_run, cost_figures.utilisation, cost_figures.over_budget) == (None, None, None)


def test_work_is_less_where_a_prompt_was_cached() -> None:
    _, runs, price = bill(10.0)
    warm = [a_row("large", "P1", prompt=4000, produced=400, cached=3900, end_s=10.0)]
    cold = [a_row("large", "P1", prompt=4000, produced=400, end_s=10.0)]
    used = [compute_costs(rows, runs[1:2], 0.0, price, load_model()).utilisation or 0 for rows in (warm, cold)]
    assert 0 < used[0] < used[1]
