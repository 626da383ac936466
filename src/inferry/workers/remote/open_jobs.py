"""The jobs that an ingress process has passed on to the owner and that have not ended."""

import asyncio
from collections.abc import Callable, Iterable

from inferry.cluster.frames import Cancelled, Failure, Finish, Piece, Placed, RateLimitFields, Restart
from inferry.cluster.job_fields import fields_to_error, fields_to_resume
from inferry.domain.errors import WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, End, Failed, Item, Restarted, Usage
from inferry.domain.streams import Placed as PlacedItem
from inferry.workers.plan_completion import PlanCompletion
from inferry.workers.remote.resume_tracker import AssemblerFor, ResumeTracker, tracker_for


class OpenJob:
    """One job. `resumed_tokens`: output tokens before the point from which it was resumed."""

    __slots__ = ("completion", "emit", "index", "job", "key", "resumed_tokens", "tokens", "tracker")

    def __init__(
        self, key: int, job: InferenceJob, emit: Emit, completion: PlanCompletion, tracker: ResumeTracker | None
    ) -> None:
        self.key = key
        self.job = job
        self.emit = emit
        self.completion = completion
        self.tracker = tracker
        self.index = 0
        self.tokens = 0
        self.resumed_tokens = 0 if job.resume_point is None else len(job.resume_point.output_ids)


class OpenJobs:
    """Messages of the owner in, items out. A job is here until its end is emitted, which happens exactly once.

    `on_rate_limits` is called with the rate limits of a job's caller as the owner knows them.
    """

    def __init__(self, assembler_for: AssemblerFor) -> None:
        self._assembler_for = assembler_for
        self._keys = 0
        self._calls = 0
        self._by_key: dict[int, OpenJob] = {}
        self._by_id: dict[str, OpenJob] = {}
        self._cancels: dict[int, asyncio.Future[list[int]]] = {}
        self.on_rate_limits: Callable[[InferenceJob, RateLimitFields], None] = lambda job, limits: None

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, job: InferenceJob, emit: Emit, completion: PlanCompletion) -> OpenJob:
        self._keys += 1
        opened = OpenJob(self._keys, job, emit, completion, tracker_for(job, self._assembler_for))
        self._by_key[opened.key] = self._by_id[job.job_id] = opened
        return opened

    def drop(self, completion: PlanCompletion) -> list[int]:
        """Forget the jobs of a plan without emitting their ends: the plan was cancelled. Returns their keys."""
        dropped = [opened for opened in self._by_key.values() if opened.completion is completion]
        for opened in dropped:
            self._forget(opened)
        return [opened.key for opened in dropped]

    # -- cancels -----------------------------------------------------------------------------------------------------

    def begin_cancel(self, job_ids: Iterable[str]) -> tuple[int, list[int]]:
        """The number of the call and the keys of the jobs that the owner has."""
        found = [self._by_id[job_id].key for job_id in job_ids if job_id in self._by_id]
        self._calls += 1
        if found:
            self._cancels[self._calls] = asyncio.get_running_loop().create_future()
        return self._calls, found

    async def confirmed(self, call: int, keys: list[int]) -> frozenset[str]:
        """The jobs of the call that the owner has confirmed; none where it was lost."""
        names = {key: self._by_key[key].job.job_id for key in keys}
        freed = await self._cancels[call]
        return frozenset(names[key] for key in freed if key in names)

    def on_cancelled(self, message: Cancelled) -> None:
        waiting = self._cancels.pop(message.call, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.keys)

    # -- output ------------------------------------------------------------------------------------------------------

    def on_piece(self, piece: Piece) -> None:
        """Runs once per piece of output: the hot path."""
        opened = self._by_key.get(piece.key)
        if opened is None:
            return  # late: the job has ended here
        job, raw = opened.job, piece.raw
        tracker = opened.tracker
        if tracker is not None:
            raw = tracker.add(raw, piece.token_ids)
        index = opened.index
        opened.index = index + 1
        opened.tokens += piece.tokens
        self._emit(
            opened,
            Delta(
                job.job_id,
                job.run_id,
                job.step_id,
                index,
                piece.text,
                piece.token_ids,
                piece.tokens,
                raw,
                piece.is_last,
            ),
        )

    def on_placed(self, message: Placed) -> None:
        opened = self._by_key.get(message.key)
        if opened is not None:
            if message.rate_limits is not None:
                self.on_rate_limits(opened.job, message.rate_limits)
            placed = PlacedItem(
                opened.job.job_id,
                message.worker,
                message.queue_s,
                message.batch_size,
                message.shared_with,
                message.is_replay,
            )
            self._emit(opened, placed)

    def on_restart(self, message: Restart) -> None:
        opened = self._by_key.get(message.key)
        if opened is not None:
            point = None if message.resume_point is None else fields_to_resume(message.resume_point)
            opened.index = opened.tokens = 0
            opened.resumed_tokens = 0 if point is None else len(point.output_ids)
            if opened.tracker is not None:
                opened.tracker.restarted(point)
            self._emit(opened, Restarted(opened.job.job_id, message.attempt, point))

    # -- ends --------------------------------------------------------------------------------------------------------

    def on_finish(self, message: Finish) -> None:
        opened = self._by_key.get(message.key)
        if opened is not None:
            usage, stopped = message.usage, message.stopped
            # The owner reports the usage of the whole job, and a worker that of its attempt.
            written = max(0, usage.output_tokens - opened.resumed_tokens)
            done = Done(
                opened.job.job_id,
                message.finish,
                Usage(usage.prompt_tokens, usage.cached_tokens, written, usage.gpu_seconds),
                message.raw,
                None if stopped is None else fields_to_error(stopped),
                message.stopped_by_engine,
                message.stop_reason,
                message.shape,
            )
            self._end(opened, done)

    def on_failure(self, message: Failure) -> None:
        opened = self._by_key.get(message.key)
        if opened is not None:
            if message.rate_limits is not None:
                self.on_rate_limits(opened.job, message.rate_limits)
            usage, point = message.usage, message.resume_point
            failed = Failed(
                opened.job.job_id,
                fields_to_error(message.error),
                Usage(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.gpu_seconds),
                None if point is None else fields_to_resume(point),
            )
            self._end(opened, failed)

    def fail_all(self, reason: str) -> None:
        """The owner is lost: every job ends, with the point from which another owner can resume it."""
        for opened in list(self._by_key.values()):
            point = None if opened.tracker is None else opened.tracker.resume_point()
            usage = Usage(output_tokens=opened.tokens)
            self._end(opened, Failed(opened.job.job_id, WorkerLost(reason), usage, point))
        for waiting in self._cancels.values():
            if not waiting.done():
                waiting.set_result([])
        self._cancels.clear()

    def _end(self, opened: OpenJob, end: End) -> None:
        self._forget(opened)
        self._emit(opened, end)
        opened.completion.job_ended()

    def _forget(self, opened: OpenJob) -> None:
        self._by_key.pop(opened.key, None)
        if self._by_id.get(opened.job.job_id) is opened:
            del self._by_id[opened.job.job_id]

    def _emit(self, opened: OpenJob, item: Item) -> None:
        try:
            opened.emit(item)
        except Exception as error:
            # Raised where the plan is awaited, which ends the plan's other jobs; not in the connection's callback.
            opened.completion.fail(error)
