"""A small world in which everything goes wrong: the real scheduler and attempts over scripted workers, by seed.

The trial stands where dispatch stands. It owns the scheduler and all open jobs, drops messages of attempts that are
over, and ends every job exactly once. A lost attempt ends; while its job may be resumed it is offered again with the
next attempt number, the arrival it had and what it has written. Whoever wants to know more gives a watcher.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from inferry.domain.attempts import Attempt
from inferry.domain.errors import ClientClosed, Preempted, QueueFull, QueueTimeout, WorkerLost, WorkerTimeout
from inferry.domain.jobs import InferenceJob, Resume, SoFar
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry
from inferry.domain.plans import BatchPlan, Ended, FirstToken, Tick, Whereabouts
from inferry.domain.recovery import Again, next_attempt
from inferry.domain.streams import Delta, Done, End, Failed, FinishReason, Usage
from inferry.domain.values import replace
from inferry.domain.workers import Phase, WorkerView
from inferry.scheduling.scheduler import Scheduler
from inferry.sim.events import Events
from inferry.sim.faults import Faults, JobFault, JobTrouble, WorkerFault, WorkerTrouble
from inferry.streams.mailbox import JobStream, MergeTally

_FIRST_TOKEN = FirstToken()
_ENDED = Ended()


class Pace(Struct, frozen=True):
    """How fast scripted workers are, and how patient the gateway is with them."""

    prompt_token_s: float = 20e-6
    token_s: float = 0.004
    silence_timeout_s: float = 0.5
    late_s: float = 0.3


class Watcher:
    """Hears of everything as it happens; does nothing with it."""

    def began(self, trial: "Trial") -> None: ...

    def offered(self, job: InferenceJob, now: float) -> None: ...

    def planned(self, plan: BatchPlan, now: float) -> None: ...

    def ticked(self, tick: Tick, now: float) -> None: ...

    def believed(self, view: WorkerView, now: float) -> None: ...

    def first(self, job: InferenceJob, now: float) -> None: ...

    def ended(self, entry: LedgerEntry, job: InferenceJob, now: float) -> None:
        """An attempt is over; its job may be offered again at once."""

    def closed(self, job: InferenceJob, end: End, tokens: Sequence[int], now: float) -> None:
        """A job is over, with all that its reader got."""


class _Open:
    """A job that has not ended. `generation` tells messages of this attempt from those of earlier ones."""

    __slots__ = ("attempt", "delivered", "fault", "generation", "left", "stream", "wanted", "worker")

    def __init__(self, job: InferenceJob, wanted: int, fault: JobFault | None) -> None:
        self.attempt = Attempt(job)
        self.stream = JobStream(self.attempt, MergeTally())
        self.wanted = wanted
        self.fault = fault
        self.delivered: list[int] = []
        self.generation = 0
        self.left = False
        self.worker: int | None = None


class Trial:
    """See the module. `jobs` come with the tokens each will write; `views` are the workers, by number in their name."""

    def __init__(
        self,
        lanes: Mapping[Lane, LanePolicy],
        views: Sequence[WorkerView],
        jobs: Sequence[tuple[InferenceJob, int]],
        faults: Faults,
        *,
        pace: Pace | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.scheduler = Scheduler(lanes)
        self.entries: list[LedgerEntry] = []
        self.refused = 0
        self.events = Events()
        self._views = list(views)
        self._number = {view.worker: number for number, view in enumerate(views)}
        self._pace = pace or Pace()
        self._watcher = watcher or Watcher()
        self._open: dict[str, _Open] = {}
        self._on: list[dict[str, None]] = [{} for _ in views]
        self._stalled_until = [0.0] * len(views)
        self._dead = [False] * len(views)
        self._draining = [False] * len(views)
        self._tick_due = False
        self._wake_at: float | None = None
        self._watcher.began(self)
        for number, view in enumerate(views):
            self._believe(number, view.phase, 0.0)
        for number, (job, wanted) in enumerate(jobs):
            self.events.at(job.arrived_at, self._arrive, (job, wanted, faults.jobs.get(number)))
        for fault in faults.workers:
            self.events.at(fault.at, self._worker_trouble, fault)

    def run(self) -> None:
        self.events.run()

    @property
    def open_jobs(self) -> int:
        return len(self._open)

    # Clients.

    def _arrive(self, now: float, what: tuple[InferenceJob, int, JobFault | None]) -> None:
        job, wanted, fault = what
        one = self._open[job.job_id] = _Open(job, wanted, fault)
        if fault is not None and fault.kind is JobTrouble.DISCONNECT:
            self.events.at(now + fault.after_s, self._disconnect, job.job_id)
        self._offer(one, job, now)

    def _offer(self, one: _Open, job: InferenceJob, now: float) -> None:
        try:
            self.scheduler.offer(job, now)
        except QueueFull as refusal:
            self.refused += 1
            self._settle(one, Failed(job.job_id, refusal), now)
            self._close(one, Failed(job.job_id, refusal), now)
            return
        self._watcher.offered(job, now)
        self._ask_for_tick(now)

    def _disconnect(self, now: float, job_id: str) -> None:
        one = self._open.get(job_id)
        if one is None or one.left:
            return
        one.left = True
        if self.scheduler.cancel(job_id) is Whereabouts.QUEUED:
            self._end(one, Failed(job_id, ClientClosed("the client left")), now)
        else:
            # The worker confirms a little later, unless it is dead or finishes first.
            self.events.at(now + 0.002, self._confirm_abort, (job_id, one.generation))

    def _confirm_abort(self, now: float, what: tuple[str, int]) -> None:
        one = self._live(*what)
        if one is not None:
            self._end(one, Failed(what[0], ClientClosed("the client left")), now)

    # The loop.

    def _ask_for_tick(self, now: float) -> None:
        if not self._tick_due:
            self._tick_due = True
            self.events.at(now, self._tick)

    def _tick(self, now: float, _: object) -> None:
        self._tick_due = False
        tick = self.scheduler.tick(now)
        for plan in tick.plans:
            self._watcher.planned(plan, now)
            for job in plan.jobs:
                self._open[job.job_id].attempt.sent(plan, now)
        for plan in tick.plans:
            for job in plan.jobs:
                self._start(self._open[job.job_id], self._number[plan.worker], now)
        for job in tick.evictions:
            one = self._open[job.job_id]
            self.events.at(now + 0.002, self._stop, (job.job_id, one.generation))
        for job in tick.expired:
            self._end(self._open[job.job_id], Failed(job.job_id, QueueTimeout("too late")), now)
        self._watcher.ticked(tick, now)
        if tick.wake_at is not None and tick.wake_at != self._wake_at:
            self._wake_at = tick.wake_at
            self.events.at(tick.wake_at, self._wake, tick.wake_at)

    def _wake(self, now: float, wake_at: float) -> None:
        if self._wake_at == wake_at:
            self._wake_at = None
            self._ask_for_tick(now)

    # Workers.

    def _believe(self, number: int, phase: Phase, now: float) -> None:
        view = self._views[number] = replace(self._views[number], phase=phase, observed_at=now)
        self.scheduler.observe(view, now)
        self._watcher.believed(view, now)
        self._ask_for_tick(now)

    def _worker_trouble(self, now: float, fault: WorkerFault) -> None:
        number = fault.worker
        until = now + fault.lasts_s
        match fault.kind:
            case WorkerTrouble.STALL:
                self._stalled_until[number] = max(self._stalled_until[number], until)
                return
            case WorkerTrouble.DRAIN:
                self._draining[number] = True
            case WorkerTrouble.DEATH:
                self._dead[number] = True
                for job_id in tuple(self._on[number]):
                    self._lose(now, (job_id, self._open[job_id].generation))
        self._believe(number, self._phase(number), now)
        self.events.at(until, self._recover, fault)

    def _recover(self, now: float, fault: WorkerFault) -> None:
        if fault.kind is WorkerTrouble.DEATH:
            self._dead[fault.worker] = False
        else:
            self._draining[fault.worker] = False
        self._believe(fault.worker, self._phase(fault.worker), now)

    def _phase(self, number: int) -> Phase:
        if self._dead[number]:
            return Phase.DOWN
        return Phase.DRAINING if self._draining[number] else Phase.READY

    def _start(self, one: _Open, number: int, now: float) -> None:
        job = one.attempt.job
        one.worker = number
        self._on[number][job.job_id] = None
        message = (job.job_id, one.generation)
        if self._dead[number]:
            self.events.at(now, self._lose, message)
            return
        self.events.at(now + job.footprint.prefill_tokens * self._pace.prompt_token_s, self._token, message)

    def _token(self, now: float, message: tuple[str, int]) -> None:
        """The worker writes the next token of a job, or gets into trouble over it."""
        one = self._live(*message)
        if one is None or one.worker is None:
            return
        stalled = self._stalled_until[one.worker]
        if stalled > now:
            self.events.at(stalled, self._token, message)
            return
        job = one.attempt.job
        fault = one.fault if job.attempt == 1 else None
        if fault is not None and fault.after_tokens == len(one.delivered):
            if fault.kind is JobTrouble.RESET:
                self._lose(now, message)
                return
            if fault.kind is JobTrouble.SILENCE:
                self.events.at(now + self._pace.silence_timeout_s, self._give_up, message)
                return
        if one.attempt.first_token_at is None:
            one.attempt.first_token(now)
            self.scheduler.progress(job.job_id, _FIRST_TOKEN, now)
            self._watcher.first(job, now)
            if fault is not None and fault.kind is JobTrouble.DUPLICATE:
                self.scheduler.progress(job.job_id, _FIRST_TOKEN, now)
            self._ask_for_tick(now)
        one.attempt.last_token_at = now
        one.stream.push(
            Delta(
                job.job_id,
                job.run_id,
                job.step_id,
                one.attempt.output_tokens,
                token_ids=(len(one.delivered),),
                tokens=1,
            )
        )
        one.attempt.output_tokens += 1
        one.delivered.append(len(one.delivered))
        if len(one.delivered) < one.wanted:
            self.events.at(now + self._pace.token_s, self._token, message)
            return
        usage = Usage(job.footprint.prompt.expected, 0, one.attempt.output_tokens)
        self._end(one, Done(job.job_id, FinishReason.STOP, usage), now)
        if fault is not None and fault.kind in (JobTrouble.DUPLICATE, JobTrouble.LATE):
            again = now + (self._pace.late_s if fault.kind is JobTrouble.LATE else 0.0)
            self.events.at(again, self._repeat, job.job_id)

    def _repeat(self, now: float, job_id: str) -> None:
        """Messages about a job that has ended. They change nothing, so nobody is asked to decide anything."""
        self.scheduler.progress(job_id, _FIRST_TOKEN, now)
        self.scheduler.progress(job_id, _ENDED, now)
        self._ask_for_tick(now)

    def _echo(self, now: float, what: tuple[str, int]) -> None:
        """Messages of an attempt that was lost arrive after all, when the job may be under way again."""
        job_id, attempt = what
        self.scheduler.progress(job_id, _FIRST_TOKEN, now, attempt)
        self.scheduler.progress(job_id, _ENDED, now, attempt)
        self._ask_for_tick(now)

    def _give_up(self, now: float, message: tuple[str, int]) -> None:
        one = self._live(*message)
        if one is not None:
            self._lost(one, Failed(message[0], WorkerTimeout("the worker fell silent")), now)

    def _lose(self, now: float, message: tuple[str, int]) -> None:
        one = self._live(*message)
        if one is not None:
            self._lost(one, Failed(message[0], WorkerLost("the connection broke")), now)

    def _stop(self, now: float, message: tuple[str, int]) -> None:
        one = self._live(*message)
        if one is not None:
            self._lost(one, Failed(message[0], Preempted("for somebody else")), now)

    def _live(self, job_id: str, generation: int) -> _Open | None:
        """The job a message is about, unless the attempt that it belongs to is over."""
        one = self._open.get(job_id)
        return one if one is not None and one.generation == generation else None

    # Ends.

    def _lost(self, one: _Open, end: Failed, now: float) -> None:
        """The attempt is over; the job is too, unless it may be tried again."""
        job = one.attempt.job
        if job.resume is Resume.CONTINUE:
            end = replace(end, so_far=SoFar((), tuple(one.delivered)))
        then = None if one.left else next_attempt(one.attempt, end)
        if not isinstance(then, Again):
            self._end(one, then or end, now)
            return
        self._settle(one, end, now)
        self.events.at(now + self._pace.late_s, self._echo, (job.job_id, job.attempt))
        one.attempt = Attempt(then.job)
        one.stream.again(one.attempt, from_start=then.from_start)
        one.generation += 1
        one.worker = None
        self._offer(one, then.job, now)

    def _end(self, one: _Open, end: End, now: float) -> None:
        self._settle(one, end, now)
        self._close(one, end, now)

    def _settle(self, one: _Open, end: End, now: float) -> None:
        job_id = one.attempt.job.job_id
        one.attempt.ended(end, now)
        self.scheduler.progress(job_id, _ENDED, now)
        if one.worker is not None:
            self._on[one.worker].pop(job_id, None)
        entry = one.attempt.entry(now)
        self.entries.append(entry)
        self._watcher.ended(entry, one.attempt.job, now)
        self._ask_for_tick(now)

    def _close(self, one: _Open, end: End, now: float) -> None:
        one.stream.finish(end)
        del self._open[one.attempt.job.job_id]
        self._watcher.closed(one.attempt.job, end, one.delivered, now)
