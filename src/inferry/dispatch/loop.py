"""The loop that owns the scheduler.

Everything here runs on one event loop; nothing else may touch the scheduler. Inputs (a job, a cancel, an item, a new
view) change the scheduler's state and ask for a tick; the tick runs once the current burst of callbacks is over, so
that jobs which arrive together are planned together. Between inputs the loop sleeps exactly until `wake_at`.

Every job that gets in ends exactly once: by its worker, by its own cancel, by its deadline, or by the runner when the
worker breaks its word. An attempt that was lost or stopped is not the end of its job while another may go on with it
(`domain.recovery`): the job is offered again, under the same stream, and what the lost worker may still say is dropped.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial

from inferry.admission.door import Door
from inferry.admission.told import Told
from inferry.admission.waits import WaitModel, infeasible
from inferry.dispatch.asking import ask_at, predict
from inferry.dispatch.cancels import Cancels
from inferry.dispatch.overdue import Overdue, may_be_retried
from inferry.dispatch.patience import Patience
from inferry.dispatch.pool import Pool
from inferry.dispatch.rooms import LOOK_S, Rooms
from inferry.dispatch.running import run_plan
from inferry.dispatch.spending import HELD_S, Budget, is_cut, stopped_well
from inferry.dispatch.usage_check import UsageCheck
from inferry.domain.attempts import UNLIMITED, Attempt
from inferry.domain.clock import Clock
from inferry.domain.errors import (
    ClientClosed,
    GatewayError,
    InternalError,
    NoWorker,
    Preempted,
    QueueTimeout,
    WorkerTimeout,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.plans import BatchPlan, Ended, FirstToken, Produced, Whereabouts
from inferry.domain.recovery import Again, next_attempt, whole_usage
from inferry.domain.routes import RouteKey
from inferry.domain.streams import Delta, Done, End, Failed, Item
from inferry.domain.values import replace
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.scheduling.scheduler import Scheduler
from inferry.streams.demux import Demux
from inferry.streams.mailbox import JobStream

log = logging.getLogger(__name__)

REST_S = 0.1
"""How long a lost job rests before it is offered again where only a worker that lost it can take it; four times as long
after the next loss, and again after the one after that."""

_FIRST_TOKEN = FirstToken()
REPORTED_TOKENS = 32
"""Output is charged to its run in pieces of so many tokens, and the rest of it at the end."""


class DispatchLoop:
    """Offers jobs, ticks, runs plans, routes items, settles ends."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        lanes: Mapping[Lane, LanePolicy],
        pool: Pool,
        recorder: Recorder,
        metrics: Metrics,
        clock: Clock,
        on_done: Callable[[InferenceJob, Done], None] | None = None,
        budget: Budget | None = None,
        on_cached: Callable[[str, int, int], None] | None = None,
        door: Door | None = None,
    ) -> None:
        self._scheduler = scheduler
        self.door = door or Door(lanes)
        self._pool = pool
        self._recorder = recorder
        self._metrics = metrics
        self._clock = clock
        self._now = clock.now
        self._on_done = on_done
        self._budget = budget
        self._promises = {
            lane: (policy.ttft_ms / 1000, (policy.gap_ms or 0) / 1000)
            for lane, policy in lanes.items()
            if policy.ttft_ms is not None
        }
        self._rooms = Rooms(lanes, on_cached)
        self._overdue = Overdue(pool.policy.overdue_share)
        self.waits = WaitModel()
        self._demux = Demux()
        self.streams = self._demux.streams
        self._loop = asyncio.get_running_loop()
        self._tick_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._look_due: asyncio.TimerHandle | None = None
        self._described_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.cancels = Cancels(pool.worker, self._spawn)
        self._cancel_reasons: dict[str, GatewayError] = {}
        self._stopped: set[str] = set()
        self._taken_out: set[str] = set()
        self._usage_check = UsageCheck(metrics)
        self._resting: dict[str, asyncio.TimerHandle] = {}
        self._patience = Patience(pool.policy.patience_s, self._now, pool.is_out, self._waiting, self.cancel)
        self._idle = asyncio.Event()
        self._idle.set()
        pool.on_view = self._observe
        pool.on_gone = self._forget
        pool.in_flight = lambda worker: scheduler.use(worker).sequences
        metrics.watch(
            queue_depths=scheduler.depths,
            views=pool.views,
            open_streams=lambda: len(self._demux),
            merged_deltas=lambda: self._demux.tally.deltas,
            ledger_written=lambda: recorder.written,
            ledger_dropped=lambda: recorder.dropped,
            wait_coverage=self.waits.coverages,
        )

    # -- inputs ------------------------------------------------------------------------------------------------------

    def submit(self, job: InferenceJob, may_write: int = UNLIMITED, held: GatewayError | None = None) -> JobStream:
        """Open the job's stream, then offer it: nobody waits for a job that nobody owns.

        `may_write` is how many tokens its budgets grant it for now. A job that is held is offered with `offer_again`,
        or fails after HELD_S with the error `held`.
        Raises QueueFull, or DeadlineInfeasible where the deadline would pass in the queue: before it has waited.
        """
        now = self._now()
        told = predict(self._scheduler, self.waits, job, job.tenant, now)
        if job.deadline is not None and (too_late := infeasible(self.waits, job, told, now)) is not None:
            raise too_late
        if not self.door.is_open(job):
            ask_at(self.door, self.waits, job, predict(self._scheduler, self.waits, job, None, now), now)
        attempt = Attempt(job)
        attempt.grant(may_write)
        attempt.predicted = told
        stream = self._demux.open(attempt)
        try:
            if held is None:
                self._scheduler.offer(job, now)
            else:
                self._resting[job.job_id] = self._loop.call_later(HELD_S, self.cancel, job.job_id, held)
        except Exception as error:
            refusal = error if isinstance(error, GatewayError) else InternalError("the job could not be queued")
            self._demux.close(stream, Failed(job.job_id, refusal))
            raise
        self.door.joined(job)
        self.waits.queued(told, now)
        self._rooms.queued(attempt)
        self._metrics.offered(job)
        self._idle.clear()
        if self._look_due is None:
            self._look()
        self._ask_for_tick()
        return stream

    def cancel(self, job_id: str, error: GatewayError | None = None) -> None:
        """End a job for a reason of its own. Queued, it is gone at once; running, when its worker confirms."""
        stream = self._demux.get(job_id)
        if stream is None:
            return
        reason = error or ClientClosed("the client closed the connection")
        if job_id in self._resting:
            self._resting.pop(job_id).cancel()
            self._end(stream, Failed(job_id, reason), self._now())
            return
        if job_id in self._taken_out or self._scheduler.cancel(job_id) is Whereabouts.QUEUED:
            self._taken_out.discard(job_id)
            self._end(stream, Failed(job_id, reason), self._now())
            self._ask_for_tick()
            return
        self._stop(stream.attempt, reason)

    def take_out(self, job_ids: Iterable[str]) -> set[str]:
        """Take jobs out that are queued, and say which: none of them runs any more. Until each is cancelled, which is
        to be soon, its client waits.
        """
        found = {job_id for job_id in job_ids if self._scheduler.cancel(job_id) is Whereabouts.QUEUED}
        self._taken_out |= found
        self._ask_for_tick()
        return found

    def _stop(self, attempt: Attempt, reason: GatewayError) -> None:
        """Have a running attempt ended by its worker, for this reason."""
        plan, job_id = attempt.plan, attempt.job.job_id
        if plan is not None:
            self._cancel_reasons[job_id] = reason
            self.cancels.send(plan.worker, job_id)

    def has_route(self, route: RouteKey) -> bool:
        """Whether some worker, up or down, could take jobs of the route."""
        return self._scheduler.has_route(route)

    def attempt_of(self, job_id: str) -> Attempt | None:
        """The attempt that a job in flight is at."""
        stream = self._demux.get(job_id)
        return None if stream is None else stream.attempt

    def cancel_all(self, error: GatewayError) -> None:
        for job_id in self._demux.job_ids():
            self.cancel(job_id, error)

    def end_all(self, error: GatewayError) -> None:
        """End what is left, without waiting for workers to confirm."""
        for stream in self._demux.streams():
            if not stream.attempt.is_ended:
                self._end(stream, Failed(stream.attempt.job.job_id, error), self._now())

    async def wait_idle(self) -> None:
        """Until every job that got in has ended."""
        await self._idle.wait()

    async def close(self) -> None:
        """Stop ticking. Jobs that have not ended by now end with an error."""
        for timer in (self._timer, self._look_due, *self._resting.values()):
            if timer is not None:
                timer.cancel()
        self._patience.close()
        self.end_all(InternalError("the gateway stopped"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _observe(self, worker: str) -> None:
        view = self._pool.view(worker)
        self._metrics.know_models(view.models)
        self._metrics.know_worker(worker)
        now = self._now()
        self._scheduler.observe(self._rooms.seen(view, now), now)
        self._patience.look(view.models)
        self._ask_for_tick()

    def _waiting(self, model: str) -> list[InferenceJob]:
        """The jobs of a model that are at no worker."""
        attempts = [stream.attempt for stream in self._demux.streams()]
        return [one.job for one in attempts if one.plan is None and one.job.route.model == model]

    def _forget(self, worker: str) -> None:
        """The worker is gone for good."""
        self._scheduler.forget(worker)
        self._rooms.forget(worker)
        self._overdue.forget(worker)
        self._metrics.forget_worker(worker)
        self._usage_check.forget(worker)
        for stream in self._demux.streams():
            job = stream.attempt.job
            if stream.attempt.plan is None and not self._scheduler.has_route(job.route):
                self.cancel(job.job_id, NoWorker(f"the last worker of model `{job.route.model}` was removed"))

    def _look(self) -> None:
        """Compute the workers' rooms anew. Nobody looks while nothing is in flight: then nothing changes them but time,
        and the first job that comes looks at once.
        """
        self._look_due = None
        now = self._now()
        if log.isEnabledFor(logging.DEBUG) and now >= self._described_at + 1.0:
            self._described_at = now
            for line in self._rooms.describe():
                log.debug(line)
        for view in self._rooms.look(now):
            self._scheduler.observe(view, now)
            self._ask_for_tick()
        for attempt in self._overdue.due(self._pool.heard_at, now):
            self._retry_overdue(attempt, now)
        if len(self._demux):
            self._look_due = self._loop.call_later(LOOK_S, self._look)

    def _retry_overdue(self, attempt: Attempt, now: float) -> None:
        """Retry a call elsewhere whose worker seems frozen, if that may be. The worker gets no more until it has
        confirmed that it let go of the call; whether it is down is for its own watch to say.
        """
        job, plan, stream = attempt.job, attempt.plan, self._demux.get(attempt.job.job_id)
        if plan is None or stream is None or stream.attempt is not attempt or not may_be_retried(attempt):
            return
        worker = plan.worker
        if self._pool.serves_besides(job.route.model, (*job.route.avoid, worker)) and self._overdue.take():
            self._over(stream, Failed(job.job_id, WorkerTimeout(f"the first token from {worker} is overdue")), now)
            self._pool.suspect(worker, self.cancels.send(worker, job.job_id))

    def _ask_for_tick(self) -> None:
        if not self._tick_due:
            self._tick_due = True
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._tick_due = False
        now = self._now()
        tick = self._scheduler.tick(now)
        for plan in tick.plans:
            self._metrics.planned(plan, now)
            for job in plan.jobs:
                stream = self._demux.get(job.job_id)
                assert stream is not None, "a planned job has a stream"
                stream.attempt.sent(plan, now)
                self.door.left(job)
                self._rooms.sent(stream.attempt, now)
                self._overdue.sent(plan.worker, stream.attempt)
                told = stream.attempt.predicted
                if isinstance(told, Told):
                    self.waits.sent(told, now)
            self._spawn(self._run(plan))
        for job in tick.evictions:
            stream = self._demux.get(job.job_id)
            if stream is not None and job.job_id not in self._cancel_reasons:
                self._stop(stream.attempt, Preempted(f"stopped for a job of a higher lane than {job.lane.name}"))
        for job in tick.expired:
            stream = self._demux.get(job.job_id)
            if stream is not None:
                waited = (now - job.arrived_at) * 1000
                error = QueueTimeout(f"the deadline passed after {waited:.0f} ms in the queue of lane {job.lane.name}")
                self._end(stream, Failed(job.job_id, error), now)
        self._sleep_until(tick.wake_at)

    def _sleep_until(self, wake_at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at is not None:
            self._timer = self._loop.call_later(max(0.0, wake_at - self._now()), self._tick)

    # -- acting ------------------------------------------------------------------------------------------------------

    async def _run(self, plan: BatchPlan) -> None:
        """Run one plan to the end of every job in it, whatever the worker does."""
        broken: GatewayError = InternalError("the gateway stopped")
        try:
            broken = await run_plan(self._pool.worker(plan.worker), plan, partial(self._emit, plan))
        finally:
            now = self._now()
            for job in plan.jobs:
                stream = self._demux.get(job.job_id)
                if stream is not None and stream.attempt.plan is plan:
                    self._over(stream, Failed(job.job_id, broken), now)
            self._ask_for_tick()

    def _emit(self, plan: BatchPlan, item: Item) -> None:
        """Where workers put items. Called once per event, so it does no more than it must."""
        stream = self._demux.get(item.job_id)
        if stream is None:
            return  # late: the job has ended
        attempt = stream.attempt
        if attempt.plan is not plan:
            return  # late: somebody else goes on with it
        now = self._now()
        if type(item) is not Delta:
            self._over(stream, item, now)  # type: ignore[arg-type]
            self._ask_for_tick()
            return
        if item.tokens:
            job = attempt.job
            last = attempt.last_token_at
            if last is None:
                attempt.first_token(now)
                self._rooms.first_token(attempt, now)
                self._overdue.first_token(plan.worker, attempt, now)
                if job.so_far is None:
                    self._metrics.first_token(attempt)
                self._scheduler.progress(job.job_id, _FIRST_TOKEN, now)
                self._ask_for_tick()
            else:
                self._metrics.token_gap(job.lane, now - last)
                attempt.last_token_at = now
            promise = self._promises.get(job.lane)
            if promise is not None and now - attempt.promised_from > promise[0] + attempt.output_tokens * promise[1]:
                attempt.promise_kept = False
            attempt.output_tokens += item.tokens
            if attempt.output_tokens >= attempt.ask_at and not self._may_go_on(attempt, item):
                return
            if attempt.output_tokens >= attempt.reported_tokens + REPORTED_TOKENS:
                self._scheduler.progress(job.job_id, Produced(attempt.output_tokens - attempt.reported_tokens), now)
                attempt.reported_tokens = attempt.output_tokens
        stream.push(item)

    def _may_go_on(self, attempt: Attempt, item: Delta) -> bool:
        """Whether the piece may be delivered. A job whose budget is used up is stopped, and ends well."""
        job, budget = attempt.job, self._budget
        assert budget is not None, "who grants so much may be asked for more"
        if job.job_id not in self._stopped:
            before = 0 if job.so_far is None else len(job.so_far.output_ids)
            attempt.grant(budget.more(job.job_id, before + attempt.output_tokens))
            if attempt.output_tokens < max(attempt.may_write, attempt.ask_at):
                return True
            self._stopped.add(job.job_id)
            self._stop(attempt, budget.why(job.job_id))
            attempt.ask_at = 0  # whatever still comes is too much
            if attempt.output_tokens == attempt.may_write:
                return True
        attempt.output_tokens -= item.tokens
        return False

    def _over(self, stream: JobStream, end: End, now: float) -> None:
        """A worker is done with a job. The job is over too, unless it is to go on elsewhere."""
        end = self._usage_check.of(stream.attempt, end)
        if self._cancel_reasons:
            reason = self._cancel_reasons.pop(end.job_id, None)
            if end.job_id in self._stopped:
                end = stopped_well(stream.attempt, end, reason)
            elif reason is not None and isinstance(end, Failed):
                end = replace(end, error=reason)
        if isinstance(end, Failed) and end.error.elsewhere and self._may_wait(end.error):
            then = next_attempt(stream.attempt, end)
            if isinstance(then, Again):
                self._go_on(stream, end, then, now)
                return
            end = then or end
        self._end(stream, end, now)

    def _may_wait(self, error: GatewayError) -> bool:
        return (error.retry_after_s or 0.0) <= self._pool.policy.patience_s

    def _go_on(self, stream: JobStream, end: Failed, then: Again, now: float) -> None:
        """Account for the attempt that is over and offer the job again."""
        lost = stream.attempt
        if self._budget is not None and (unwelcome := self._budget.is_welcome(then.job)) is not None:
            self._end(stream, replace(end, error=unwelcome), now)
            return
        lost.ended(end, now)
        self._settle(lost, end, now, resumed=not then.from_start)
        attempt = Attempt(then.job)
        # What was granted stands; what was lost with a worker is not charged.
        attempt.grant(lost.granted)
        attempt.promise_kept = lost.promise_kept
        promise = self._promises.get(then.job.lane)
        if then.job.so_far is not None and promise is not None:
            attempt.promised_from += len(then.job.so_far.output_ids) * promise[1]
        stream.again(attempt, from_start=then.from_start)
        self.door.joined(then.job)
        self._rooms.queued(attempt)
        self._metrics.offered(then.job)
        job_id = then.job.job_id
        losses = then.job.attempt - 1 - then.job.preemptions
        if not losses or self._pool.serves_besides(then.job.route.model, then.job.route.avoid):
            self.offer_again(job_id)
        else:
            rest_s = max(REST_S * 4 ** min(losses - 1, 2), end.error.retry_after_s or 0.0)
            self._resting[job_id] = self._loop.call_later(rest_s, self.offer_again, job_id)

    def offer_again(self, job_id: str) -> None:
        if (timer := self._resting.pop(job_id, None)) is not None:
            timer.cancel()
        stream = self._demux.get(job_id)
        if stream is not None:
            self._scheduler.offer(stream.attempt.job, self._now())
            self._ask_for_tick()

    def _end(self, stream: JobStream, end: End, now: float) -> None:
        """The one place where a job ends."""
        attempt = stream.attempt
        job = attempt.job
        self._cancel_reasons.pop(job.job_id, None)
        self._stopped.discard(job.job_id)
        self._taken_out.discard(job.job_id)
        if self._budget is not None and is_cut(job, end):
            end = replace(end, stopped=self._budget.why(job.job_id), by_engine=True)
        attempt.ended(end, now)
        usage = whole_usage(job, attempt.usage())
        cost = None if self._budget is None else self._budget.ended(attempt, usage, now)
        self._settle(attempt, end, now, cost=cost)
        if job.so_far is not None and isinstance(end, Done):
            end = replace(end, usage=usage, raw=b"")
        self._demux.close(stream, end)
        if isinstance(end, Done) and self._on_done is not None and attempt.teaches and end.stopped is None:
            self._on_done(job, end)
        if not len(self._demux):
            self._idle.set()

    def _settle(
        self, attempt: Attempt, end: End, now: float, *, resumed: bool | None = None, cost: int | None = None
    ) -> None:
        """Give back what an attempt held, and account for it. `resumed` says how its job goes on, if it does; then the
        attempt costs its tenant nothing, and the last one pays for what was delivered.
        """
        job = attempt.job
        if attempt.sent_at is None:
            self.door.left(job)
            if isinstance(attempt.predicted, Told):
                self.waits.left(attempt.predicted, now)
        self._rooms.ended(attempt, now)
        usage = end.usage
        self._scheduler.progress(
            job.job_id,
            Ended(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
            if isinstance(end, Done)
            else Ended(output_tokens=max(usage.output_tokens, attempt.output_tokens)),
            now,
        )
        entry = attempt.entry(self._clock.wall(), cost)
        self._metrics.ended(attempt, promised=job.lane in self._promises, entry=entry, resumed=resumed)
        self._recorder.record(entry)
        if attempt.plan is not None:
            if attempt.first_token_at is None:
                self._overdue.ended(attempt.plan.worker, attempt)
            if isinstance(end, Done):
                self._pool.served(attempt.plan.worker)
            else:
                self._pool.lost(attempt.plan.worker, job.job_id, end.error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
