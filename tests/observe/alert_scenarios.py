"""Situations in which alerts fire or do not, as series over time that Prometheus and the gateway both read."""

import re
from collections.abc import Callable
from typing import NamedTuple

from inferry.observe.history import SeriesReading

STEP_S = 15
MINUTES = 30
_SERIES = re.compile(r"(\w+?)(_bucket)?(?:\{(.*)\})?")

Course = Callable[[float], float]
"""A value by the minute."""
Firing = frozenset[tuple[str, str]]
"""Name of a rule, and its labels as they are written in a series."""


class Scenario(NamedTuple):
    """`expected`: what fires at a minute."""

    name: str
    series: dict[str, Course]
    expected: dict[float, Firing]

    def values(self, series: str) -> list[float]:
        course = self.series[series]
        return [course(step * STEP_S / 60) for step in range(MINUTES * 60 // STEP_S + 1)]

    def readings(self, step: int) -> list[SeriesReading]:
        """All series at a step as the metrics would give them."""
        found: list[SeriesReading] = []
        buckets: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, int]]] = {}
        for series, course in self.series.items():
            match = _SERIES.fullmatch(series)
            assert match is not None, series
            name, labels = match[1], dict(re.findall(r'(\w+)="([^"]*)"', match[3] or ""))
            value = course(step * STEP_S / 60)
            if match[2] is None:
                if not name.endswith("_count"):
                    found.append(SeriesReading(name, tuple(labels.items()), value))
                continue
            bound = float(labels.pop("le"))
            buckets.setdefault((name, tuple(labels.items())), []).append((bound, int(value)))
        for (name, pairs), one in buckets.items():
            bounds = tuple(bound for bound, _ in one if bound != float("inf"))
            found.append(SeriesReading(name, pairs, 0.0, bounds, tuple(count for _, count in one)))
        return found


def fires(*alerts: tuple[str, str]) -> Firing:
    return frozenset(alerts)


def constant(value: float) -> Course:
    return lambda minute: value


def from_minute(begin: float, value: float, before: float = 0.0, end: float = 1e9) -> Course:
    return lambda minute: value if begin <= minute < end else before


def rising(per_minute: float) -> Course:
    return lambda minute: float(int(per_minute * minute))


def histogram(name: str, labels: str, slow: Course, *, bounds: tuple[float, float, float]) -> dict[str, Course]:
    """Observations between the first two bounds, and `slow` ones between the last two, cumulative as counters are."""
    pairs = f"{labels}," if labels else ""
    fast = rising(60)
    total: Course = lambda minute: fast(minute) + slow(minute)  # noqa: E731
    count = f"{name}_count{{{labels}}}" if labels else f"{name}_count"
    return {
        f'{name}_bucket{{{pairs}le="{bounds[0]}"}}': constant(0),
        f'{name}_bucket{{{pairs}le="{bounds[1]}"}}': fast,
        f'{name}_bucket{{{pairs}le="{bounds[2]}"}}': total,
        f'{name}_bucket{{{pairs}le="+Inf"}}': total,
        count: total,
    }


def after(begin: float, per_minute: float) -> Course:
    return lambda minute: float(int(max(0.0, minute - begin) * per_minute))


WAIT, TTFT, LAG = (
    "inferry_queue_wait_seconds",
    "inferry_time_to_first_token_seconds",
    "inferry_event_loop_lag_seconds",
)
LATE = {
    **histogram(WAIT, 'lane="P0"', rising(60), bounds=(0.05, 0.1, 2.0)),
    **histogram(WAIT, 'lane="P1"', constant(0), bounds=(0.05, 0.1, 2.0)),
    'inferry_slo_ttft_target_seconds{lane="P0"}': constant(0.5),
    'inferry_slo_ttft_target_seconds{lane="P1"}': constant(2.0),
}


def utilised(ratio: float) -> dict[str, Course]:
    return {f'inferry_worker_gpu_utilization_ratio{{worker="{name}"}}': constant(ratio) for name in ("a", "b")}


RUNNING = {
    'inferry_worker_running_sequences{worker="a"}': from_minute(15, 3, before=32),
    'inferry_worker_running_sequences{worker="b"}': constant(32),
    'inferry_worker_up{worker="a"}': constant(1),
    'inferry_worker_up{worker="b"}': constant(1),
}
SLOWER = histogram(TTFT, 'lane="P1",model="m"', after(15, 60), bounds=(0.1, 0.2, 2.0))
HEALTHY = {
    **{series: course for series, course in LATE.items() if 'lane="P1"' in series},
    **utilised(0.3),
    **histogram(TTFT, 'lane="P0",model="m"', constant(0), bounds=(0.1, 0.2, 2.0)),
    **histogram(LAG, "", constant(0), bounds=(0.001, 0.005, 0.25)),
    'inferry_queue_depth{lane="P0"}': constant(10),
    'inferry_queue_limit{lane="P0"}': constant(10_000),
    'inferry_worker_running_sequences{worker="a"}': constant(32),
    'inferry_worker_up{worker="a"}': constant(1),
    'inferry_worker_phase{worker="a",phase="down"}': constant(0),
    'inferry_budget_burn_ratio{period="day"}': constant(1.0),
    "inferry_run_budget_spent_ratio": constant(0.5),
    "inferry_ledger_up": constant(1),
    "inferry_ledger_entries_dropped_total": constant(3),
}

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("a healthy gateway", HEALTHY, {minute: fires() for minute in (1, 10, 20, 29)}),
    Scenario(
        "calls wait while GPUs are idle",
        {**LATE, **utilised(0.2)},
        {3: fires(), 20: fires(("InferryGpuUnderused", 'lane="P0"'))},
    ),
    Scenario("calls wait and GPUs are busy", {**LATE, **utilised(0.9)}, {20: fires()}),
    Scenario("calls wait and the utilisation is not known", LATE, {20: fires()}),
    Scenario(
        "a queue fills and empties",
        {
            'inferry_queue_depth{lane="P1"}': from_minute(5, 9000, before=10, end=15),
            'inferry_queue_depth{lane="P2"}': constant(100),
            'inferry_queue_limit{lane="P1"}': constant(10_000),
            'inferry_queue_limit{lane="P2"}': constant(10_000),
        },
        {4: fires(), 5.5: fires(), 8: fires(("InferryQueueNearlyFull", 'lane="P1"')), 16: fires()},
    ),
    Scenario(
        "a worker runs small batches while the queue grows",
        {**RUNNING, 'inferry_queue_depth{lane="P1"}': from_minute(15, 500, before=5)},
        {14: fires(), 20: fires(("InferryBatchCollapse", 'worker="a"'))},
    ),
    Scenario(
        "a worker runs small batches because there is less work",
        {**RUNNING, 'inferry_queue_depth{lane="P1"}': from_minute(15, 0, before=50)},
        {20: fires()},
    ),
    Scenario(
        "a worker that is down runs nothing",
        {
            **RUNNING,
            'inferry_queue_depth{lane="P1"}': from_minute(15, 500, before=5),
            'inferry_worker_up{worker="a"}': from_minute(15, 0, before=1),
            'inferry_worker_phase{worker="a",phase="down"}': from_minute(15, 1),
            'inferry_worker_phase{worker="a",phase="ready"}': from_minute(15, 0, before=1),
            'inferry_worker_phase{worker="b",phase="down"}': constant(0),
            'inferry_worker_phase{worker="b",phase="starting"}': constant(1),
        },
        {15.5: fires(), 20: fires(("InferryWorkerDown", 'worker="a"'))},
    ),
    Scenario("first tokens become slower", SLOWER, {14: fires(), 20: fires(("InferryLatencyDrift", 'lane="P1"'))}),
    Scenario(
        "a gateway that has just started gets its first load",
        histogram(TTFT, 'lane="P1",model="m"', after(5, 120), bounds=(0.1, 0.2, 2.0)),
        {minute: fires() for minute in (6, 8, 9.5)},
    ),
    Scenario(
        "a few slow first tokens say nothing",
        {
            series: (lambda minute, course=course: float(int(course(minute) / 100)))  # type: ignore[misc]
            for series, course in SLOWER.items()
        },
        {20: fires()},
    ),
    Scenario(
        "a tenant spends ahead of its day",
        {
            'inferry_budget_burn_ratio{period="day"}': from_minute(5, 2.5),
            'inferry_budget_burn_ratio{period="month"}': constant(0.9),
        },
        {8: fires(), 12: fires(("InferryBudgetBurn", 'period="day"'))},
    ),
    Scenario(
        "a run has spent nearly everything",
        {"inferry_run_budget_spent_ratio": from_minute(5, 0.95, end=10)},
        {4: fires(), 6: fires(("InferryRunBudgetNearlySpent", "")), 11: fires()},
    ),
    Scenario(
        "the ledger is down and back",
        {"inferry_ledger_up": from_minute(5, 0, before=1, end=10)},
        {4: fires(), 7: fires(("InferryLedgerDown", "")), 11: fires()},
    ),
    Scenario(
        "the ledger loses rows",
        {"inferry_ledger_entries_dropped_total": from_minute(10, 12)},
        {9: fires(), 12: fires(("InferryLedgerDropping", "")), 20: fires()},
    ),
    Scenario(
        "the event loop is late",
        histogram(LAG, "", rising(30), bounds=(0.001, 0.005, 0.25)),
        {1: fires(), 10: fires(("InferryEventLoopLag", ""))},
    ),
)
