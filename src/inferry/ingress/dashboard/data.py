"""Collects what the dashboard shows: metrics, workers, runs, and what the ledger has recorded.

Belongs to the event loop of its gateway. One snapshot serves all viewers: it is made at most once per `FRESH_S`. Rates
and quantiles change with each sample of the metrics; queues, workers and runs are those of the moment. Nothing is
collected while there are no viewers, except one point of the charts per sample. The ledger is read off the event loop,
for a small part of the time at most.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from inferry._version import __version__
from inferry.dispatch.gateway import Gateway, Run, RunStatus, tree_totals
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry
from inferry.ingress.dashboard import overview
from inferry.ingress.dashboard.timeline import timeline_steps
from inferry.ingress.dashboard.values import LiveState, RunState, TenantCosts, Timeline
from inferry.ingress.openapi.responses import AlertDetail
from inferry.ingress.run_timeline import TimelineCall, live_call, recorded_call
from inferry.observe.figures import FigureHistory, Figures, figures
from inferry.observe.history import MetricHistory

log = logging.getLogger(__name__)

FRESH_S = 0.5
"""A snapshot is used again for this long."""
MINUTE_S = 60.0
MAX_RUNS = 24
MAX_TREE_RUNS = 1000
"""Runs of one tree that are summed for a snapshot."""
MAX_STEPS = 500
COST_PERIOD_S = 86_400.0
RUN_PERIOD_S = 600.0
READ_INTERVAL_S = 10.0
READ_TIME_FACTOR = 50.0
"""The ledger is read again after this multiple of the time that the last read took."""


class LedgerReader(Protocol):
    """Queries of the ledger. They block."""

    def tenants(self, *, since: float | None = None) -> Sequence[Any]: ...
    def runs(self, *, limit: int, since: float | None = None) -> Sequence[Any]: ...
    def jobs(self, *, limit: int, tenant: str | None = None, run: str | None = None) -> list[LedgerEntry]: ...
    def close(self) -> None: ...


OpenLedger = Callable[[], LedgerReader | None]
ReadAlerts = Callable[[], Sequence[dict[str, object]]]


class DashboardData:
    """`open_ledger` returns None where no ledger can be read, `alerts` is None where no rules are loaded."""

    def __init__(
        self,
        gateway: Gateway,
        history: MetricHistory,
        lanes: Mapping[Lane, LanePolicy],
        open_ledger: OpenLedger,
        alerts: ReadAlerts | None = None,
    ) -> None:
        self._gateway = gateway
        self._lanes = lanes
        self._alerts = alerts
        self.points = FigureHistory(history)
        self._history = history
        self._minute: tuple[int, Figures] | None = None
        self._started_at = gateway.wall()
        self._recorded = _RecordedFacts(open_ledger, gateway.wall)
        self._live: tuple[float, bytes] | None = None
        self._series: tuple[int, bytes] | None = None

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def live(self) -> bytes:
        """The gateway now, as JSON."""
        now = self._gateway.now()
        if self._live is None or now >= self._live[0] + FRESH_S:
            self._live = (now, msgspec.json.encode(self._live_state(now)))
        return self._live[1]

    def series(self) -> bytes:
        """The last minutes, as JSON. `points.version` says whether it has changed."""
        version = self.points.version
        if self._series is None or self._series[0] != version:
            self._series = (version, msgspec.json.encode(overview.series_of(self.points.points, self._epoch)))
        return self._series[1]

    def overview(self) -> bytes:
        """Both, as one JSON object: an `Overview`."""
        return self.live()[:-1] + b',"series":' + self.series() + b"}"

    @property
    def _epoch(self) -> float:
        return self._gateway.wall() - self._gateway.now()

    def _live_state(self, now: float) -> LiveState:
        gateway, wall = self._gateway, self._gateway.wall()
        self._recorded.refresh()
        moment, minute = self.points.latest, self._last_minute(now)
        lanes = overview.lane_states(moment, minute, self._lanes, gateway.queue_depths())
        workers = overview.worker_states(gateway.worker_reports(), gateway.views(), minute)
        return LiveState(
            at=wall,
            version=__version__,
            started_at=self._started_at,
            status="draining" if gateway.is_draining else "ready" if gateway.is_ready else "starting",
            totals=overview.totals(moment, minute, lanes, workers, gateway.in_flight),
            lanes=lanes,
            workers=workers,
            runs=self.runs(MAX_RUNS),
            costs=self._recorded.costs,
            alerts=None if self._alerts is None else msgspec.convert(self._alerts(), list[AlertDetail]),
        )

    def _last_minute(self, now: float) -> Figures:
        """Figures of the last minute, made again with each sample of the metrics."""
        version = self.points.version
        if self._minute is None or self._minute[0] != version:
            self._minute = (version, figures(self._history, MINUTE_S, now))
        return self._minute[1]

    # -- runs --------------------------------------------------------------------------------------------------------

    def runs(self, limit: int) -> list[RunState]:
        """The latest runs of all tenants: those with calls in flight first, then the others by their last call."""
        gateway, epoch = self._gateway, self._epoch
        live = [self._live_run(run, status, epoch) for run, status in gateway.all_runs(limit)]
        known = {(run.tenant, run.id) for run in live}
        recorded = [
            overview.recorded_run(row, is_cancelled=gateway.is_run_cancelled(row.tenant, row.run_id))
            for row in self._recorded.runs
            if row.parent_run is None
            and (row.tenant, row.run_id) not in known
            and not gateway.has_run(row.tenant, row.run_id)
        ]
        # Active runs keep their order while they call.
        active = [run for run in live if run.tree_in_flight]
        others = [run for run in live if not run.tree_in_flight] + recorded
        active.sort(key=lambda run: -run.started_at)
        others.sort(key=lambda run: -run.last_active_at)
        return (active + others)[:limit]

    def _live_run(self, run: Run, status: RunStatus, epoch: float) -> RunState:
        tree = tree_totals(run, MAX_TREE_RUNS)
        is_partial = tree[1] >= MAX_TREE_RUNS
        return overview.live_run(run, status, epoch, self._gateway.attempt_of, tree, is_partial=is_partial)

    async def timeline(self, tenant: str, run_id: str) -> Timeline | None:
        """The latest attempts of a run; None for an unknown run."""
        rows = await asyncio.to_thread(self._recorded.attempts, tenant, run_id)
        snapshot = self._gateway.run_snapshot(tenant, run_id)
        if snapshot is None and not rows:
            return None
        calls = [recorded_call(row) for row in rows]
        calls += [self._live_call(job) for job in (() if snapshot is None else snapshot.in_flight)]
        steps = timeline_steps(calls)
        return Timeline(id=run_id, tenant=tenant, at=self._gateway.wall(), steps=steps[-MAX_STEPS:])

    def _live_call(self, job: InferenceJob) -> TimelineCall:
        attempt = self._gateway.attempt_of(job.job_id)
        decision = None if attempt is None else self._gateway.decision_of(attempt)
        return live_call(job, attempt, decision, self._epoch)

    async def close(self) -> None:
        await self._recorded.close()


class _RecordedFacts:
    """Costs and runs of the ledger. `refresh` starts a read where the last one is old enough."""

    def __init__(self, open_ledger: OpenLedger, wall: Callable[[], float]) -> None:
        self.costs: TenantCosts | None = None
        self.runs: Sequence[Any] = ()
        self._open = open_ledger
        self._wall = wall
        self._next_read_at = 0.0
        self._reading: asyncio.Task[None] | None = None

    def refresh(self) -> None:
        if self._reading is None and time.monotonic() >= self._next_read_at:
            self._reading = asyncio.get_running_loop().create_task(self._refresh())

    def attempts(self, tenant: str, run_id: str) -> list[LedgerEntry]:
        """The latest attempts of a run. Blocks."""
        reader = self._open()
        if reader is None:
            return []
        try:
            return reader.jobs(limit=MAX_STEPS, tenant=tenant, run=run_id)
        finally:
            reader.close()

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _refresh(self) -> None:
        began = time.monotonic()
        try:
            self.costs, self.runs = await asyncio.to_thread(self._read, self._wall())
        except Exception:
            log.exception("the dashboard could not read the ledger")
        finally:
            took_s = time.monotonic() - began
            self._next_read_at = time.monotonic() + max(READ_INTERVAL_S, READ_TIME_FACTOR * took_s)
            self._reading = None

    def _read(self, wall: float) -> tuple[TenantCosts | None, Sequence[Any]]:
        reader = self._open()
        if reader is None:
            return None, ()
        try:
            since = wall - COST_PERIOD_S
            costs = overview.tenant_costs(reader.tenants(since=since), since, wall)
            return costs, reader.runs(limit=MAX_RUNS, since=wall - RUN_PERIOD_S)
        finally:
            reader.close()
