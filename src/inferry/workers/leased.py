"""A worker that only the owner of its domain may use.

Engines cannot check who sends, so the owner does: a plan is sent only while its lease is valid on its own clock.
"""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from inferry.domain.errors import NOT_OWNER, WorkerUnreachable
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import AdapterHost, Emit, ModelCard, RunKeeper, SendGuard, TokenCounter, Worker
from inferry.domain.streams import Failed
from inferry.domain.workers import WorkerView


class LeasedWorker:
    """`may_send` says whether this process owns the worker now."""

    def __init__(self, worker: Worker, may_send: Callable[[], bool]) -> None:
        self._worker = worker
        self.may_send = may_send
        if isinstance(worker, SendGuard):
            # It may wait for a connection between the plan and its first byte. An owner whose lease has ended and begun
            # again gets another `may_send`, so the worker asks for the present one.
            worker.may_send = lambda: self.may_send()

    @property
    def name(self) -> str:
        return self._worker.name

    async def start(self) -> None:
        await self._worker.start()

    def view(self) -> WorkerView:
        return self._worker.view()

    def cards(self) -> Sequence[ModelCard]:
        return self._worker.cards()

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        if self.may_send():
            await self._worker.run(plan, emit)
            return
        for job in plan.jobs:
            emit(Failed(job.job_id, WorkerUnreachable(NOT_OWNER)))

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        return await self._worker.cancel(job_ids)

    async def close(self) -> None:
        await self._worker.close()

    async def count_tokens(self, body: bytes) -> int | None:
        worker = self._worker
        return await worker.count_tokens(body) if isinstance(worker, TokenCounter) else None

    def end_run(self, tenant: str, run_id: str) -> None:
        if isinstance(self._worker, RunKeeper):
            self._worker.end_run(tenant, run_id)


class LeasedAdapterHost(LeasedWorker):
    """A leased worker that loads adapters."""

    def __init__(self, worker: AdapterHost, may_send: Callable[[], bool]) -> None:
        super().__init__(worker, may_send)
        self._host = worker

    def may_load(self, path: str) -> bool:
        return self._host.may_load(path)

    async def load_adapter(self, name: str, path: str) -> None:
        await self._host.load_adapter(name, path)

    def unload_adapter(self, name: str) -> Coroutine[Any, Any, None]:
        return self._host.unload_adapter(name)


def lease(worker: Worker, may_send: Callable[[], bool]) -> LeasedWorker:
    """The worker, used while `may_send`."""
    return LeasedAdapterHost(worker, may_send) if isinstance(worker, AdapterHost) else LeasedWorker(worker, may_send)
