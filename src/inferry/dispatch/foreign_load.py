"""Bounds how long load of other clients keeps jobs from a worker.

An engine may count sequences that are not running any more, such as aborted calls. Foreign load that fills a worker
could then hold its jobs back for ever. Rule: where jobs wait for a worker's models, and the worker has had none of the
gateway's jobs for FOREIGN_HOLD_S, the scheduler is told that it has space for one job. The count starts again when that
job has ended.
"""

import logging
from collections.abc import Callable
from typing import Final

from inferry.domain.lanes import Lane
from inferry.domain.queue_depth import QueueDepth
from inferry.domain.values import replace
from inferry.domain.workers import Load, WorkerView

log = logging.getLogger(__name__)

FOREIGN_HOLD_S: Final = 5.0
"""Longest time for which foreign load alone keeps all jobs from a worker."""
_NO_LOAD: Final = Load()


class ForeignLoadBound:
    """`in_flight` is the number of the gateway's jobs at a worker."""

    def __init__(self, depth: QueueDepth, in_flight: Callable[[str], int]) -> None:
        self._depth = depth
        self._in_flight = in_flight
        # Workers with foreign load: their views, since when they keep jobs waiting, which may take one job.
        self._views: dict[str, WorkerView] = {}
        self._held_since: dict[str, float] = {}
        self._open: set[str] = set()
        self._logged: set[str] = set()

    def bounded(self, view: WorkerView, now: float) -> WorkerView:
        """The view for the scheduler."""
        if view.foreign == _NO_LOAD:
            self.forget(view.worker)
            return view
        self._views[view.worker] = view
        self._update(view, now)
        return _with_space_for_one(view) if view.worker in self._open else view

    def refresh(self, now: float) -> list[WorkerView]:
        """Views of the workers that may take one job from now on, or no longer."""
        return [
            _with_space_for_one(view) if worker in self._open else view
            for worker, view in self._views.items()
            if self._update(view, now)
        ]

    def forget(self, worker: str) -> None:
        self._views.pop(worker, None)
        self._held_since.pop(worker, None)
        self._open.discard(worker)
        self._logged.discard(worker)

    def _update(self, view: WorkerView, now: float) -> bool:
        """Whether the worker may take one job has changed."""
        worker, was_open = view.worker, view.worker in self._open
        if self._in_flight(worker) or not self._has_waiting_jobs(view):
            self._held_since.pop(worker, None)
            self._open.discard(worker)
        elif now - self._held_since.setdefault(worker, now) >= FOREIGN_HOLD_S:
            self._open.add(worker)
            if worker not in self._logged:
                self._logged.add(worker)
                log.warning(
                    "worker %s reports %d sequences of other clients and has kept all jobs waiting for %.0f s; "
                    "jobs are sent one at a time",
                    worker,
                    view.foreign.running + view.foreign.waiting,
                    FOREIGN_HOLD_S,
                )
        return was_open is not (worker in self._open)

    def _has_waiting_jobs(self, view: WorkerView) -> bool:
        return any(self._depth.oldest_slo_start_at(lane, view.models) is not None for lane in Lane)


def _with_space_for_one(view: WorkerView) -> WorkerView:
    capacity = view.capacity
    sequences = 1 if capacity.sequences is None else min(capacity.sequences, 1)
    batch_sequences = None if capacity.batch_sequences is None else max(capacity.batch_sequences, 1)
    return replace(
        view, foreign=_NO_LOAD, capacity=replace(capacity, sequences=sequences, batch_sequences=batch_sequences)
    )
