"""What came of a simulation, as numbers: per lane, per arm, as data."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from inferry.domain.jobs import Lane
from inferry.sim.calls import CallRow, RunRow
from inferry.sim.world import World

HARBOR_TTFT_S = {Lane.P0: 0.5, Lane.P1: 2.0, Lane.P2: 90.0}


class LaneReport(Struct, frozen=True, kw_only=True):
    """One lane, in seconds. `attainment`: calls that kept their promise, over the calls that were planned.

    A call keeps its promise when its i-th token comes by first-token time + i * gap. Runs that were abandoned plan
    nothing; a run that breaks loses its later steps. `gap` is the mean gap of a call.
    """

    planned: int
    calls: int
    attained: int
    attainment: float
    failed: int
    cancelled: int
    ttft_p50: float | None
    ttft_p95: float | None
    ttft_p99: float | None
    step_p50: float | None
    step_p95: float | None
    gap_p50: float | None
    gap_p95: float | None
    run_p50: float | None
    run_p95: float | None
    wait_p95: float | None
    """Time before the call was sent to an engine."""


class Report(Struct, frozen=True, kw_only=True):
    """One arm. Rates are per second of `wall_s`; `goodput` counts the output of calls that kept their promise.

    `utilisation` is the part of the time in which engines computed; `server_utilisation` the same of the processes in
    front of them. `fairness` is Jain's index over the tokens that live tenants were served.
    """

    arm: str
    calls: int
    failed: int
    wall_s: float
    live_done_s: float
    output_tokens: int
    output_rate: float
    goodput: float
    utilisation: float
    server_utilisation: float
    cache_hit_share: float
    preemptions: int
    fairness: float
    lanes: dict[str, LaneReport]


def quantile(values: Iterable[float], part: float) -> float | None:
    """The value with `part` of the others below it; the last one where there is no such."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None


def jain(shares: Sequence[float]) -> float:
    """1 when all shares are equal, 1/n when one has everything."""
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def attains(row: CallRow, ttft_s: float) -> bool:
    return row.outcome == "done" and row.late_s is not None and row.late_s <= ttft_s


def lane_report(rows: Sequence[CallRow], runs: Sequence[RunRow], ttft_s: float | None) -> LaneReport:
    """The rows and runs of one lane against its promise; no promise is always kept."""
    planned = sum(run.planned for run in runs if not run.cancelled)
    whole = [row for row in rows if row.outcome != "cancelled"]
    attained = sum(row.outcome == "done" if ttft_s is None else attains(row, ttft_s) for row in whole)
    ttfts = [row.ttft_s for row in whole if row.ttft_s is not None]
    ends = [row.end_s for row in whole]
    gaps = [
        (row.end_s - row.ttft_s) / (row.produced - 1) for row in whole if row.ttft_s is not None and row.produced > 1
    ]
    latencies = [run.latency_s for run in runs if run.ok]
    return LaneReport(
        planned=planned,
        calls=len(rows),
        attained=attained,
        attainment=min(1.0, attained / max(1, planned)),
        failed=sum(row.outcome in ("failed", "expired") for row in rows),
        cancelled=sum(run.cancelled for run in runs),
        ttft_p50=quantile(ttfts, 0.5),
        ttft_p95=quantile(ttfts, 0.95),
        ttft_p99=quantile(ttfts, 0.99),
        step_p50=quantile(ends, 0.5),
        step_p95=quantile(ends, 0.95),
        gap_p50=quantile(gaps, 0.5),
        gap_p95=quantile(gaps, 0.95),
        run_p50=quantile(latencies, 0.5),
        run_p95=quantile(latencies, 0.95),
        wait_p95=quantile([row.sent_s for row in rows if row.sent_s is not None], 0.95),
    )


def report(world: World, arm: str, ttft_s: Mapping[Lane, float] = HARBOR_TTFT_S) -> Report:
    """Everything that was played in the world so far."""
    rows, runs = world.rows, world.runs
    ends = [row.at + row.end_s for row in rows]
    wall = max([*ends, *(run.at + run.latency_s for run in runs)], default=0.0)
    live_done = max((row.at + row.end_s for row in rows if row.lane is not Lane.P2), default=0.0)
    good = sum(
        row.produced
        for row in rows
        if (attains(row, ttft_s[row.lane]) if row.lane in ttft_s else row.outcome == "done")
    )
    produced = sum(row.produced for row in rows)
    served: dict[str, float] = {}
    for row in rows:
        if row.lane is not Lane.P2:
            served[row.tenant] = served.get(row.tenant, 0) + row.produced + (row.prompt if row.produced else 0)
    engines = world.engines
    queried = sum(engine.pool.queried_tokens for engine in engines)
    span = max(wall, 1e-9)
    return Report(
        arm=arm,
        calls=len(rows),
        failed=sum(row.outcome in ("failed", "expired") for row in rows),
        wall_s=wall,
        live_done_s=live_done,
        output_tokens=produced,
        output_rate=produced / span,
        goodput=good / span,
        utilisation=sum(engine.busy_s for engine in engines) / span / len(engines),
        server_utilisation=sum(engine.server.busy_s for engine in engines) / span / len(engines),
        cache_hit_share=sum(engine.pool.hit_tokens for engine in engines) / max(1, queried),
        preemptions=sum(engine.preemptions for engine in engines),
        fairness=jain(list(served.values())),
        lanes={
            lane.name: lane_report(
                [row for row in rows if row.lane is lane], [run for run in runs if run.lane is lane], ttft_s.get(lane)
            )
            for lane in Lane
            if any(run.lane is lane for run in runs)
        },
    )


def to_json(reports: Sequence[Report]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(reports), indent=2)
