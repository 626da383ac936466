"""Takes async jobs to their end, also those that a killed process left.

Belongs to the event loop it is started on. The database is the truth: a job that was cut off at any point runs again,
under the same job id where its try had not ended, so that the ledger charges it once.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from math import ceil
from typing import Any, Protocol

import msgspec

from inferry.domain.async_jobs import AsyncJob, AsyncJobStatus, JobEnd, JobTry
from inferry.domain.clock import Clock
from inferry.domain.errors import RunCancelled
from inferry.durable.async_job_queue import AsyncJobQueue, WaitingJob
from inferry.durable.execute import CallAnswer, Execute, StoredCall
from inferry.durable.executor import StoreExecutor
from inferry.durable.outages import until_done
from inferry.durable.result_recorder import ResultRecorder
from inferry.durable.retries import call_once, is_refusal, retry_delay_s

log = logging.getLogger(__name__)

RETRY_S = 0.5
_NO_ANSWER = (
    b'{"error":{"message":"the call broke off without an answer","type":"server_error",'
    b'"param":null,"code":"internal_error"}}'
)


class RunnerStore(Protocol):
    """Where jobs are kept. Its methods block."""

    def unfinished(self) -> list[AsyncJob]: ...
    def load(self, id: str) -> tuple[AsyncJob, bytes, bool] | None: ...
    def record(self, records: list[JobEnd | JobTry]) -> None: ...


class _Entry:
    """An unfinished job: its timer, and its task once it has begun."""

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.timer = timer
        self.task: asyncio.Task[None] | None = None


class AsyncJobRunner:
    """All async jobs of the gateway. `on_end` is called when a job has ended and that is stored."""

    def __init__(
        self,
        store: RunnerStore,
        executor: StoreExecutor,
        execute: Execute,
        recorder: ResultRecorder[JobEnd | JobTry],
        clock: Clock,
        *,
        concurrency: int,
        ttl_s: float | None,
        on_end: Callable[[], None],
    ) -> None:
        self._store = store
        self._executor = executor
        self._execute = execute
        self._recorder = recorder
        self._clock = clock
        self._ttl_s = ttl_s
        self._on_end = on_end
        self._concurrency = concurrency
        self._queue = AsyncJobQueue(concurrency)
        self._is_stopped = False
        self._entries: dict[str, _Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self.ended: Counter[str] = Counter()
        """Jobs that this process ended, by status."""

    def start(self) -> None:
        """Continue what has not ended."""
        self._is_stopped = False
        self._spawn(self._dispatch())

    async def close(self) -> None:
        """Stop. Jobs in flight run again after the next `start`, here or at another gateway."""
        self._is_stopped = True
        for entry in self._entries.values():
            entry.timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._recorder.close()
        self._entries.clear()
        self._queue = AsyncJobQueue(self._concurrency)

    async def poll(self) -> None:
        """Run what other gateways have accepted."""
        for job in await self._executor.run(self._store.unfinished):
            self.add(job)

    def add(self, job: AsyncJob) -> None:
        """Run a job that is in the database. After `close` this is left to another gateway."""
        if job.id not in self._entries and not self._is_stopped:
            left_s = max(0.0, job.deadline - self._clock.wall())
            timer = asyncio.get_running_loop().call_later(left_s, self._expire, job.id)
            self._entries[job.id] = _Entry(timer)
            self._queue.add(WaitingJob(job.id, job.tenant, job.lane))
            self._wake.set()

    def stop(self, id: str) -> None:
        """Stop a job that has ended in the database, or that was deleted."""
        entry = self._entries.pop(id, None)
        if entry is not None:
            entry.timer.cancel()
            if entry.task is not None:
                entry.task.cancel()
        self._on_end()

    def end_of(self, id: str, status: AsyncJobStatus, answer: CallAnswer | None = None) -> JobEnd:
        """The end of a job at this moment."""
        now = self._clock.wall()
        expires_at = None if self._ttl_s is None else now + self._ttl_s
        if answer is None:
            return JobEnd(id=id, status=status, at=now, expires_at=expires_at)
        return JobEnd(
            id=id,
            status=status,
            at=now,
            expires_at=expires_at,
            answer_status=answer.status,
            answer=_json(answer.body),
            request_id=answer.request_id,
        )

    async def _dispatch(self) -> None:
        await self._resume()
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            # One reading for both: a timer may fire early, and a second reading could be behind the time it waits for.
            now = loop.time()
            while (job := self._queue.next(now)) is not None:
                if (entry := self._entries.get(job.id)) is None:
                    self._queue.ended(job)  # it was stopped while it waited
                else:
                    entry.task = self._spawn(self._run(job))
            try:
                async with asyncio.timeout_at(self._queue.wake_at(now)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _resume(self) -> None:
        found = await until_done(partial(self._executor.run, self._store.unfinished), "read unfinished jobs")
        if found:
            log.info("continuing %d unfinished jobs", len(found))
        for job in found:
            self.add(job)

    async def _run(self, waiting: WaitingJob) -> None:
        """One job from its place in the queue to its end, or back into the queue."""
        loop = asyncio.get_running_loop()
        retry_s: float | None = None
        try:
            found = await self._executor.run(self._store.load, waiting.id)
            if found is not None:
                retry_s = await self._call(*found)
        except Exception as error:
            retry_s = RETRY_S
            log.error("job %s is interrupted (next try in %.1f s): %s", waiting.id, retry_s, type(error).__name__)
        finally:
            entry = self._entries.get(waiting.id)
            if retry_s is not None and entry is not None:
                entry.task = None
                self._queue.refused(waiting, loop.time() + retry_s)
            else:
                self._queue.ended(waiting)
            self._wake.set()
        if retry_s is None and entry is not None:
            entry.task = None  # this task itself, which must not be cancelled here
            self.stop(waiting.id)

    async def _call(self, job: AsyncJob, body: bytes, is_charged: bool) -> float | None:
        """Execute a job and record its end. Seconds until it may begin again where it was refused.

        `is_charged`: the ledger has charged the current try, for a process that ended before it had written the answer.
        """
        call, tries, failures = self._stored_call(job, body), job.tries, 0
        while True:
            answer = await call_once(self._execute, call, tries)
            failures += not is_refusal(answer)
            delay_s = retry_delay_s(answer, failures)
            if delay_s is None:
                break
            if not is_charged:  # else every further try has the job id that was charged
                tries += 1
                await self._recorder.record(JobTry(job.id, tries))
            if is_refusal(answer):
                return delay_s
            await asyncio.sleep(delay_s)
        if 200 <= answer.status < 300:
            end = self.end_of(job.id, "completed", answer)
        elif answer.code == RunCancelled.code:
            end = self.end_of(job.id, "cancelled")
        elif self._clock.wall() >= job.deadline:
            end = self.end_of(job.id, "expired")
        else:
            end = self.end_of(job.id, "failed", answer)
        await self._recorder.record(end)
        self.ended[end.status] += 1
        return None

    def _stored_call(self, job: AsyncJob, body: bytes) -> StoredCall:
        detail = job.detail
        headers = {name.encode(): value.encode("latin-1") for name, value in detail.headers.items()}
        if detail.has_deadline:
            # Rounded up: the job expires, rather than that its call fails just before.
            left_ms = max(0, ceil(1000 * (job.deadline - self._clock.wall())))
            headers[b"x-inferry-deadline-ms"] = b"%d" % left_ms
        return StoredCall(
            tenant=job.tenant,
            key_id=job.key_id,
            path=job.endpoint,
            body=body,
            job_id=job.id,
            run_id=detail.run_id,
            step_id=detail.step_id,
            lane=job.lane,
            headers=headers,
        )

    def _expire(self, id: str) -> None:
        self._spawn(self._end_expired(id))

    async def _end_expired(self, id: str) -> None:
        await self._recorder.record(self.end_of(id, "expired"))
        self.ended["expired"] += 1
        self.stop(id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _json(body: bytes) -> bytes:
    """The body of an answer; an error where it is no JSON, because the call broke off."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
        return body
    except msgspec.DecodeError:
        return _NO_ANSWER
