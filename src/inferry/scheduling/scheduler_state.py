"""What the scheduler shows of its state: queues, service, decisions and sessions."""

from collections.abc import Mapping, Sequence

from inferry.domain.decisions import Decision
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.plans import CapacityUse, QueuedAhead
from inferry.domain.routes import RouteKey
from inferry.domain.workers import Phase, WorkerView
from inferry.scheduling.decision_record import decision_of
from inferry.scheduling.queues import service_history, statistics
from inferry.scheduling.queues.lane_queue import LaneQueue
from inferry.scheduling.queues.queued_job import QueuedJob
from inferry.scheduling.rules import FILTERS
from inferry.scheduling.sessions import SessionCounts, SessionLimits, Sessions
from inferry.scheduling.worker_state import WorkerState


class SchedulerState:
    """The state that is read from outside; `Scheduler` changes it."""

    def __init__(self, sessions: SessionLimits | None) -> None:
        self._service_history = service_history.ServiceHistory()
        self._lane_queues: Sequence[LaneQueue] = ()
        self._lane_queue_of: list[LaneQueue | None] = []
        self._entries: dict[str, QueuedJob] = {}
        self._workers: dict[str, WorkerState] = {}
        self._expired_decisions: dict[str, Decision] = {}
        self._sessions = None if sessions is None else Sessions(sessions)

    @property
    def queued(self) -> int:
        return sum(lane_queue.depth for lane_queue in self._lane_queues)

    @property
    def in_flight(self) -> int:
        return len(self._entries) - self.queued

    def service(self) -> Mapping[str, int]:
        """Tokens served to every tenant since the start, as far as they are known."""
        return statistics.service(self._lane_queues, self._service_history.served)

    def jain_index(self, lane: Lane | None = None) -> float:
        """Jain's index of the service of tenants that have jobs now, in one lane or all."""
        return statistics.jain_index(self._lane_queues, lane, self._service_history.served)

    def ahead(self, lane: Lane, tenant: str | None = None) -> QueuedAhead:
        """What is queued before a job of this lane and tenant that would arrive now."""
        return statistics.ahead(self._lane_queues, lane, tenant)

    def has_rivals(self, job: InferenceJob) -> bool:
        """Whether jobs that wait at or above the job's lane want a worker that it may use; true if that is unknown."""
        lane_queue = self._lane_queue_of[job.lane]
        own = None if lane_queue is None else lane_queue.known_queue(job)
        if own is None:
            return True
        above = [lane_queue for lane_queue in self._lane_queues if lane_queue.rules.number <= job.lane]
        return any(own.route.overlaps(queue.route) for lane_queue in above for queue in lane_queue.waiting)

    def use(self, worker: str) -> CapacityUse:
        """What this gateway's jobs in flight take up on the worker."""
        return self._workers[worker].own_use() if worker in self._workers else CapacityUse()

    def decision(self, job_id: str, now: float) -> Decision | None:
        """The record of a job that is queued, was just planned, or expired in the last tick."""
        entry = self._entries.get(job_id)
        if entry is None:
            return self._expired_decisions.get(job_id)
        return decision_of(entry, self._lane_queue_of[entry.lane], now)

    def predicted_kv_tokens(self) -> dict[str, int]:
        """The predicted KV peak by worker."""
        return {name: worker.predicted_kv_tokens() for name, worker in self._workers.items()}

    def has_route(self, route: RouteKey) -> bool:
        """Whether some worker serves the route, up or not."""
        views = [worker.view for worker in self._workers.values() if worker.view is not None]
        return any(all(allows(view, route) for allows in FILTERS) for view in views)

    def views_up(self, lane: Lane, route: RouteKey) -> list[WorkerView]:
        """The workers of the lane's own groups that are up and serve the route."""
        lane_queue = self._lane_queue_of[lane]
        groups = None if lane_queue is None else lane_queue.rules.groups
        return [
            view
            for worker in self._workers.values()
            if (view := worker.view) is not None
            and view.phase is Phase.READY
            and (groups is None or view.group in groups)
            and all(allows(view, route) for allows in FILTERS)
        ]

    def session_counts(self) -> SessionCounts:
        """Resident and paused runs."""
        return SessionCounts(0, 0, 0, 0.0) if self._sessions is None else self._sessions.counts()
