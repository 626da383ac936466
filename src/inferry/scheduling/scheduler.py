"""The scheduler: who goes next, with whom, and where.

One owner calls it, from one thread, with the time of its own clock; it never waits and never looks at a clock itself.
All it knows came in through `offer`, `cancel`, `observe`, `forget` and `progress`; all it decides goes out through
`tick`. The opinions live next door: `release` says when, `shares` which lane, `packing` with whom, `placement` where.
"""

from collections.abc import Mapping
from heapq import heapify, heappop, heapreplace

from inferry.domain.errors import QueueFull
from inferry.domain.jobs import InferenceJob, Lane, LanePolicy, RouteKey
from inferry.domain.plans import BatchPlan, Ended, FirstToken, ReleaseReason, Tick, Whereabouts, WorkerView
from inferry.scheduling import release
from inferry.scheduling.due import Agenda
from inferry.scheduling.lanes import Line, Queue
from inferry.scheduling.packing import Draft, Use, WorkerState, board
from inferry.scheduling.placement import Route, changes_routes, close, least_loaded, serves
from inferry.scheduling.shares import Shares
from inferry.scheduling.tickets import Stage, Ticket


class Scheduler:
    """Queues jobs and plans them onto workers, inside each worker's room."""

    def __init__(self, lanes: Mapping[Lane, LanePolicy]) -> None:
        for lane, policy in lanes.items():
            if not 0 <= policy.share < 1:
                raise ValueError(f"{lane.name}: a share is at least 0 and less than 1, not {policy.share}")
        self._lines = {lane: Line(lane, lanes[lane]) for lane in sorted(lanes)}
        self._shares = Shares(self._lines.values())
        self._tickets: dict[str, Ticket] = {}
        self._workers: dict[str, WorkerState] = {}
        self._routes: dict[RouteKey, Route] = {}
        self._holding: dict[Queue, None] = {}
        self._agenda = Agenda()
        self._offers = 0
        self._plans = 0
        self._walks = 0
        # What the next tick has to look at. Without either flag only time can have changed anything.
        self._stirred = False
        self._calmed = False

    # What the owner tells it.

    def offer(self, job: InferenceJob, now: float) -> None:
        """Queue a job, held for company or ready to go. Raises QueueFull when its lane is at the limit."""
        if job.job_id in self._tickets:
            raise ValueError(f"job {job.job_id} has already been offered")
        line = self._lines[job.lane]
        if line.depth >= line.policy.queue_limit:
            raise QueueFull(
                f"lane {job.lane.name} holds {line.depth} jobs, which is its limit",
                retry_after_s=line.drain.seconds_for(line.depth, now),
            )
        if not line.depth:
            line.drain.begin(now)
        line.depth += 1
        self._offers += 1
        route = self._route(job.route)
        queue = line.queue_for(job, route)
        ticket = self._tickets[job.job_id] = Ticket(job, self._offers, queue)
        if release.holds(line, route):
            self._hold(ticket)
        else:
            self._make_ready(ticket, ReleaseReason.IMMEDIATE)

    def cancel(self, job_id: str) -> Whereabouts:
        """A queued job leaves at once. A planned one is counted until it has ended: only its worker can free it."""
        ticket = self._tickets.get(job_id)
        if ticket is None:
            return Whereabouts.UNKNOWN
        if ticket.stage is Stage.PLANNED:
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
        expired = self._settle_what_is_due(now)
        if self._calmed:
            self._end_needless_holds()
        plans = self._fill_workers(now) if self._stirred else ()
        return Tick(plans, (), expired, self._agenda.next())

    # What it shows.

    @property
    def queued(self) -> int:
        return sum(line.depth for line in self._lines.values())

    @property
    def in_flight(self) -> int:
        return len(self._tickets) - self.queued

    def depths(self) -> dict[Lane, int]:
        """Queued jobs by lane."""
        return {lane: line.depth for lane, line in self._lines.items()}

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
        if ticket.job.deadline is None:
            self._agenda.drop(ticket)
        else:
            self._agenda.put(ticket, ticket.job.deadline)
        if ticket.queue.push(ticket):
            self._stirred = True

    def _leave_queue(self, ticket: Ticket) -> None:
        if ticket.stage is Stage.HELD:
            self._let_go(ticket)
            ticket.stage = Stage.GONE
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
            if ticket.stage is Stage.READY:
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

    # Filling workers.

    def _fill_workers(self, now: float) -> tuple[BatchPlan, ...]:
        self._stirred = False
        drafts: list[Draft] = []
        while True:
            self._walks += 1
            kept_for = self._serve_turns(drafts)
            self._serve_in_order(drafts, kept_for)
            if self._shares.turn() is kept_for:
                break
        for draft in drafts:
            draft.worker.drafts.clear()
        first = self._plans + 1
        self._plans += len(drafts)
        return tuple(draft.plan(plan_id, now) for plan_id, draft in enumerate(drafts, first))

    def _serve_turns(self, drafts: list[Draft]) -> Queue | None:
        """Lower lanes that are owed a turn go first. One that finds no room keeps its workers from everybody else."""
        while (queue := self._shares.turn()) is not None and (ticket := queue.head()) is not None:
            worker = least_loaded(queue.route.workers, ticket, self._walks)
            if worker is None:
                close(queue.route.workers, self._walks)
                break
            self._shares.took_turn(queue, ticket.prefill_tokens)
            self._send(ticket, worker, drafts)
        return queue

    def _serve_in_order(self, drafts: list[Draft], kept_for: Queue | None) -> None:
        """Walk the heads of all queues by lane and arrival; stop early when a lower lane's turn has come.

        A head without room keeps the workers it waits for from everybody behind it.
        """
        heads = [
            (line.lane, head.job.arrived_at, head.number, queue)
            for line in self._lines.values()
            for queue in line.waiting
            if (head := queue.head()) is not None
        ]
        heapify(heads)
        while heads:
            queue = heads[0][3]
            ticket = queue.head()
            assert ticket is not None
            worker = least_loaded(queue.route.workers, ticket, self._walks)
            if worker is None:
                close(queue.route.workers, self._walks)
                heappop(heads)
                continue
            turn_may_be_due = self._send(ticket, worker, drafts)
            if worker.pads:
                turn_may_be_due |= self._send_company(queue, worker, drafts)
            if turn_may_be_due and self._shares.turn() is not kept_for:
                return
            head = queue.head()
            if head is None:
                heappop(heads)
            else:
                heapreplace(heads, (queue.line.lane, head.job.arrived_at, head.number, queue))

    def _send_company(self, queue: Queue, worker: WorkerState, drafts: list[Draft]) -> bool:
        """Fill the padded pass that was just opened with those who stand behind its first job."""
        turn_may_be_due = False
        while (mate := queue.head()) is not None and worker.has_room(mate) and worker.is_forming_a_plan_for(mate):
            turn_may_be_due |= self._send(mate, worker, drafts)
        return turn_may_be_due

    def _send(self, ticket: Ticket, worker: WorkerState, drafts: list[Draft]) -> bool:
        """Move the head of a queue onto a worker; say whether a lower lane may be due a turn for it."""
        queue, line = ticket.queue, ticket.queue.line
        queue.pop()
        line.depth -= 1
        line.drain.departed()
        self._agenda.drop(ticket)
        ticket.stage = Stage.PLANNED
        ticket.worker = worker
        board(ticket, worker, drafts)
        return self._shares.admitted(line, ticket.prefill_tokens)

    # Routes.

    def _route(self, key: RouteKey) -> Route:
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = Route(key, self._workers.values())
        return route

    def _refresh_routes(self) -> None:
        """Workers came, went or changed their kind. Rare, so it is also when unused routes and queues are dropped."""
        for line in self._lines.values():
            line.prune()
            line.reorder()
        used = {queue.route.key: queue.route for line in self._lines.values() for queue in line.queues.values()}
        for route in used.values():
            route.refresh(self._workers.values())
        self._routes = used
        self._stirred = self._calmed = True
