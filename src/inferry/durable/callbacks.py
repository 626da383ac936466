"""Delivers callbacks: at least once, retried with backoff for a bounded time, marked delivered by a 2xx alone.

Belongs to the event loop it is started on. The database says which callbacks are due, so that a restart continues
them. Tenants have equal and bounded numbers of callbacks in flight: a receiver that hangs delays its own tenant only.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from inferry.domain.async_jobs import AsyncJob, CallbackSecret, CallbackStatus, Delivery
from inferry.domain.clock import Clock
from inferry.durable.async_job_object import job_object
from inferry.durable.callback_client import CallbackFailed
from inferry.durable.callback_policy import CallbackPolicy, backoff_s
from inferry.durable.callback_signature import signature_headers
from inferry.durable.executor import StoreExecutor

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 64
MAX_IN_FLIGHT_PER_TENANT = 8
DATABASE_RETRY_S = 2.0


class CallbackStore(Protocol):
    """Where jobs are kept. Its methods block."""

    def due_callbacks(self, now: float, others: Collection[str], per_tenant: int, limit: int) -> list[AsyncJob]: ...
    def next_callback_at(self, after: float) -> float | None: ...
    def answer(self, id: str) -> bytes | None: ...
    def record_delivery(self, id: str, one: Delivery, callback: CallbackStatus, at: float) -> None: ...


class SecretStore(Protocol):
    def valid(self, tenant: str, now: float) -> list[CallbackSecret]: ...


class Send(Protocol):
    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """The status of the response. Raises CallbackFailed."""
        ...


class CallbackDeliverer:
    """All callbacks of the gateway. `random` gives numbers from 0 to 1 for the jitter."""

    def __init__(
        self,
        store: CallbackStore,
        secrets: SecretStore,
        executor: StoreExecutor,
        client: Send,
        policy: CallbackPolicy,
        clock: Clock,
        random: Callable[[], float],
    ) -> None:
        self._store = store
        self._secrets = secrets
        self._executor = executor
        self._client = client
        self._policy = policy
        self._clock = clock
        self._random = random
        self._in_flight: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self.attempts: Counter[str] = Counter()
        """Attempts by the state of the callback after it: delivered, pending (to be retried) or failed."""

    def start(self) -> None:
        self._spawn(self._run())

    def wake(self) -> None:
        """A job has ended: its callback may be due."""
        self._wake.set()

    async def close(self) -> None:
        """Stop. Callbacks in flight are delivered again when the gateway starts again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._in_flight.clear()  # a task that was cancelled before its first step leaves its entry

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            wait_s: float | None = DATABASE_RETRY_S
            try:
                wait_s = await self._begin_due()
            except Exception as error:
                log.error("cannot read due callbacks (next try in %g s): %s", wait_s, type(error).__name__)
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _begin_due(self) -> float | None:
        """Begin what is due; return the seconds until the next one is."""
        now = self._clock.wall()
        free = MAX_IN_FLIGHT - len(self._in_flight)
        if free > 0:
            due = await self._executor.run(
                self._store.due_callbacks, now, tuple(self._in_flight), MAX_IN_FLIGHT_PER_TENANT, free
            )
            by_tenant = Counter(self._in_flight.values())
            for job in due:
                if by_tenant[job.tenant] < MAX_IN_FLIGHT_PER_TENANT:
                    by_tenant[job.tenant] += 1
                    self._in_flight[job.id] = job.tenant
                    self._spawn(self._deliver(job))
        next_at = await self._executor.run(self._store.next_callback_at, now)
        return None if next_at is None else max(0.0, next_at - self._clock.wall())

    async def _deliver(self, job: AsyncJob) -> None:
        try:
            await self._attempt(job)
        except Exception as error:
            log.error("a callback of job %s is not recorded and will be repeated: %s", job.id, type(error).__name__)
            await asyncio.sleep(DATABASE_RETRY_S)
        finally:
            del self._in_flight[job.id]
            self._wake.set()

    async def _attempt(self, job: AsyncJob) -> None:
        begin, at = self._clock.now(), self._clock.wall()
        status, error = await self._post(job, at)
        one = Delivery(
            number=job.callback_attempts + 1,
            at=at,
            status=status,
            error=error,
            latency_ms=round(1000 * (self._clock.now() - begin)),
        )
        callback, next_at = self._after(job, one)
        if callback == "failed":
            log.warning("the callback of job %s is given up after %d attempts", job.id, one.number)
        await self._executor.run(self._store.record_delivery, job.id, one, callback, next_at)
        self.attempts[callback] += 1

    async def _post(self, job: AsyncJob, at: float) -> tuple[int | None, str | None]:
        run = self._executor.run
        keys = [secret.key for secret in await run(self._secrets.valid, job.tenant, at)]
        if not keys:
            return None, "no_secret"
        body = event_body(job, await run(self._store.answer, job.id))
        headers = signature_headers(keys, job.id, int(at), body)
        try:
            return await self._client.post(job.detail.callback_url or "", headers, body), None
        except CallbackFailed as failed:
            return None, failed.code

    def _after(self, job: AsyncJob, one: Delivery) -> tuple[CallbackStatus, float]:
        """The state of the callback after an attempt."""
        now = self._clock.wall()
        if one.status is not None and 200 <= one.status < 300:
            return "delivered", now
        next_at = now + backoff_s(one.number, self._policy, self._random())
        if next_at > (job.ended_at or 0.0) + self._policy.retry_for_s:
            return "failed", now
        return "pending", next_at

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def event_body(job: AsyncJob, answer: bytes | None) -> bytes:
    """The body of a callback. It is the same in every attempt."""
    data = job_object(job, answer)
    del data["callback"]
    ended = datetime.fromtimestamp(job.ended_at or 0.0, UTC).isoformat().replace("+00:00", "Z")
    return msgspec.json.encode({"type": f"job.{job.status}", "timestamp": ended, "data": data})
