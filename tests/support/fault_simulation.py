"""A small world in which everything goes wrong: the real scheduler and attempts over scripted workers, by seed.

The trial stands where dispatch stands. It owns the scheduler and all open jobs, drops messages of attempts that are
over, and ends every job exactly once. A lost attempt ends; while its job may be resumed it is offered again with the
next attempt number, the arrival it had and what it has written. Whoever wants to know more gives a watcher.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from inferry.domain.attempts import Attempt
from inferry.domain.errors import ClientClosed, Preempted, QueueFull, QueueTimeout, WorkerLost, WorkerTimeout
from inferry.domain.jobs import InferenceJob, ResumeMode, ResumePoint
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry
from inferry.domain.plans import BatchPlan, Ended, FirstToken, JobLocation, Tick
from inferry.domain.recovery import Retry, next_attempt
from inferry.domain.streams import Delta, Done, End, Failed, FinishReason, Usage
from inferry.domain.values import replace
from inferry.domain.workers import Phase, WorkerView
from inferry.scheduling.scheduler import Scheduler
from inferry.sim.events import Events
from inferry.streams.mailbox import JobStream, MergeCounter
from support.faults import Faults, JobFault, JobFaultKind, WorkerFault, WorkerFaultKind

_FIRST_TOKEN = FirstToken()
_ENDED = Ended()


class WorkerTimings(Struct, frozen=True):
    """How fast scripted workers are, and how patient the gateway is with them."""

    prompt_token_s: float = 20e-6
    token_s: float = 0.004
    first_token_timeout_s: float = 0.5
    late_s: float = 0.3


class SimulationObserver:
    """Hears of everything as it happens; does nothing with it."""

    def began(self, simulation: "FaultSimulation") -> None: ...

    def offered(self, job: InferenceJob, now: float) -> None: ...

    def planned(self, plan: BatchPlan, now: float) -> None: ...

    def ticked(self, tick: Tick, now: float) -> None: ...

    def view_changed(self, view: WorkerView, now: float) -> None: ...

    def first_token(self, job: InferenceJob, now: float) -> None: ...

    def ended(self, entry: LedgerEntry, job: InferenceJob, now: float) -> None:
        """An attempt is over; its job may be offered again at once."""

    def closed(self, job: InferenceJob, end: End, tokens: Sequence[int], now: float) -> None:
        """A job is over, with all that its reader got."""


class _OpenJob:
    """A job that has not ended. `generation` tells messages of this attempt from those of earlier ones."""

    __slots__ = ("attempt", "delivered", "disconnected", "fault", "generation", "stream", "target_tokens", "worker")

    def __init__(self, job: InferenceJob, target_tokens: int, fault: JobFault | None) -> None:
        self.attempt = Attempt(job)
        self.stream = JobStream(self.attempt, MergeCounter())
        self.target_tokens = target_tokens
        self.fault = fault
        self.delivered: list[int] = []
        self.generation = 0
        self.disconnected = False
        self.worker: int | None = None


class FaultSimulation:
    """See the module. `jobs` come with the tokens each will write; `views` are the workers, by number in their name."""

    def __init__(
        self,
        lanes: Mapping[Lane, LanePolicy],
        views: Sequence[WorkerView],
        jobs: Sequence[tuple[InferenceJob, int]],
        faults: Faults,
        *,
        timings: WorkerTimings | None = None,
        observer: SimulationObserver | None = None,
    ) -> None:
        self.scheduler = Scheduler(lanes)
        self.entries: list[LedgerEntry] = []
        self.refused = 0
        self.events = Events()
        self._views = list(views)
        self._number = {view.worker: number for number, view in enumerate(views)}
        self._timings = timings or WorkerTimings()
        self._observer = observer or SimulationObserver()
        self._open: dict[str, _OpenJob] = {}
        self._jobs_on: list[dict[str, None]] = [{} for _ in views]
        self._stalled_until = [0.0] * len(views)
        self._dead = [False] * len(views)
        self._draining = [False] * len(views)
        self._tick_due = False
        self._wake_at: float | None = None
        self._observer.began(self)
        for number, view in enumerate(views):
            self._update_view(number, view.phase, 0.0)
        for number, (job, target_tokens) in enumerate(jobs):
            self.events.at(job.arrived_at, self._arrive, (job, target_tokens, faults.jobs.get(number)))
        for fault in faults.workers:
            self.events.at(fault.at, self._apply_worker_fault, fault)

    def run(self) -> None:
        self.events.run()

    @property
    def open_jobs(self) -> int:
        return len(self._open)

    # Clients.

    def _arrive(self, now: float, argument: tuple[InferenceJob, int, JobFault | None]) -> None:
        job, target_tokens, fault = argument
        open_job = self._open[job.job_id] = _OpenJob(job, target_tokens, fault)
        if fault is not None and fault.kind is JobFaultKind.DISCONNECT:
            self.events.at(now + fault.after_s, self._disconnect, job.job_id)
        self._offer(open_job, job, now)

    def _offer(self, open_job: _OpenJob, job: InferenceJob, now: float) -> None:
        try:
            self.scheduler.offer(job, now)
        except QueueFull as refusal:
            self.refused += 1
            self._end_attempt(open_job, Failed(job.job_id, refusal), now)
            self._close(open_job, Failed(job.job_id, refusal), now)
            return
        self._observer.offered(job, now)
        self._request_tick(now)

    def _disconnect(self, now: float, job_id: str) -> None:
        open_job = self._open.get(job_id)
        if open_job is None or open_job.disconnected:
            return
        open_job.disconnected = True
        if self.scheduler.cancel(job_id) is JobLocation.QUEUED:
            self._end(open_job, Failed(job_id, ClientClosed("the client left")), now)
        else:
            # The worker confirms a little later, unless it is dead or finishes first.
            self.events.at(now + 0.002, self._confirm_abort, (job_id, open_job.generation))

    def _confirm_abort(self, now: float, argument: tuple[str, int]) -> None:
        open_job = self._current_attempt(*argument)
        if open_job is not None:
            self._end(open_job, Failed(argument[0], ClientClosed("the client left")), now)

    # The loop.

    def _request_tick(self, now: float) -> None:
        if not self._tick_due:
            self._tick_due = True
            self.events.at(now, self._tick)

    def _tick(self, now: float, _: object) -> None:
        self._tick_due = False
        tick = self.scheduler.tick(now)
        for plan in tick.plans:
            self._observer.planned(plan, now)
            for job in plan.jobs:
                self._open[job.job_id].attempt.sent(plan, now)
        for plan in tick.plans:
            for job in plan.jobs:
                self._start(self._open[job.job_id], self._number[plan.worker], now)
        for job in tick.evictions:
            open_job = self._open[job.job_id]
            self.events.at(now + 0.002, self._preempted, (job.job_id, open_job.generation))
        for job in tick.expired:
            self._end(self._open[job.job_id], Failed(job.job_id, QueueTimeout("too late")), now)
        self._observer.ticked(tick, now)
        if tick.wake_at is not None and tick.wake_at != self._wake_at:
            self._wake_at = tick.wake_at
            self.events.at(tick.wake_at, self._wake, tick.wake_at)

    def _wake(self, now: float, wake_at: float) -> None:
        if self._wake_at == wake_at:
            self._wake_at = None
            self._request_tick(now)

    # Workers.

    def _update_view(self, number: int, phase: Phase, now: float) -> None:
        view = self._views[number] = replace(self._views[number], phase=phase, observed_at=now)
        self.scheduler.observe(view, now)
        self._observer.view_changed(view, now)
        self._request_tick(now)

    def _apply_worker_fault(self, now: float, fault: WorkerFault) -> None:
        number = fault.worker
        until = now + fault.duration_s
        match fault.kind:
            case WorkerFaultKind.STALL:
                self._stalled_until[number] = max(self._stalled_until[number], until)
                return
            case WorkerFaultKind.DRAIN:
                self._draining[number] = True
            case WorkerFaultKind.DEATH:
                self._dead[number] = True
                for job_id in tuple(self._jobs_on[number]):
                    self._connection_lost(now, (job_id, self._open[job_id].generation))
        self._update_view(number, self._phase(number), now)
        self.events.at(until, self._recover, fault)

    def _recover(self, now: float, fault: WorkerFault) -> None:
        if fault.kind is WorkerFaultKind.DEATH:
            self._dead[fault.worker] = False
        else:
            self._draining[fault.worker] = False
        self._update_view(fault.worker, self._phase(fault.worker), now)

    def _phase(self, number: int) -> Phase:
        if self._dead[number]:
            return Phase.DOWN
        return Phase.DRAINING if self._draining[number] else Phase.READY

    def _start(self, open_job: _OpenJob, number: int, now: float) -> None:
        job = open_job.attempt.job
        open_job.worker = number
        self._jobs_on[number][job.job_id] = None
        message = (job.job_id, open_job.generation)
        if self._dead[number]:
            self.events.at(now, self._connection_lost, message)
            return
        self.events.at(now + job.footprint.prefill_tokens * self._timings.prompt_token_s, self._token, message)

    def _token(self, now: float, message: tuple[str, int]) -> None:
        """The worker writes the next token of a job, or gets into trouble over it."""
        open_job = self._current_attempt(*message)
        if open_job is None or open_job.worker is None:
            return
        stalled = self._stalled_until[open_job.worker]
        if stalled > now:
            self.events.at(stalled, self._token, message)
            return
        job = open_job.attempt.job
        fault = open_job.fault if job.attempt == 1 else None
        if fault is not None and fault.after_tokens == len(open_job.delivered):
            if fault.kind is JobFaultKind.RESET:
                self._connection_lost(now, message)
                return
            if fault.kind is JobFaultKind.SILENCE:
                self.events.at(now + self._timings.first_token_timeout_s, self._silence_timeout, message)
                return
        if open_job.attempt.first_token_at is None:
            open_job.attempt.first_token(now)
            self.scheduler.progress(job.job_id, _FIRST_TOKEN, now)
            self._observer.first_token(job, now)
            if fault is not None and fault.kind is JobFaultKind.DUPLICATE:
                self.scheduler.progress(job.job_id, _FIRST_TOKEN, now)
            self._request_tick(now)
        open_job.attempt.last_token_at = now
        open_job.stream.push(
            Delta(
                job.job_id,
                job.run_id,
                job.step_id,
                open_job.attempt.output_tokens,
                token_ids=(len(open_job.delivered),),
                tokens=1,
            )
        )
        open_job.attempt.output_tokens += 1
        open_job.delivered.append(len(open_job.delivered))
        if len(open_job.delivered) < open_job.target_tokens:
            self.events.at(now + self._timings.token_s, self._token, message)
            return
        usage = Usage(job.footprint.prompt.expected, 0, open_job.attempt.output_tokens)
        self._end(open_job, Done(job.job_id, FinishReason.STOP, usage), now)
        if fault is not None and fault.kind in (JobFaultKind.DUPLICATE, JobFaultKind.LATE):
            begin_attempt = now + (self._timings.late_s if fault.kind is JobFaultKind.LATE else 0.0)
            self.events.at(begin_attempt, self._duplicate_messages, job.job_id)

    def _duplicate_messages(self, now: float, job_id: str) -> None:
        """Messages about a job that has ended. They change nothing, so nobody is asked to decide anything."""
        self.scheduler.progress(job_id, _FIRST_TOKEN, now)
        self.scheduler.progress(job_id, _ENDED, now)
        self._request_tick(now)

    def _late_messages(self, now: float, argument: tuple[str, int]) -> None:
        """Messages of an attempt that was lost arrive after all, when the job may be under way again."""
        job_id, attempt = argument
        self.scheduler.progress(job_id, _FIRST_TOKEN, now, attempt)
        self.scheduler.progress(job_id, _ENDED, now, attempt)
        self._request_tick(now)

    def _silence_timeout(self, now: float, message: tuple[str, int]) -> None:
        open_job = self._current_attempt(*message)
        if open_job is not None:
            self._attempt_lost(open_job, Failed(message[0], WorkerTimeout("the worker fell silent")), now)

    def _connection_lost(self, now: float, message: tuple[str, int]) -> None:
        open_job = self._current_attempt(*message)
        if open_job is not None:
            self._attempt_lost(open_job, Failed(message[0], WorkerLost("the connection broke")), now)

    def _preempted(self, now: float, message: tuple[str, int]) -> None:
        open_job = self._current_attempt(*message)
        if open_job is not None:
            self._attempt_lost(open_job, Failed(message[0], Preempted("for somebody else")), now)

    def _current_attempt(self, job_id: str, generation: int) -> _OpenJob | None:
        """The job a message is about, unless the attempt that it belongs to is over."""
        open_job = self._open.get(job_id)
        return open_job if open_job is not None and open_job.generation == generation else None

    # Ends.

    def _attempt_lost(self, open_job: _OpenJob, end: Failed, now: float) -> None:
        """The attempt is over; the job is too, unless it may be tried again."""
        job = open_job.attempt.job
        if job.resume is ResumeMode.CONTINUE:
            end = replace(end, resume_point=ResumePoint((), tuple(open_job.delivered)))
        outcome = None if open_job.disconnected else next_attempt(open_job.attempt, end)
        if not isinstance(outcome, Retry):
            self._end(open_job, outcome or end, now)
            return
        self._end_attempt(open_job, end, now)
        self.events.at(now + self._timings.late_s, self._late_messages, (job.job_id, job.attempt))
        open_job.attempt = Attempt(outcome.job)
        open_job.stream.begin_attempt(open_job.attempt, from_start=outcome.from_start)
        open_job.generation += 1
        open_job.worker = None
        self._offer(open_job, outcome.job, now)

    def _end(self, open_job: _OpenJob, end: End, now: float) -> None:
        self._end_attempt(open_job, end, now)
        self._close(open_job, end, now)

    def _end_attempt(self, open_job: _OpenJob, end: End, now: float) -> None:
        job_id = open_job.attempt.job.job_id
        open_job.attempt.ended(end, now)
        self.scheduler.progress(job_id, _ENDED, now)
        if open_job.worker is not None:
            self._jobs_on[open_job.worker].pop(job_id, None)
        entry = open_job.attempt.entry(now)
        self.entries.append(entry)
        self._observer.ended(entry, open_job.attempt.job, now)
        self._request_tick(now)

    def _close(self, open_job: _OpenJob, end: End, now: float) -> None:
        open_job.stream.finish(end)
        del self._open[open_job.attempt.job.job_id]
        self._observer.closed(open_job.attempt.job, end, open_job.delivered, now)
