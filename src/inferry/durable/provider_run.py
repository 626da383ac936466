"""The items of one batch that hosted providers execute: submitted, polled, cancelled, and their results stored.

Belongs to one event loop. The database is the truth. A provider's batch is stored before it is submitted, and its
provider's id before it is polled. A submission that may have reached the provider is looked for before it is repeated.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from inferry.domain.callers import Caller
from inferry.domain.clock import Clock
from inferry.domain.errors import GatewayError, WorkerLost
from inferry.domain.ledger import LedgerEntry
from inferry.domain.provider_batches import (
    AssignedItem,
    BatchProvider,
    ProviderBatch,
    ProviderRefused,
    ProviderResult,
    ProviderState,
)
from inferry.domain.storage import Batch, BatchItem, ItemOutcome, ItemResult
from inferry.durable.batch_lines import line_of, result_of
from inferry.durable.batch_run import Results
from inferry.durable.execute import CallAnswer
from inferry.durable.executor import StoreExecutor
from inferry.durable.ids import new_id
from inferry.durable.provider_requests import (
    MAX_BYTES,
    MAX_ITEMS,
    entry_of,
    has_ceilings,
    is_temporary,
    model_of,
    number_of,
    provider_for,
    requests_of,
)

log = logging.getLogger(__name__)

INITIAL_POLL_S, MAX_POLL_S = 1.0, 30.0
INITIAL_RETRY_S, MAX_RETRY_S = 1.0, 60.0
PAGE_ITEMS = 100
RECORDED_AT_ONCE = 500


class ProviderStore(Protocol):
    """Where provider batches are kept. Its methods block."""

    def unassigned(self, batch_id: str, after: int, limit: int) -> list[BatchItem]: ...
    def assign(self, batch: ProviderBatch, numbers: list[int]) -> None: ...
    def of_batch(self, batch_id: str) -> list[ProviderBatch]: ...
    def begin(self, id: str) -> None: ...
    def submitted(self, id: str, provider_id: str) -> None: ...
    def items(self, batch: ProviderBatch, *, with_bodies: bool) -> list[AssignedItem]: ...
    def end(self, batch: ProviderBatch, returned: list[int]) -> None: ...


class Providers:
    """The providers of a gateway, and what their runs share.

    `caller_of` raises GatewayError for a key that is no longer valid. `cost_of`: model, prompt, cached and output
    tokens to billionths. `charge` accepts a row of the ledger. `is_run_cancelled`: tenant and run.
    """

    def __init__(
        self,
        providers: list[BatchProvider],
        store: ProviderStore,
        executor: StoreExecutor,
        clock: Clock,
        *,
        caller_of: Callable[[str, str | None], Caller],
        cost_of: Callable[[str, int, int, int], int | None],
        charge: Callable[[LedgerEntry], None],
        is_run_cancelled: Callable[[str, str], bool],
    ) -> None:
        self.by_worker = {provider.worker: provider for provider in providers}
        self.store = store
        self.executor = executor
        self.clock = clock
        self.caller_of = caller_of
        self.cost_of = cost_of
        self.charge = charge
        self.is_run_cancelled = is_run_cancelled
        self.sending = asyncio.Lock()
        """Held while requests are sent, so that those of one provider batch are in memory at a time."""

    def close(self) -> None:
        for provider in self.by_worker.values():
            provider.close()


class ProviderRun:
    """One batch. `returned` counts items that the gateway must execute itself."""

    def __init__(self, providers: Providers, batch: Batch, recorder: Results) -> None:
        self._providers = providers
        self._batch = batch
        self._recorder = recorder
        self._store = providers.store
        self._run = providers.executor.run
        self._wake = asyncio.Event()
        self.returned = 0
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cancel the provider batches. Results that they have are stored."""
        self.is_cancelled = True
        self._wake.set()

    async def assign(self) -> None:
        """Choose the items that providers execute. Items that were chosen before stay."""
        if not self._providers.by_worker:
            return
        try:
            caller = self._providers.caller_of(self._batch.tenant, self._batch.key_id)
        except GatewayError:
            return  # the gateway's own execution reports it
        if has_ceilings(caller):
            return
        chosen: dict[str, list[BatchItem]] = {}
        last = 0
        while page := await self._run(self._store.unassigned, self._batch.id, last, PAGE_ITEMS):
            last = page[-1].number
            for item in page:
                worker = provider_for(self._batch, item, caller, list(self._providers.by_worker.values()))
                if worker is not None:
                    group = chosen.setdefault(worker, [])
                    group.append(item)
                    if len(group) >= MAX_ITEMS or sum(len(one.body) for one in group) >= MAX_BYTES:
                        await self._assign(worker, chosen.pop(worker))
        for worker, group in chosen.items():
            await self._assign(worker, group)

    async def run(self) -> None:
        """Return when every provider batch has ended and its results are stored."""
        found = await self._run(self._store.of_batch, self._batch.id)
        async with asyncio.TaskGroup() as tasks:
            for one in found:
                tasks.create_task(self._process(one))

    async def _assign(self, worker: str, items: list[BatchItem]) -> None:
        batch = ProviderBatch(
            id=new_id("pb_"),
            batch_id=self._batch.id,
            worker=worker,
            created_at=self._providers.clock.wall(),
            items=len(items),
        )
        await self._run(self._store.assign, batch, [item.number for item in items])

    async def _process(self, batch: ProviderBatch) -> None:
        provider = self._providers.by_worker.get(batch.worker)
        if provider is None:
            log.warning("batch %s: worker %s has no batch API any more", batch.batch_id, batch.worker)
            await self._return_all(batch)
            return
        delay_s = INITIAL_RETRY_S
        while True:
            try:
                batch = await self._submit(provider, batch)
                if batch.provider_id is not None:
                    await self._collect(provider, batch, await self._until_ended(provider, batch.provider_id))
                return
            except ProviderRefused as error:
                log.error("batch %s: %s; the gateway executes its items itself", batch.batch_id, error)
                await self._return_all(batch)
                return
            except WorkerLost as error:
                log.warning("batch %s is interrupted (next try in %.0f s): %s", batch.batch_id, delay_s, error.message)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_RETRY_S)
                batch = next(one for one in await self._run(self._store.of_batch, batch.batch_id) if one.id == batch.id)

    async def _submit(self, provider: BatchProvider, batch: ProviderBatch) -> ProviderBatch:
        """The batch with its provider's id. It has none where the batch was cancelled before it was submitted."""
        if batch.provider_id is not None:
            return batch
        provider_id: str | None = None
        if batch.is_begun:
            provider_id = await provider.find(batch.id, batch.created_at, batch.items)
        if provider_id is None:
            if self._must_end():
                await self._run(self._store.end, batch, [])
                return batch
            async with self._providers.sending:
                items = await self._run(self._store.items, batch, with_bodies=True)
                await self._run(self._store.begin, batch.id)
                requests = await self._run(requests_of, batch.id, items)
                provider_id = await provider.submit(batch.id, self._batch.endpoint, requests)
        await self._run(self._store.submitted, batch.id, provider_id)
        log.info("batch %s: worker %s has %d items as %s", batch.batch_id, batch.worker, batch.items, provider_id)
        return replace(batch, provider_id=provider_id)

    async def _until_ended(self, provider: BatchProvider, provider_id: str) -> ProviderState:
        is_cancel_sent = False
        delay_s = INITIAL_POLL_S
        while not (state := await provider.state(provider_id)).has_ended:
            if self._must_end() and not is_cancel_sent:
                await provider.cancel(provider_id)
                is_cancel_sent, delay_s = True, INITIAL_POLL_S
            if is_cancel_sent:
                await asyncio.sleep(delay_s)
            else:
                await self._wait(delay_s)
            delay_s = min(2 * delay_s, MAX_POLL_S)
        return state

    async def _wait(self, delay_s: float) -> None:
        """Until the next poll, the batch's deadline or its cancellation."""
        left_s = self._batch.deadline - self._providers.clock.wall()
        try:
            async with asyncio.timeout(max(0.0, min(delay_s, left_s))):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _must_end(self) -> bool:
        batch = self._batch
        if self._providers.is_run_cancelled(batch.tenant, batch.id):
            self.is_cancelled = True
        return self.is_cancelled or self._providers.clock.wall() >= batch.deadline

    # -- results -----------------------------------------------------------------------------------------------------

    async def _collect(self, provider: BatchProvider, batch: ProviderBatch, state: ProviderState) -> None:
        if state.error is not None:
            raise ProviderRefused(f"worker {batch.worker} refused the batch ({state.error})")
        assert batch.provider_id is not None
        items = {one.number: one for one in await self._run(self._store.items, batch, with_bodies=True)}
        records: list[ItemResult] = []
        expired: list[AssignedItem] = []
        async for result in provider.results(batch.provider_id):
            item = items.get(number_of(result.custom_id))
            if item is None or (result.outcome is None and is_temporary(result)):
                continue
            if result.outcome == "expired":
                expired.append(items.pop(item.number))
            elif result.outcome is None:
                records.append(self._result(provider, items.pop(item.number), result))
        if state.has_expired:
            expired += items.values()
            items.clear()
        records += [self._expired(item) for item in expired]
        for start in range(0, len(records), RECORDED_AT_ONCE):
            await asyncio.gather(*(self._recorder.record(one) for one in records[start : start + RECORDED_AT_ONCE]))
        returned = [] if self._must_end() else list(items)
        self.returned += len(returned)
        await self._run(self._store.end, batch, returned)

    def _result(self, provider: BatchProvider, item: AssignedItem, result: ProviderResult) -> ItemResult:
        """The result of an item, which is charged."""
        providers = self._providers
        model = model_of(item.body)
        cost = providers.cost_of(model, result.prompt_tokens, result.cached_tokens, result.output_tokens)
        if cost is not None:
            cost = -int(-cost * provider.price_factor // 1)
        wall = providers.clock.wall()
        providers.charge(entry_of(self._batch, item, result, provider.worker, model, cost=cost, wall=wall))
        answer = CallAnswer(status=result.status, body=result.body, request_id=result.request_id)
        return result_of(self._batch, BatchItem(item.number, item.custom_id, b""), answer)

    def _expired(self, item: AssignedItem) -> ItemResult:
        line = line_of(self._batch, ItemOutcome(item.number, item.custom_id, "expired", None))
        return ItemResult(self._batch.id, item.number, "expired", line.rstrip(b"\n"))

    async def _return_all(self, batch: ProviderBatch) -> None:
        items = await self._run(self._store.items, batch, with_bodies=False)
        self.returned += len(items)
        await self._run(self._store.end, batch, [item.number for item in items])
