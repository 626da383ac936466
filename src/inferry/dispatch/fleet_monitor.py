"""Keeps the scheduler's view of the workers current: their views, their computed capacity, and overdue calls.

Belongs to the dispatch loop. Capacity is recomputed every CAPACITY_INTERVAL_S while jobs are in flight; without jobs
only time changes it, and the first job computes it at once.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from inferry.dispatch.capacity import CAPACITY_INTERVAL_S, CapacityTracker
from inferry.dispatch.foreign_load import ForeignLoadBound
from inferry.dispatch.gpu_accounting import GpuAccounting
from inferry.dispatch.hedging import HedgePolicy
from inferry.dispatch.pool import Pool
from inferry.domain.attempts import Attempt
from inferry.domain.workers import WorkerView
from inferry.observe.metrics import Metrics
from inferry.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 1.0


class FleetMonitor:
    """`on_change` is called after the scheduler got a new view, `on_overdue` with each call whose first token is late;
    `has_jobs` says whether any job is in flight. The owner sets all three.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: Pool,
        capacity: CapacityTracker,
        foreign_load: ForeignLoadBound,
        hedging: HedgePolicy,
        gpu_accounting: GpuAccounting,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._capacity = capacity
        self._foreign_load = foreign_load
        self._hedging = hedging
        self._gpu_accounting = gpu_accounting
        self._metrics = metrics
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._logged_at = 0.0
        self.on_change: Callable[[], None] = lambda: None
        self.on_overdue: Callable[[Attempt, float], None] = lambda attempt, now: None
        self.has_jobs: Callable[[], bool] = lambda: False

    def use_lanes(self) -> None:
        """The lanes have other SLO targets: capacities follow when they are computed next."""
        self._capacity.use_lanes()

    def view_changed(self, worker: str) -> None:
        view = self._pool.view(worker)
        self._metrics.register_models(view.models)
        self._metrics.register_worker(worker)
        now = self._now()
        self._gpu_accounting.add_worker(view, now)
        self._scheduler.observe(self._foreign_load.bounded(self._capacity.update_view(view, now), now), now)
        self.on_change()

    def forget(self, worker: str) -> None:
        """The worker was removed."""
        self._scheduler.forget(worker)
        self._capacity.forget(worker)
        self._foreign_load.forget(worker)
        self._hedging.forget(worker)
        self._gpu_accounting.forget(worker)
        self._metrics.remove_worker(worker)

    def used_fraction(self, view: WorkerView) -> float:
        """The part of the worker's sequences or KV tokens that jobs in flight use, whichever is larger."""
        use, capacity = self._scheduler.use(view.worker), self._capacity.capacity_of(view)
        amounts = ((use.sequences, capacity.sequences), (use.kv_tokens, capacity.kv_tokens))
        return max([used / limit for used, limit in amounts if limit], default=0.0)

    def take_hedge_token(self) -> bool:
        """Whether one more call may be retried for being overdue; if so it is counted."""
        return self._hedging.take_token()

    def resume(self) -> None:
        """A job is in flight: compute capacities now and then regularly, unless that is already under way."""
        if self._timer is None:
            self._refresh()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _refresh(self) -> None:
        self._timer = None
        now = self._now()
        if log.isEnabledFor(logging.DEBUG) and now >= self._logged_at + LOG_INTERVAL_S:
            self._logged_at = now
            for line in self._capacity.describe():
                log.debug(line)
        changed = [self._foreign_load.bounded(view, now) for view in self._capacity.refresh(now)]
        for view in changed + self._foreign_load.refresh(now):
            self._scheduler.observe(view, now)
            self.on_change()
        self._gpu_accounting.refresh(now)
        for attempt in self._hedging.due(self._pool.last_activity_at, now):
            self.on_overdue(attempt, now)
        if self.has_jobs():
            self._timer = self._loop.call_later(CAPACITY_INTERVAL_S, self._refresh)
