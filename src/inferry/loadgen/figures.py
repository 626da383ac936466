"""Figures from rows: percentiles, SLO attainment, rates, curves. Pure functions.

Calls that were due during the warm-up do not count.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.loadgen.load_generator import Call
from inferry.loadgen.rows import CallRow, RunRow, tokens_per_event
from inferry.sim.workload import SloTarget

CURVE_POINTS = 200


class LaneFigures(Struct, frozen=True, kw_only=True):
    """One lane; times in seconds. `attainment`: calls that met their SLO target, over planned calls.

    A call meets its target when token i arrives within ttft + i * itl of when the call was due. Cancelled runs have no
    planned calls; a run that breaks misses its later steps. `itl` is the time between two events with tokens,
    `itl_over_target` the fraction above the target. `goodput` is the output tokens per second of calls that met their
    target. `done_s`: when the last call had ended.
    """

    planned: int
    calls: int
    done: int
    failed: int
    cancelled: int
    attained: int
    attainment: float
    ttft_p50: float | None
    ttft_p95: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_p99: float | None
    itl_over_target: float | None
    e2e_p50: float | None
    e2e_p95: float | None
    e2e_p99: float | None
    run_p50: float | None
    run_p95: float | None
    output_tokens: int
    output_rate: float
    goodput: float
    failures: dict[str, int]
    resets: int
    refused: int
    done_s: float
    # None in results of earlier versions.
    ttft_p999: float | None = None
    ttft_max: float | None = None
    itl_p999: float | None = None
    itl_max: float | None = None
    e2e_p999: float | None = None
    e2e_max: float | None = None


class InterTokenLatencies(Struct, frozen=True):
    """Inter-token latencies of a lane: percentiles, the fraction above the target, and their curve."""

    p50: float
    p95: float
    p99: float
    over: float
    curve: tuple[float, ...]
    p999: float | None = None
    max: float | None = None


class GeneratorFigures(Struct, frozen=True, kw_only=True):
    """How late the load generator sent calls. `cpu`: its use of one core, from 0 to 1."""

    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    cpu: float


def percentile(ordered: Sequence[float], part: float) -> float | None:
    """The quantile of sorted values, `part` from 0 to 1."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None


def after_warmup(rows: Iterable[CallRow], warmup_s: float) -> list[CallRow]:
    return [row for row in rows if row.due_s >= warmup_s]


def attains(row: CallRow, ttft_s: float) -> bool:
    return row.is_done and row.late_s is not None and row.late_s <= ttft_s


def lane_figures(
    rows: Sequence[CallRow],
    runs: Sequence[RunRow],
    slo_target: SloTarget,
    itls: InterTokenLatencies | None,
    warmup_s: float,
    span_s: float,
) -> LaneFigures:
    """The figures of one lane; `span_s` is the duration after the warm-up."""
    abandoned = {run.run for run in runs if run.cancelled}
    warm = sum(row.due_s < warmup_s and row.run not in abandoned for row in rows)
    planned = sum(run.planned for run in runs if not run.cancelled) - warm
    calls = after_warmup(rows, warmup_s)
    attaining = [row for row in calls if attains(row, slo_target.ttft_s)]
    # Calls of a cancelled run have no target.
    attained = sum(row.run not in abandoned for row in attaining)
    complete = [row for row in calls if row.outcome != "cancelled"]
    ttfts = sorted(row.ttft_s for row in complete if row.ttft_s is not None)
    ends = sorted(row.end_s for row in complete)
    latencies = sorted(run.latency_s for run in runs if run.ok and run.at_s >= warmup_s)
    produced = sum(row.produced for row in calls)
    return LaneFigures(
        planned=planned,
        calls=len(calls),
        done=sum(row.is_done for row in calls),
        failed=sum(row.is_failed for row in calls),
        cancelled=sum(row.outcome == "cancelled" for row in calls),
        attained=attained,
        attainment=attained / planned if planned else 1.0,
        ttft_p50=percentile(ttfts, 0.5),
        ttft_p95=percentile(ttfts, 0.95),
        ttft_p99=percentile(ttfts, 0.99),
        itl_p50=None if itls is None else itls.p50,
        itl_p95=None if itls is None else itls.p95,
        itl_p99=None if itls is None else itls.p99,
        itl_over_target=None if itls is None else itls.over,
        e2e_p50=percentile(ends, 0.5),
        e2e_p95=percentile(ends, 0.95),
        e2e_p99=percentile(ends, 0.99),
        run_p50=percentile(latencies, 0.5),
        run_p95=percentile(latencies, 0.95),
        output_tokens=produced,
        output_rate=produced / max(span_s, 1e-9),
        goodput=sum(row.produced for row in attaining) / max(span_s, 1e-9),
        failures=dict(Counter(row.outcome for row in calls if row.is_failed).most_common()),
        resets=sum(row.resets for row in calls),
        refused=sum(row.refused for row in calls),
        done_s=max((row.ended_s for row in calls), default=0.0),
        ttft_p999=percentile(ttfts, 0.999),
        ttft_max=percentile(ttfts, 1.0),
        itl_p999=None if itls is None else itls.p999,
        itl_max=None if itls is None else itls.max,
        e2e_p999=percentile(ends, 0.999),
        e2e_max=percentile(ends, 1.0),
    )


def itls_by_lane(
    calls: Iterable[Call], began: float, warmup_s: float, slo_targets: Mapping[Lane, SloTarget]
) -> dict[str, InterTokenLatencies]:
    """Times between events with tokens. Several tokens in one event count as one."""
    by_lane: dict[Lane, array[float]] = {}
    for call in calls:
        if call.due - began >= warmup_s and len(call.times) > 1 and call.outcome != "cancelled":
            by_lane.setdefault(call.run.lane, array("f")).extend(
                [later - earlier for earlier, later in pairwise(call.times)]
            )
    return {lane.name: _itls(sorted(by_lane[lane]), slo_targets[lane].itl_s) for lane in Lane if lane in by_lane}


def _itls(ordered: list[float], itl_target_s: float) -> InterTokenLatencies:
    parts = (0.5, 0.95, 0.99, 0.999, 1.0)
    p50, p95, p99, p999, longest = (_rounded(ordered[min(len(ordered) - 1, int(q * len(ordered)))]) for q in parts)
    over = 1 - bisect_right(ordered, itl_target_s) / len(ordered)
    return InterTokenLatencies(p50, p95, p99, round(over, 5), tuple(map(_rounded, curve(ordered))), p999, longest)


def curve(ordered: Sequence[float]) -> list[float]:
    """Quantiles at even steps from 0 to 1, at most a few hundred."""
    last = len(ordered) - 1
    points = min(CURVE_POINTS, last)
    return [ordered[round(last * number / points)] for number in range(points + 1)] if points > 0 else list(ordered)


def tokens_by_second(calls: Iterable[Call], began: float) -> dict[str, list[float]]:
    """Output tokens that arrived in each second since the load test began, by lane."""
    seconds: dict[Lane, Counter[int]] = {}
    for call in calls:
        bins, each = seconds.setdefault(call.run.lane, Counter()), tokens_per_event(call)
        for second, events in Counter([int(moment - began) for moment in call.times]).items():
            bins[second] += events * each  # type: ignore[assignment]
    last = max((max(bins, default=0) for bins in seconds.values()), default=0)
    return {
        lane.name: [round(seconds[lane].get(second, 0), 2) for second in range(last + 1)]
        for lane in Lane
        if lane in seconds
    }


def generator_figures(rows: Iterable[CallRow], cpu: float) -> GeneratorFigures:
    lags_ms = sorted(row.lag_ms for row in rows)
    return GeneratorFigures(
        lag_p50_ms=percentile(lags_ms, 0.5) or 0.0,
        lag_p99_ms=percentile(lags_ms, 0.99) or 0.0,
        lag_max_ms=lags_ms[-1] if lags_ms else 0.0,
        cpu=round(cpu, 3),
    )


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
