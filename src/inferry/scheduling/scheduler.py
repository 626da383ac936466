"""The scheduler: who goes next, with whom, and where.

One owner calls it, from one thread, with the time of its own clock; it never waits and never looks at a clock itself.
All it knows came in through `offer`, `cancel`, `observe`, `forget` and `progress`; all it decides goes out through
`tick`. The opinions live next door: `release` says when, `boarding` who is next, `fairness` whose turn it is, `shares`
what lower lanes are owed, `packing`, `kin` and `siblings` who goes together, `placing` where, `pacing` how fast,
`preemption` who has to leave. `express` is the short way of a job that meets nobody.
"""

from collections.abc import Mapping

from inferry.domain.errors import QueueFull
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy, ReleaseReason
from inferry.domain.plans import Ahead, BatchPlan, Ended, FirstToken, Produced, Tick, Use, Whereabouts
from inferry.domain.routes import RouteKey
from inferry.domain.workers import WorkerView
from inferry.scheduling import billing, release
from inferry.scheduling.boarding import Boarding
from inferry.scheduling.company import Passes
from inferry.scheduling.due import Agenda
from inferry.scheduling.express import send_alone
from inferry.scheduling.fairness import LaneAccounts, Weights, jain, weigher
from inferry.scheduling.lanes import Hall, Line, Queue
from inferry.scheduling.pacing import Beat
from inferry.scheduling.packing import WorkerState
from inferry.scheduling.placing.fleets import Fleets
from inferry.scheduling.placing.place import Placement
from inferry.scheduling.placing.routes import Route, changes_routes, serves
from inferry.scheduling.preemption import Preemption
from inferry.scheduling.quantum import QUANTUM_TOKENS
from inferry.scheduling.siblings import Watch
from inferry.scheduling.tickets import ALONE, GONE, HELD, PLANNED, PROMISED, Ticket


class Scheduler:
    """Queues jobs and plans them onto workers, inside each worker's room.

    `weights` say how much of a lane a tenant gets beside the others, 1 unless it is named. `groups` name the worker
    groups a lane may use, best first; any for lanes not named. `burst_tokens` is how many prompt tokens may go to a
    worker at once while its prefill rate binds. `takes_shortcuts` may be switched off to compare: what is decided must
    be the same.
    """

    def __init__(
        self,
        lanes: Mapping[Lane, LanePolicy],
        weights: Weights | None = None,
        *,
        groups: Mapping[Lane, tuple[str, ...]] | None = None,
        burst_tokens: int = QUANTUM_TOKENS,
        takes_shortcuts: bool = True,
    ) -> None:
        for lane, policy in lanes.items():
            if not (0 <= policy.share < 1 and 0 <= policy.reserve < 1):
                raise ValueError(f"{lane.name}: share and reserve are at least 0 and less than 1")
        weight_of = weigher(weights or {})
        self._past = billing.Past()
        self._placement = Placement()
        self._hall = Hall()
        self._lines = tuple(
            Line(
                lane,
                lanes[lane],
                LaneAccounts(weight_of, self._past.remember),
                self._hall,
                self._placement.warmth,
                (groups or {}).get(lane),
            )
            for lane in sorted(lanes)
        )
        self._line_of = [next((line for line in self._lines if line.lane is lane), None) for lane in Lane]
        self._beat = Beat(burst_tokens)
        self._tickets: dict[str, Ticket] = {}
        self._workers: dict[str, WorkerState] = {}
        self._holding: dict[Queue, None] = {}
        self._passes = Passes()
        self._agenda = Agenda()
        self._fleets = Fleets()
        self._boarding = Boarding(self._lines, self._agenda, self._placement, self._beat)
        self._changed = self._boarding.changed
        self._preemption = Preemption(self._lines)
        self._offers = 0
        self._plans = 0
        self._alone: Ticket | None = None
        self._takes_shortcuts = takes_shortcuts
        self._boarding.looks_everywhere = not takes_shortcuts
        # What the next tick has to look at. Without either flag only time can have changed anything.
        self._stirred = False
        self._calmed = False

    # What the owner tells it.

    def offer(self, job: InferenceJob, now: float) -> None:
        """Queue a job, held for company or ready to go. Raises QueueFull when its lane is at the limit.

        A job in a later attempt was let in before, and always is again.
        """
        job_id = job.job_id
        if job_id in self._tickets:
            raise ValueError(f"job {job_id} has already been offered")
        line = self._line_of[job.lane]
        if line is None:
            raise ValueError(f"no policy for lane {job.lane.name}")
        if line.depth >= line.queue_limit and job.attempt == 1:  # who has been let in is not turned away
            raise QueueFull(
                f"lane {job.lane.name} holds {line.depth} jobs, which is its limit",
                retry_after_s=line.drain.seconds_for(line.depth, now),
            )
        if not line.depth:
            line.drain.begin(now)
        self._offers += 1
        queue = line.queue_of.get(job.route) or self._queue_for(line, job)
        ticket = self._tickets[job_id] = line.ticket_for(job, self._offers, queue)
        held_until = release.held_until(ticket, self._passes, now)
        if held_until is not None:
            self._hold(ticket, held_until)
            return
        if job.deadline is not None:
            self._agenda.put(ticket, job.deadline)
        if not self._hall.waiting and self._alone is None and self._takes_shortcuts:
            ticket.stage = ALONE
            self._alone = ticket
            return
        if self._alone is not None:
            self._line_up()
        if queue.push(ticket):
            self._stirred = True

    def _queue_for(self, line: Line, job: InferenceJob) -> Queue:
        route = line.routes.get(job.route)
        if route is None:
            route = line.routes[job.route] = Route(job.route, self._workers.values(), self._fleets, line.groups)
        return line.queue_for(job, route)

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
        self._line_up()
        changes = changes_routes(old, view)
        if changes or old is None or old.room != view.room or old.foreign != view.foreign:
            self._take_back_promises(worker)
            self._changed[worker] = None
            self._stirred = self._calmed = True
        self._beat.now = now
        worker.believe(view, self._beat)
        if changes:
            self._refresh_routes()

    def forget(self, worker: str) -> None:
        """Plan nothing more for the worker. What is in flight there stays counted until it has ended."""
        state = self._workers.get(worker)
        if state is None or state.view is None:
            return
        self._line_up()
        self._take_back_promises(state)
        state.believe(None, self._beat)
        self._placement.forget(state)
        self._passes.forget(worker)
        if not state.sequences:
            del self._workers[worker]
        self._refresh_routes()

    def progress(
        self, job_id: str, step: FirstToken | Produced | Ended, now: float, attempt: int | None = None
    ) -> None:
        """The job's prefill, or all it used, is free again, or it has written something.

        Late and repeated messages change nothing, nor do those of another attempt where the caller names it.
        """
        ticket = self._tickets.get(job_id)
        if ticket is None or ticket.stage is not PLANNED or (worker := ticket.worker) is None:
            return
        if attempt is not None and attempt != ticket.job.attempt:
            return
        # By exact type: asking whether something is an instance of a Struct is slow where it is not.
        if type(step) is Produced:
            # Who comes next may be another by now, but nobody has more room: the next walk is soon enough.
            billing.produced(ticket, step.tokens)
            return
        self._stirred = True
        self._changed[worker] = None
        if type(step) is FirstToken:
            if ticket.prefill_tokens:
                worker.free_prefill(ticket)
                if ticket.watch is not None:
                    ticket.watch.answered(ticket, now)
                if step.prompt_tokens is not None:
                    billing.prefilled(ticket, step.prompt_tokens)
        elif type(step) is Ended:
            worker.free(ticket)
            if worker.pads:
                self._passes.left(worker, now)
            if step.prompt_tokens is not None or step.output_tokens is not None:
                billing.ended(ticket, step)
            if ticket.watch is not None:
                ticket.watch.ended(ticket)
            ticket.run.ended()
            del self._tickets[job_id]
            if not worker.sequences:
                self._calmed = True
                if worker.view is None:
                    del self._workers[worker.name]

    # What it decides.

    def tick(self, now: float) -> Tick:
        """Everything that can be decided now. A second tick at the same instant decides nothing."""
        dates = self._agenda.heap
        expired = self._settle_what_is_due(now) if dates and dates[0][0] <= now else ()
        if self._calmed:
            self._calmed = False
            if self._holding:
                self._end_needless_holds()
        beat = self._beat
        plans: tuple[BatchPlan, ...] = ()
        evictions: tuple[InferenceJob, ...] = ()
        if self._alone is not None:
            plans = self._send_alone(self._alone, now)
        if self._stirred or (beat.retry_at is not None and beat.retry_at <= now):
            self._stirred = False
            beat.start(now)
            if self._hall.waiting or self._preemption.promising:
                plans, evictions = self._fill_workers(now)
            else:
                self._changed.clear()
        wake_at = self._agenda.next() if self._agenda.heap else None
        retry_at = beat.retry_at
        if retry_at is not None and (wake_at is None or retry_at < wake_at):
            wake_at = retry_at
        return Tick(plans, evictions, expired, wake_at)

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

    def service(self) -> Mapping[str, int]:
        """Tokens served to every tenant since the start, as far as they are known."""
        served = dict(self._past.served)
        for line in self._lines:
            for name, tenant in line.accounts.members.items():
                if tenant.served or name in served:
                    served[name] = served.get(name, 0) + tenant.served
        return served

    def jain(self, lane: Lane | None = None) -> float:
        """Jain's index of the tokens served, over their weights, to tenants that have work now; of one lane or all.

        One lane is asked for what it served since those tenants' accounts were opened, all of them for everything.
        """
        lines = [line for line in self._lines if lane is None or line.lane == lane]
        busy = [tenant for line in lines for tenant in line.accounts.members.values() if tenant.active]
        if lane is not None:
            return jain(tenant.served / tenant.weight for tenant in busy)
        service = self.service()
        return jain(service.get(name, 0) / weight for name, weight in {one.name: one.weight for one in busy}.items())

    def ahead(self, lane: Lane, tenant: str | None = None) -> Ahead:
        """What is queued before a job of this lane that would come now: all of better lanes, and of its own lane what
        fair share lets go before the tenant's next job, or all of it where no tenant is named.
        """
        parts = [line.ahead(tenant if line.lane == lane else None) for line in self._lines if line.lane <= lane]
        return Ahead(
            sum([part.jobs for part in parts]),
            sum([part.prompt_tokens for part in parts]),
            sum([part.output_tokens for part in parts]),
        )

    def use(self, worker: str) -> Use:
        """What this gateway's jobs in flight take up on the worker."""
        state = self._workers.get(worker)
        return Use() if state is None else state.own_use()

    def has_route(self, route: RouteKey) -> bool:
        """Whether some worker serves the route, up or not."""
        return any(state.view is not None and serves(state.view, route) for state in self._workers.values())

    # Holding and releasing.

    def _hold(self, ticket: Ticket, at_most: float) -> None:
        queue = ticket.queue
        until, ticket.reason = release.hold_until(ticket.job, queue.line, at_most)
        self._agenda.put(ticket, until)
        queue.hold(ticket)
        self._holding[queue] = None
        if release.is_full(queue):
            self._release(queue, ReleaseReason.SIZE)

    def _release(self, queue: Queue, reason: ReleaseReason, watch: Watch | None = None) -> None:
        """Let everybody who is held in the queue go together, or one family of them."""
        for ticket in tuple(queue.held.values()):
            if watch is None or ticket.watch is watch:
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
        self._line_up()
        if ticket.queue.push(ticket):
            self._stirred = True

    def _line_up(self) -> None:
        """A job that was alone is so no more, or will be somewhere else: it goes into its queue."""
        ticket, self._alone = self._alone, None
        if ticket is not None:
            ticket.queue.push(ticket)
            self._stirred = True

    def _leave_queue(self, ticket: Ticket) -> None:
        self._line_up()
        if ticket.stage is HELD:
            self._let_go(ticket)
            ticket.stage = GONE
        else:
            self._stirred = True
            if ticket.stage is PROMISED:
                assert ticket.worker is not None
                self._changed[ticket.worker] = None
                self._preemption.cancel(ticket)
                ticket.stage = GONE
            else:
                was_head = ticket.queue.head() is ticket
                ticket.stage = GONE
                ticket.run.left()
                ticket.queue.remove(ticket, was_head)
        self._agenda.drop(ticket)
        ticket.queue.line.leaves(ticket)
        ticket.run.ended()
        del self._tickets[ticket.job.job_id]

    def _settle_what_is_due(self, now: float) -> tuple[InferenceJob, ...]:
        """End the holds and the jobs whose time has come, in order of time; return the jobs that expired."""
        expired = []
        while (ticket := self._agenda.pop(now)) is not None:
            if ticket.stage is not HELD:
                self._leave_queue(ticket)
                expired.append(ticket.job)
            elif ticket.reason is ReleaseReason.MAX_WAIT:
                self._let_go(ticket)
                self._make_ready(ticket, ReleaseReason.MAX_WAIT)
            else:
                self._release(ticket.queue, ticket.reason, ticket.watch)
        return tuple(expired)

    def _end_needless_holds(self) -> None:
        """Workers have changed: release jobs that have nothing to wait for any more."""
        for queue in tuple(self._holding):
            if not release.goes_on(queue):
                self._release(queue, ReleaseReason.IMMEDIATE)
            elif release.is_full(queue):
                self._release(queue, ReleaseReason.SIZE)

    # Planning.

    def _send_alone(self, ticket: Ticket, now: float) -> tuple[BatchPlan, ...]:
        """Plan the only job there is, if it finds room; else it takes its place in its queue."""
        self._beat.now = now
        worker = None if self._preemption.promising else send_alone(ticket, self._placement, self._agenda, now)
        if worker is None:
            self._line_up()
            return ()
        self._alone = None
        self._plans += 1
        job = ticket.job
        padded = None
        if worker.pads:
            padded = job.footprint.prompt.expected
            self._passes.began(worker, 1, now)
        plan = BatchPlan(
            plan_id=self._plans,
            worker=worker.name,
            jobs=(job,),
            reason=ticket.reason,
            formed_at=now,
            padded_tokens=padded,
        )
        return (plan,)

    def _fill_workers(self, now: float) -> tuple[tuple[BatchPlan, ...], tuple[InferenceJob, ...]]:
        preemption = self._preemption
        drafts = self._boarding.fill_workers(preemption.kept(self._changed) if preemption.promising else ())
        evicted = preemption.decide() if self._hall.waiting else ()
        plans = []
        for draft in drafts:
            self._plans += 1
            plans.append(draft.plan(self._plans, now))
            if draft.worker.pads:
                self._passes.began(draft.worker, len(draft.jobs), now)
        return tuple(plans), tuple([ticket.job for ticket in evicted]) if evicted else ()

    def _take_back_promises(self, worker: WorkerState) -> None:
        if worker.promised:
            self._stirred = True
            for ticket in self._preemption.take_back(worker):
                ticket.queue.push(ticket)

    # Routes.

    def _refresh_routes(self) -> None:
        """Workers came, went or changed their kind. Rare, so it is also when unused routes and queues are dropped."""
        self._fleets.clear()
        for line in self._lines:
            # Jobs that were promised room stand in no queue and may come back to theirs.
            if not self._preemption.promising:
                line.prune()
            line.queue_of.clear()
            line.price = None
            for route in line.routes.values():
                route.refresh(self._workers.values(), self._fleets)
        self._boarding.forget_waits()
        self._stirred = self._calmed = True
