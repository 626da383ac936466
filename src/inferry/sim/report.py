"""Figures of a simulation: per lane, per arm, and over several seeds.

Rows are counted one at a time. The values for percentiles are kept in compact arrays: a million calls take about 40 MB,
and every percentile is exact.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

import msgspec
from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.sim.calls import CallRow, RunRow
from inferry.sim.costs import CostModel
from inferry.sim.engine import Engine
from inferry.sim.simulation import Simulation

HARBOR_TTFT_S = {Lane.P0: 0.5, Lane.P1: 2.0, Lane.P2: 90.0}

WorkFunction = Callable[[CallRow], float]
"""The service that a call needs, in any unit."""


class LaneReport(Struct, frozen=True, kw_only=True):
    """One lane; times in seconds. `attainment`: calls that met their SLO target, over planned calls.

    A call meets its target when token i arrives within ttft + i * itl. Cancelled runs have no planned calls; a run that
    breaks misses its later steps. `itl` is the mean inter-token latency of a call. `goodput` is the output tokens per
    second of calls that met their target, over the whole simulation. `fairness` is Jain's index over the lane's tenants
    of the slowdown of each relative to an idle engine: 1 when all are slowed down equally.
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
    step_p99: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_p99: float | None
    run_p50: float | None
    run_p95: float | None
    wait_p95: float | None
    """Time before a call was sent to an engine."""
    goodput: float
    fairness: float


class Report(Struct, frozen=True, kw_only=True):
    """One arm. Rates are per second of `wall_s`; `goodput` counts the output of calls that met their target.

    `utilisation` is the fraction of time in which engines computed, `server_utilisation` that of their server
    processes. `fairness` is that of the least fair lane.
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
    workers: int = 1
    seed: int | None = None


def quantile(values: Iterable[float], part: float) -> float | None:
    """The quantile of the values, `part` from 0 to 1."""
    return _quantile_of_sorted(sorted(values), part)


def jain_index(shares: Sequence[float]) -> float:
    """Jain's index: 1 when all shares are equal, 1/n when one has everything."""
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def attains(row: CallRow, ttft_s: float | None) -> bool:
    """Whether a call met its target; without a target, whether it is done."""
    return row.outcome == "done" and (ttft_s is None or (row.late_s is not None and row.late_s <= ttft_s))


def requested_tokens(row: CallRow) -> float:
    return row.prompt - row.cached + row.output


def unloaded_seconds(costs: CostModel) -> WorkFunction:
    """Seconds that an idle engine would take for the call, with the same cached tokens."""

    def work(row: CallRow) -> float:
        prompt = row.prompt - row.cached
        prefill = costs.prefill_s(prompt, prompt * (row.cached + row.prompt) / 2)
        return costs.base_s + prefill + row.output * costs.decode_s(1, row.prompt)

    return work


class LaneTally:
    """The calls and runs of one lane so far, against its target."""

    def __init__(self, ttft_s: float | None, work: WorkFunction) -> None:
        self._ttft_s = ttft_s
        self._work = work
        self.planned = self.runs = self.calls = self.attained = self.failed = self.cancelled = 0
        self.goodput_tokens = 0
        self._ttfts, self._ends, self._itls, self._waits, self._latencies = (array("d") for _ in range(5))
        # Service requested and time taken, by tenant.
        self._served: dict[str, list[float]] = {}

    def call(self, row: CallRow) -> None:
        self.calls += 1
        if row.sent_s is not None:
            self._waits.append(row.sent_s)
        if row.outcome == "cancelled":
            return
        self.failed += row.outcome != "done"
        if attains(row, self._ttft_s):
            self.attained += 1
            self.goodput_tokens += row.produced
        if row.ttft_s is not None:
            self._ttfts.append(row.ttft_s)
            if row.produced > 1:
                self._itls.append((row.end_s - row.ttft_s) / (row.produced - 1))
        self._ends.append(row.end_s)
        served = self._served.get(row.tenant)
        if served is None:
            served = self._served[row.tenant] = [0.0, 0.0]
        if row.outcome == "done":
            served[0] += self._work(row)
        served[1] += row.end_s

    def run(self, row: RunRow) -> None:
        self.runs += 1
        self.cancelled += row.cancelled
        if not row.cancelled:
            self.planned += row.planned
        if row.ok:
            self._latencies.append(row.latency_s)

    def report(self, wall_s: float) -> LaneReport:
        ttfts, ends, itls = sorted(self._ttfts), sorted(self._ends), sorted(self._itls)
        latencies = sorted(self._latencies)
        return LaneReport(
            planned=self.planned,
            calls=self.calls,
            attained=self.attained,
            attainment=min(1.0, self.attained / max(1, self.planned)),
            failed=self.failed,
            cancelled=self.cancelled,
            ttft_p50=_quantile_of_sorted(ttfts, 0.5),
            ttft_p95=_quantile_of_sorted(ttfts, 0.95),
            ttft_p99=_quantile_of_sorted(ttfts, 0.99),
            step_p50=_quantile_of_sorted(ends, 0.5),
            step_p95=_quantile_of_sorted(ends, 0.95),
            step_p99=_quantile_of_sorted(ends, 0.99),
            itl_p50=_quantile_of_sorted(itls, 0.5),
            itl_p95=_quantile_of_sorted(itls, 0.95),
            itl_p99=_quantile_of_sorted(itls, 0.99),
            run_p50=_quantile_of_sorted(latencies, 0.5),
            run_p95=_quantile_of_sorted(latencies, 0.95),
            wait_p95=quantile(self._waits, 0.95),
            goodput=self.goodput_tokens / max(wall_s, 1e-9),
            fairness=jain_index([work / max(open_s, 1e-9) for work, open_s in self._served.values()]),
        )


class Tally:
    """Figures row by row. `call` and `run` are callbacks for a simulation that keeps no rows."""

    def __init__(self, ttft_s: Mapping[Lane, float] = HARBOR_TTFT_S, work: WorkFunction = requested_tokens) -> None:
        self._lanes = {lane: LaneTally(ttft_s.get(lane), work) for lane in Lane}
        self._wall_s = self._live_done_s = 0.0
        self._produced = 0

    def call(self, row: CallRow) -> None:
        self._lanes[row.lane].call(row)
        self._produced += row.produced
        ended = row.at + row.end_s
        if ended > self._wall_s:
            self._wall_s = ended
        if ended > self._live_done_s and row.lane is not Lane.P2:
            self._live_done_s = ended

    def run(self, row: RunRow) -> None:
        self._lanes[row.lane].run(row)
        self._wall_s = max(self._wall_s, row.at + row.latency_s)

    def report(self, arm: str, engines: Sequence[Engine], seed: int | None = None) -> Report:
        span = max(self._wall_s, 1e-9)
        queried = sum(engine.pool.queried_tokens for engine in engines)
        tallies = {lane: tally for lane, tally in self._lanes.items() if tally.runs or tally.calls}
        lanes = {lane.name: tally.report(span) for lane, tally in tallies.items()}
        return Report(
            arm=arm,
            calls=sum(tally.calls for tally in tallies.values()),
            failed=sum(tally.failed for tally in tallies.values()),
            wall_s=self._wall_s,
            live_done_s=self._live_done_s,
            output_tokens=self._produced,
            output_rate=self._produced / span,
            goodput=sum(tally.goodput_tokens for tally in tallies.values()) / span,
            utilisation=sum(engine.busy_s for engine in engines) / span / len(engines),
            server_utilisation=sum(engine.server.busy_s for engine in engines) / span / len(engines),
            cache_hit_share=sum(engine.pool.hit_tokens for engine in engines) / max(1, queried),
            preemptions=sum(engine.preemptions for engine in engines),
            fairness=min((lane.fairness for lane in lanes.values()), default=1.0),
            lanes=lanes,
            workers=len(engines),
            seed=seed,
        )


def lane_report(
    rows: Iterable[CallRow], runs: Iterable[RunRow], ttft_s: float | None, work: WorkFunction = requested_tokens
) -> LaneReport:
    """The rows and runs of one lane against its target; without a target every completed call meets it."""
    tally = LaneTally(ttft_s, work)
    wall = 0.0
    for row in rows:
        tally.call(row)
        wall = max(wall, row.at + row.end_s)
    for run in runs:
        tally.run(run)
    return tally.report(wall)


def report(
    simulation: Simulation, arm: str, ttft_s: Mapping[Lane, float] = HARBOR_TTFT_S, *, seed: int | None = None
) -> Report:
    """The report of everything that the simulation has played."""
    tally = Tally(ttft_s, unloaded_seconds(simulation.costs))
    for row in simulation.rows:
        tally.call(row)
    for run in simulation.runs:
        tally.run(run)
    return tally.report(arm, simulation.engines, seed)


def to_json(reports: Sequence[Report]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(reports), indent=2)


class Spread(Struct, frozen=True, gc=False):
    """A figure over several seeds; `count` seeds have it."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    present = [value for value in values if value is not None]
    return Spread(median(present), min(present), max(present), len(present)) if present else None


class Comparison(Struct, frozen=True, kw_only=True):
    """One arm over its seeds: every report, and the spread of every figure of the arm and of its lanes."""

    arm: str
    reports: tuple[Report, ...]
    over_seeds: dict[str, Spread]
    lanes: dict[str, dict[str, Spread]]


def compare(reports: Sequence[Report]) -> Comparison:
    """Reports of one arm, one per seed."""
    names = [lane.name for lane in Lane if any(lane.name in one.lanes for one in reports)]
    return Comparison(
        arm=reports[0].arm,
        reports=tuple(reports),
        over_seeds=_spreads(reports),
        lanes={name: _spreads([one.lanes[name] for one in reports if name in one.lanes]) for name in names},
    )


def _spreads(rows: Sequence[Struct]) -> dict[str, Spread]:
    spreads = {}
    for name in type(rows[0]).__struct_fields__:
        values = [getattr(row, name) for row in rows]
        if name not in ("seed", "workers") and all(value is None or isinstance(value, int | float) for value in values):
            found = spread(values)
            if found is not None:
                spreads[name] = found
    return spreads


def _quantile_of_sorted(ordered: Sequence[float], part: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None
