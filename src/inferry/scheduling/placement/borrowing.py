"""When batch lanes use idle workers of other groups, and when they give them back.

A lane with `borrow_groups` may use the workers of another group while no live job needs that group: none is queued for
it, none is in flight there, and none was for `LEND_AFTER_S`. The first live job ends the loan: in the same tick the
group is closed to the lane, and the jobs that it has in flight there are evicted. Only jobs that can be stopped at any
time borrow a worker (`QueuedJob.stays_in_groups`).
"""

from collections.abc import Iterable, Sequence
from typing import Final

from inferry.domain.jobs import InferenceJob
from inferry.scheduling.capacity.prefill_bucket import TickContext
from inferry.scheduling.queues.lane_queue import LaneQueue
from inferry.scheduling.worker_state import WorkerState

LEND_AFTER_S: Final = 1.0
"""Seconds without a live job before a group is lent: agents pause less between two steps."""


class Borrowing:
    """Which worker groups are lent. `is_enabled` where some lane may borrow."""

    __slots__ = ("_borrowers", "_last_live_at", "_live_groups", "_live_lanes", "is_enabled")

    def __init__(self, lane_queues: Sequence[LaneQueue]) -> None:
        self._live_groups: set[str] = set()
        self._last_live_at: dict[str, float] = {}
        self.use_lane_rules(lane_queues)

    def use_lane_rules(self, lane_queues: Sequence[LaneQueue]) -> None:
        """Follow which lanes may borrow, and which are live."""
        self._borrowers = [lane_queue for lane_queue in lane_queues if lane_queue.rules.borrow_groups]
        self._live_lanes = [lane_queue for lane_queue in lane_queues if lane_queue.rules.is_live]
        self.is_enabled = bool(self._borrowers)

    def update(self, workers: Iterable[WorkerState], tick_context: TickContext) -> tuple[bool, list[InferenceJob]]:
        """Lend idle groups and take back the others: whether a route has changed, and the jobs to evict."""
        now = tick_context.now
        live = self._groups_in_use(workers)
        for group in live | self._live_groups:  # a group in use at the last update was in use until now
            self._last_live_at[group] = now
        self._live_groups = live
        is_changed = False
        for lane_queue in self._borrowers:
            for route in lane_queue.routes.values():
                lent = frozenset(group for group in route.borrowable if self._is_idle(group, now))
                is_changed = route.borrow(lent) or is_changed
                for group in route.borrowable:
                    if group not in lent and group not in live:
                        tick_context.schedule_retry(self._last_live_at[group] + LEND_AFTER_S)
        evicted: list[InferenceJob] = []
        for worker in workers:
            if worker.borrowers and worker.group is not None and not self._is_idle(worker.group, now):
                for entry in list(worker.borrowers):
                    worker.evict(entry)
                    evicted.append(entry.job)
        return is_changed, evicted

    def _groups_in_use(self, workers: Iterable[WorkerState]) -> set[str]:
        """Groups with a live job: in flight on one of their workers, or queued for one."""
        needed = [worker for worker in workers if worker.live_sequences]
        for lane_queue in self._live_lanes:
            for queue in lane_queue.queues.values():
                if queue.size or queue.held:
                    needed += queue.route.workers
        return {worker.group for worker in needed if worker.group is not None}

    def _is_idle(self, group: str, now: float) -> bool:
        last_live_at = self._last_live_at.get(group)
        return last_live_at is None or now >= last_live_at + LEND_AFTER_S
