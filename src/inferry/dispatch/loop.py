"""The loop that owns the scheduler.

Everything here runs on one event loop; nothing else may touch the scheduler. Inputs (a job, a cancel, an item, a new
view) change the scheduler's state and ask for a tick; the tick runs once the current burst of callbacks is over, so
that jobs which arrive together are planned together. Between inputs the loop sleeps exactly until `wake_at`.

Every job that gets in ends exactly once: by its worker, by its own cancel, by its deadline, or by the runner when the
worker breaks its word.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping

from inferry.admission.waits import NOBODY, Told, WaitModel, infeasible
from inferry.dispatch.pool import Pool
from inferry.dispatch.rooms import LOOK_S, Rooms
from inferry.domain.attempts import Attempt
from inferry.domain.clock import Clock
from inferry.domain.errors import ClientClosed, GatewayError, InternalError, QueueFull, QueueTimeout, WorkerLost
from inferry.domain.jobs import InferenceJob, Lane, LanePolicy
from inferry.domain.plans import BatchPlan, Ended, FirstToken, Whereabouts
from inferry.domain.ports import Worker
from inferry.domain.streams import Delta, Done, End, Failed, Item
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.scheduling.scheduler import Scheduler
from inferry.streams.demux import Demux
from inferry.streams.mailbox import JobStream, OutOfOrder

log = logging.getLogger(__name__)

_FIRST_TOKEN = FirstToken()
_ENDED = Ended()


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
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._recorder = recorder
        self._metrics = metrics
        self._clock = clock
        self._now = clock.now
        self._on_done = on_done
        self._promises = {
            lane: (policy.ttft_ms / 1000, (policy.gap_ms or 0) / 1000)
            for lane, policy in lanes.items()
            if policy.ttft_ms is not None
        }
        self._rooms = Rooms(lanes)
        self.waits = WaitModel()
        self._demux = Demux()
        self._loop = asyncio.get_running_loop()
        self._tick_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._look_due: asyncio.TimerHandle | None = None
        self._described_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancels: dict[str, list[str]] = {}
        self._cancel_reasons: dict[str, GatewayError] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        pool.on_view = self._observe
        metrics.watch(
            queue_depths=scheduler.depths,
            views=pool.views,
            open_streams=lambda: len(self._demux),
            merged_deltas=lambda: self._demux.tally.deltas,
            ledger_written=lambda: recorder.written,
            ledger_dropped=lambda: recorder.dropped,
        )

    # -- inputs ------------------------------------------------------------------------------------------------------

    def submit(self, job: InferenceJob) -> JobStream:
        """Open the job's stream, then offer it: nobody waits for a job that nobody owns.

        Raises QueueFull, or DeadlineInfeasible where the deadline would pass in the queue: before it has waited.
        """
        now = self._now()
        told = self._predict(job, job.tenant, now)
        if job.deadline is not None and (too_late := infeasible(self.waits, job, told, now)) is not None:
            raise too_late
        attempt = Attempt(job)
        attempt.predicted = told
        stream = self._demux.open(attempt)
        try:
            self._scheduler.offer(job, now)
        except Exception as error:
            if isinstance(error, QueueFull):
                self._say_when_to_come_back(error, job, now)
            refusal = error if isinstance(error, GatewayError) else InternalError("the job could not be queued")
            self._demux.close(stream, Failed(job.job_id, refusal))
            raise
        self.waits.queued(told, now)
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
        if self._scheduler.cancel(job_id) is Whereabouts.QUEUED:
            self._end(stream, Failed(job_id, reason), self._now())
            self._ask_for_tick()
            return
        plan = stream.attempt.plan
        if plan is not None:
            self._cancel_reasons[job_id] = reason
            waiting = self._cancels.setdefault(plan.worker, [])
            if not waiting:
                self._spawn(self._send_cancels(plan.worker))
            waiting.append(job_id)

    def cancel_all(self, error: GatewayError) -> None:
        for job_id in self._demux.job_ids():
            self.cancel(job_id, error)

    def end_all(self, error: GatewayError) -> None:
        """End what is left, without waiting for workers to confirm."""
        for job_id in self._demux.job_ids():
            stream = self._demux.get(job_id)
            if stream is not None:
                self._end(stream, Failed(job_id, error), self._now())

    async def wait_idle(self) -> None:
        """Until every job that got in has ended."""
        await self._idle.wait()

    async def close(self) -> None:
        """Stop ticking. Jobs that have not ended by now end with an error."""
        for timer in (self._timer, self._look_due):
            if timer is not None:
                timer.cancel()
        self.end_all(InternalError("the gateway stopped"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- waits -------------------------------------------------------------------------------------------------------

    def _predict(self, job: InferenceJob, tenant: str | None, now: float) -> Told:
        lane, footprint = job.lane, job.footprint
        ahead = self._scheduler.ahead(lane, tenant) if self.waits.is_behind_somebody(lane) else NOBODY
        return self.waits.predict(lane, footprint.prefill_tokens, footprint.output.expected, ahead, now)

    def _say_when_to_come_back(self, refusal: QueueFull, job: InferenceJob, now: float) -> None:
        """When all that the lane holds now will have gone, where anything is known about that."""
        told = self._predict(job, None, now)
        if told.middle_s > 0:
            refusal.retry_after_s = self.waits.retry_after(told)
            refusal.predicted_wait_s = told.p50_s

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _observe(self, worker: str) -> None:
        view = self._pool.view(worker)
        self._metrics.know_models(view.models)
        now = self._now()
        self._scheduler.observe(self._rooms.seen(view, now), now)
        self._ask_for_tick()

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
        if len(self._demux):
            self._look_due = self._loop.call_later(LOOK_S, self._look)

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
                self._rooms.sent(stream.attempt, now)
                told = stream.attempt.predicted
                if isinstance(told, Told):
                    self.waits.sent(told, now)
            self._spawn(self._run(plan))
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
        worker: Worker | None = self._pool.worker(plan.worker)
        broken: GatewayError = WorkerLost(f"worker {plan.worker} returned before the end of the job")
        try:
            if worker is None:
                broken = WorkerLost(f"worker {plan.worker} is gone")
            else:
                await worker.run(plan, self._emit)
        except asyncio.CancelledError:
            broken = InternalError("the gateway stopped")
            raise
        except GatewayError as error:
            broken = error
        except OutOfOrder as error:
            log.error("worker %s broke its contract: %s", plan.worker, error)
            broken = WorkerLost(f"worker {plan.worker} mixed up its stream")
        except Exception:
            log.exception("worker %s failed", plan.worker)
            broken = WorkerLost(f"worker {plan.worker} failed")
        finally:
            now = self._now()
            for job in plan.jobs:
                stream = self._demux.get(job.job_id)
                if stream is not None and stream.attempt.plan is plan:
                    self._end(stream, Failed(job.job_id, broken), now)
            self._ask_for_tick()

    def _emit(self, item: Item) -> None:
        """Where workers put items. Called once per event, so it does no more than it must."""
        stream = self._demux.get(item.job_id)
        if stream is None:
            return  # late: the job has ended
        now = self._now()
        if type(item) is not Delta:
            self._end(stream, item, now)  # type: ignore[arg-type]
            self._ask_for_tick()
            return
        if item.tokens:
            attempt = stream.attempt
            job = attempt.job
            last = attempt.last_token_at
            if last is None:
                attempt.first_token(now)
                self._rooms.first_token(attempt, now)
                self._metrics.first_token(attempt)
                self._scheduler.progress(job.job_id, _FIRST_TOKEN, now)
                self._ask_for_tick()
            else:
                self._metrics.token_gap(job.lane, now - last)
                attempt.last_token_at = now
            promise = self._promises.get(job.lane)
            if promise is not None and now - job.arrived_at > promise[0] + attempt.output_tokens * promise[1]:
                attempt.promise_kept = False
            attempt.output_tokens += item.tokens
        stream.push(item)

    def _end(self, stream: JobStream, end: End, now: float) -> None:
        """The one place where a job ends."""
        attempt = stream.attempt
        job = attempt.job
        if self._cancel_reasons:
            reason = self._cancel_reasons.pop(job.job_id, None)
            if reason is not None and isinstance(end, Failed):
                end = Failed(job.job_id, reason, end.usage)
        if attempt.sent_at is None and isinstance(attempt.predicted, Told):
            self.waits.left(attempt.predicted, now)
        attempt.ended(end, now)
        self._rooms.ended(attempt, now)
        self._scheduler.progress(job.job_id, _ENDED, now)
        self._demux.close(stream, end)
        entry = attempt.entry(self._clock.wall())
        self._metrics.ended(attempt, promised=job.lane in self._promises, entry=entry)
        self._recorder.record(entry)
        if isinstance(end, Done):
            if self._on_done is not None:
                self._on_done(job, end)
        elif isinstance(end.error, WorkerLost) and attempt.plan is not None:
            self._pool.look_at(attempt.plan.worker)
        if not len(self._demux):
            self._idle.set()

    async def _send_cancels(self, worker_name: str) -> None:
        # Cancels of one burst of callbacks travel together.
        job_ids = self._cancels.pop(worker_name)
        worker = self._pool.worker(worker_name)
        if worker is not None:
            try:
                await worker.cancel(job_ids)
            except Exception:
                log.exception("worker %s could not cancel %d jobs", worker_name, len(job_ids))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
