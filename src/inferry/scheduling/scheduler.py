"""The scheduler: who goes next, with whom, and where.

One owner calls it, from one thread, with the time of its own clock; it never waits and never looks at a clock itself.
All it knows came in through `offer`, `cancel`, `observe`, `forget` and `progress`; all it decides goes out through
`tick`. The opinions live next door: `release` says when, `boarding` who is next, `shares` what lower lanes are owed,
`packing` who goes together, `placement` where.
"""

from collections.abc import Mapping

from inferry.domain.errors import QueueFull
from inferry.domain.jobs import InferenceJob, Lane, LanePolicy, RouteKey
from inferry.domain.plans import BatchPlan, Ended, FirstToken, ReleaseReason, Tick, Whereabouts, WorkerView
from inferry.scheduling import release
from inferry.scheduling.boarding import Boarding
from inferry.scheduling.due import Agenda
from inferry.scheduling.lanes import Line, Queue
from inferry.scheduling.packing import Use, WorkerState
from inferry.scheduling.placement import Route, changes_routes, serves
from inferry.scheduling.tickets import GONE, HELD, PLANNED, READY, Ticket

_IMMEDIATE = ReleaseReason.IMMEDIATE


class Scheduler:
    """Queues jobs and plans them onto workers, inside each worker's room."""

    def __init__(self, lanes: Mapping[Lane, LanePolicy]) -> None:
        for lane, policy in lanes.items():
            if not (0 <= policy.share < 1 and 0 <= policy.reserve < 1):
                raise ValueError(f"{lane.name}: share and reserve are at least 0 and less than 1")
        self._lines = tuple(Line(lane, lanes[lane]) for lane in sorted(lanes))
        self._line_of = [next((line for line in self._lines if line.lane is lane), None) for lane in Lane]
        self._tickets: dict[str, Ticket] = {}
        self._workers: dict[str, WorkerState] = {}
        self._routes: dict[RouteKey, Route] = {}
        self._holding: dict[Queue, None] = {}
        self._agenda = Agenda()
        self._boarding = Boarding(self._lines, self._agenda)
        self._offers = 0
        self._plans = 0
        # What the next tick has to look at. Without either flag only time can have changed anything.
        self._stirred = False
        self._calmed = False

    # What the owner tells it.

    def offer(self, job: InferenceJob, now: float) -> None:
        """Queue a job, held for company or ready to go. Raises QueueFull when its lane is at the limit."""
        job_id = job.job_id
        if job_id in self._tickets:
            raise ValueError(f"job {job_id} has already been offered")
        line = self._line_of[job.lane]
        if line is None:
            raise ValueError(f"no policy for lane {job.lane.name}")
        if line.depth >= line.policy.queue_limit:
            raise QueueFull(
                f"lane {job.lane.name} holds {line.depth} jobs, which is its limit",
                retry_after_s=line.drain.seconds_for(line.depth, now),
            )
        if not line.depth:
            line.drain.begin(now)
        line.depth += 1
        self._offers += 1
        route = self._routes.get(job.route) or self._new_route(job.route)
        queue = line.queue_for(job, route)
        ticket = self._tickets[job_id] = Ticket(job, self._offers, queue)
        if release.holds(line, route):
            self._hold(ticket)
        else:
            self._make_ready(ticket, _IMMEDIATE)

    def cancel(self, job_id: str) -> Whereabouts:
        """A queued job leaves at once. A planned one is counted until it has ended: only its worker can free it."""
        ticket = self._tickets.get(job_id)
        if ticket is None:
            return Whereabouts.UNKNOWN
        if ticket.stage is PLANNED:
            return Whereabouts.PLANNED
        self._leave_queue(ticket)
        return Whereabouts.QUEUED

    def observe(self, view: WorkerView, now: float) -> None:
        """Replace the belief about a worker."""
        worker = self._workers.get(view.worker)
        if worker is None:
            worker = self._workers[view.worker] = WorkerState(view.worker)
        old = worker.view
        worker.believe(view)
        if changes_routes(old, view):
            self._refresh_routes()
        if old is None or old.room != view.room or old.foreign != view.foreign:
            self._stirred = self._calmed = True

    def forget(self, worker: str) -> None:
        """Plan nothing more for the worker. What is in flight there stays counted until it has ended."""
        state = self._workers.get(worker)
        if state is None or state.view is None:
            return
        state.believe(None)
        if not state.sequences:
            del self._workers[worker]
        self._refresh_routes()

    def progress(self, job_id: str, step: FirstToken | Ended, now: float) -> None:
        """The job's prefill, or all it used, is free again. Late and repeated messages change nothing."""
        ticket = self._tickets.get(job_id)
        if ticket is None or (worker := ticket.worker) is None:
            return
        self._stirred = True
        if isinstance(step, FirstToken):
            worker.free_prefill(ticket)
            return
        worker.free(ticket)
        del self._tickets[job_id]
        if not worker.sequences:
            self._calmed = True
            if worker.view is None:
                del self._workers[worker.name]

    # What it decides.

    def tick(self, now: float) -> Tick:
        """Everything that can be decided now. A second tick at the same instant decides nothing."""
        expired = self._settle_what_is_due(now) if self._agenda.has_come(now) else ()
        if self._calmed:
            self._end_needless_holds()
        plans = self._fill_workers(now) if self._stirred else ()
        return Tick(plans, (), expired, self._agenda.next())

    # What it shows.

    @property
    def queued(self) -> int:
        return sum(line.depth for line in self._lines)

    @property
    def in_flight(self) -> int:
        return len(self._tickets) - self.queued

    def depths(self) -> dict[Lane, int]:
        """Queued jobs by lane."""
        return {line.lane: line.depth for line in self._lines}

    def use(self, worker: str) -> Use:
        """What this gateway's jobs in flight take up on the worker."""
        state = self._workers.get(worker)
        return Use() if state is None else state.own_use()

    def has_route(self, route: RouteKey) -> bool:
        """Whether some worker serves the route, up or not."""
        return any(state.view is not None and serves(state.view, route) for state in self._workers.values())

    # Holding and releasing.

    def _hold(self, ticket: Ticket) -> None:
        queue = ticket.queue
        until, ticket.reason = release.hold_until(ticket.job, queue.line)
        self._agenda.put(ticket, until)
        queue.hold(ticket)
        self._holding[queue] = None
        if release.is_full(queue):
            self._release(queue, ReleaseReason.SIZE)

    def _release(self, queue: Queue, reason: ReleaseReason) -> None:
        """Let everybody who is held in the queue go together."""
        for ticket in tuple(queue.held.values()):
            self._let_go(ticket)
            self._make_ready(ticket, reason)

    def _let_go(self, ticket: Ticket) -> None:
        queue = ticket.queue
        queue.let_go(ticket)
        if not queue.held:
            del self._holding[queue]

    def _make_ready(self, ticket: Ticket, reason: ReleaseReason) -> None:
        ticket.reason = reason
        deadline = ticket.job.deadline
        if deadline is not None:
            self._agenda.put(ticket, deadline)
        elif ticket.due is not None:
            self._agenda.drop(ticket)
        if ticket.queue.push(ticket):
            self._stirred = True

    def _leave_queue(self, ticket: Ticket) -> None:
        if ticket.stage is HELD:
            self._let_go(ticket)
            ticket.stage = GONE
        else:
            ticket.queue.strike(ticket)
            self._stirred = True
        self._agenda.drop(ticket)
        ticket.queue.line.depth -= 1
        del self._tickets[ticket.job.job_id]

    def _settle_what_is_due(self, now: float) -> tuple[InferenceJob, ...]:
        """End the holds and the jobs whose time has come, in order of time; return the jobs that expired."""
        expired = []
        while (ticket := self._agenda.pop(now)) is not None:
            if ticket.stage is READY:
                self._leave_queue(ticket)
                expired.append(ticket.job)
            elif ticket.reason is ReleaseReason.MAX_WAIT:
                self._let_go(ticket)
                self._make_ready(ticket, ReleaseReason.MAX_WAIT)
            else:
                self._release(ticket.queue, ticket.reason)
        return tuple(expired)

    def _end_needless_holds(self) -> None:
        """Workers have changed: release jobs that would not be held if they came now."""
        self._calmed = False
        for queue in tuple(self._holding):
            if not release.holds(queue.line, queue.route):
                self._release(queue, ReleaseReason.IMMEDIATE)
            elif release.is_full(queue):
                self._release(queue, ReleaseReason.SIZE)

    # Planning.

    def _fill_workers(self, now: float) -> tuple[BatchPlan, ...]:
        self._stirred = False
        drafts = self._boarding.fill_workers()
        first = self._plans + 1
        self._plans += len(drafts)
        return tuple([draft.plan(plan_id, now) for plan_id, draft in enumerate(drafts, first)])

    # Routes.

    def _new_route(self, key: RouteKey) -> Route:
        route = self._routes[key] = Route(key, self._workers.values())
        return route

    def _refresh_routes(self) -> None:
        """Workers came, went or changed their kind. Rare, so it is also when unused routes and queues are dropped."""
        for line in self._lines:
            line.prune()
            line.first_seen = None
        used = {queue.route.key: queue.route for line in self._lines for queue in line.queues.values()}
        for route in used.values():
            route.refresh(self._workers.values())
        self._routes = used
        self._stirred = self._calmed = True
