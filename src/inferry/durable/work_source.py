"""Work of the queue in the database: loaded, tried, ended once. Used by a gateway for itself and for pull-workers.

Belongs to one event loop. Every write is conditional on work that has not ended: of several results the first is kept.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec

from inferry.domain.async_jobs import AsyncJob, AsyncJobStatus, JobEnd, JobTry
from inferry.domain.clock import Clock
from inferry.domain.errors import RunCancelled
from inferry.domain.storage import Batch, BatchItem, BatchStatus, ItemResult, ItemTry
from inferry.domain.work_queue import QueueEntry
from inferry.durable.batch_lines import result_of
from inferry.durable.dead_letters import DEAD_LETTER, DeadLetter, DeadLetters
from inferry.durable.execute import CallAnswer
from inferry.durable.executor import StoreExecutor
from inferry.durable.result_recorder import ResultRecorder
from inferry.durable.stored_work import StoredWork, item_of, model_in, work_of_item, work_of_job

T = TypeVar("T")
P = ParamSpec("P")

log = logging.getLogger(__name__)

INITIAL_RETRY_S, MAX_RETRY_S = 0.05, 2.0
_NO_ANSWER = (
    b'{"error":{"message":"the call broke off without an answer","type":"server_error",'
    b'"param":null,"code":"internal_error"}}'
)


class JobStore(Protocol):
    """Where async jobs are kept. Its methods block."""

    def load_many(self, ids: Sequence[str]) -> list[tuple[AsyncJob, bytes, bool]]: ...
    def open_ids(self, ids: Sequence[str]) -> frozenset[str]: ...
    def record(self, records: list[JobEnd | JobTry]) -> None: ...


class ItemStore(Protocol):
    """Where items of batches are kept. Its methods block."""

    def load_items(self, wanted: Sequence[tuple[str, int]]) -> list[tuple[Batch, BatchItem]]: ...
    def open_items(self, wanted: Sequence[tuple[str, int]]) -> frozenset[tuple[str, int]]: ...
    def move(
        self, id: str, current: Sequence[BatchStatus], status: BatchStatus, now: float, **changes: Any
    ) -> bool: ...
    def record(self, records: list[ItemResult | ItemTry]) -> None: ...


class DatabaseWork:
    """Implements `WorkSource`. `on_end` is called when an async job has ended and that is stored."""

    def __init__(
        self,
        jobs: JobStore,
        items: ItemStore,
        executor: StoreExecutor,
        clock: Clock,
        dead_letters: DeadLetters,
        *,
        write_ledger: Callable[[], object],
        ttl_s: float | None,
        on_end: Callable[[], None],
    ) -> None:
        self._jobs = jobs
        self._items = items
        self._run = executor.run
        self._clock = clock
        self._dead_letters = dead_letters
        self._job_recorder = ResultRecorder[JobEnd | JobTry](jobs, executor, write_ledger)
        self._item_recorder = ResultRecorder[ItemResult | ItemTry](items, executor, write_ledger)
        self._ttl_s = ttl_s
        self._on_end = on_end
        self.ended_jobs: Counter[str] = Counter()
        """Async jobs that this process ended, by status."""

    async def close(self) -> None:
        await self._job_recorder.close()
        await self._item_recorder.close()

    async def load(self, ids: Sequence[str]) -> Mapping[str, StoredWork]:
        jobs, items = _split(ids)
        found: list[StoredWork] = []
        if jobs:
            rows = await self._run(self._jobs.load_many, jobs)
            found += [work_of_job(job, body, is_charged=is_charged) for job, body, is_charged in rows]
        if items:
            found += [work_of_item(*one) for one in await self._run(self._items.load_items, list(items))]
        return {work.id: work for work in found}

    async def ended(self, ids: Sequence[str]) -> Collection[str]:
        jobs, items = _split(ids)
        ended = set(jobs)
        if jobs:
            ended -= await self._run(self._jobs.open_ids, jobs)
        if items:
            is_open = await self._run(self._items.open_items, list(items))
            ended |= {id for item, id in items.items() if item not in is_open}
        return ended

    async def begin_try(self, work: StoredWork, tries: int) -> None:
        item = item_of(work.id)
        if item is None:
            await self._job_recorder.record(JobTry(work.id, tries))
        else:
            await self._item_recorder.record(ItemTry(*item, tries))

    async def finish(self, work: StoredWork, answer: CallAnswer) -> None:
        item = item_of(work.id)
        if item is not None:
            await self._finish_item(item, answer)
        elif 200 <= answer.status < 300:
            await self._end_job(work.id, "completed", answer)
        elif answer.code == RunCancelled.code:
            await self._end_job(work.id, "cancelled")
        elif self._clock.wall() >= work.deadline:
            await self._end_job(work.id, "expired")
        else:
            await self._end_job(work.id, "failed", answer)

    async def expire(self, work: StoredWork) -> None:
        """End an async job. Items expire with their batch."""
        if item_of(work.id) is None:
            await self._end_job(work.id, "expired")

    async def give_up(self, entry: QueueEntry) -> None:
        """End work that was delivered too often."""
        work = (await self.load([entry.id])).get(entry.id)
        if work is None:
            return
        deliveries = entry.deliveries - 1
        reason = f"delivered {deliveries} times without a result; the last holder was {entry.holder}"
        await self.abandon(work, reason, "its processing broke off repeatedly", deliveries)

    async def abandon(self, work: StoredWork, reason: str, message: str, deliveries: int = 1) -> None:
        """End work as a dead letter. Its tenant gets the message, operators the reason."""
        letter = DeadLetter(
            id=work.id,
            tenant=work.tenant,
            model=model_in(work.body),
            reason=reason,
            deliveries=deliveries,
            at=self._clock.wall(),
        )
        await self._dead_letters.put(letter)  # first: it is put again if this is cut off
        await self.reject(work, 500, DEAD_LETTER, f"the request was given up: {message}")

    async def reject(self, work: StoredWork, status: int, code: str, message: str) -> None:
        """End work with an error of the gateway."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        await self.finish(work, CallAnswer(status=status, body=msgspec.json.encode({"error": error}), code=code))

    def end_of(self, id: str, status: AsyncJobStatus, answer: CallAnswer | None = None) -> JobEnd:
        """The end of an async job at this moment."""
        now = self._clock.wall()
        return JobEnd(
            id=id,
            status=status,
            at=now,
            expires_at=None if self._ttl_s is None else now + self._ttl_s,
            answer_status=None if answer is None else answer.status,
            answer=None if answer is None else _json(answer.body),
            request_id=None if answer is None else answer.request_id,
        )

    async def _end_job(self, id: str, status: AsyncJobStatus, answer: CallAnswer | None = None) -> None:
        await self._job_recorder.record(self.end_of(id, status, answer))
        self.ended_jobs[status] += 1
        self._on_end()

    async def _finish_item(self, item: tuple[str, int], answer: CallAnswer) -> None:
        batch_id, _ = item
        if answer.code == RunCancelled.code:  # the batch is a run, and the run was cancelled
            now = self._clock.wall()
            await self._retried(self._items.move, batch_id, ("in_progress",), "cancelling", now, final="cancelled")
            return
        for batch, found in await self._retried(self._items.load_items, [item]):
            await self._item_recorder.record(result_of(batch, found, answer))

    async def _retried(self, operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Until the database answers, as results are written: what was computed is kept meanwhile."""
        delay_s = INITIAL_RETRY_S
        while True:
            try:
                return await self._run(operation, *args, **kwargs)
            except Exception as error:
                log.error("cannot store a result of stored work (retry in %.2f s): %s", delay_s, type(error).__name__)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_RETRY_S)


def _split(ids: Sequence[str]) -> tuple[list[str], dict[tuple[str, int], str]]:
    """Async jobs, and items of batches."""
    items = {item: id for id in ids if (item := item_of(id)) is not None}
    return [id for id in ids if item_of(id) is None], items


def _json(body: bytes) -> bytes:
    """The body of an answer; an error where it is no JSON, because the call broke off."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
        return body
    except msgspec.DecodeError:
        return _NO_ANSWER
