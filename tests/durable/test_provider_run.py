"""Provider batches in virtual time, on a real database: deadlines, outages, submissions whose answer was lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from durable.batch_bench import Bench, Engine
from inferry.domain.callers import ANONYMOUS, Caller
from inferry.domain.errors import WorkerLost
from inferry.domain.ledger import LedgerEntry
from inferry.domain.provider_batches import ProviderRequest, ProviderResult, ProviderState
from inferry.domain.storage import Batch, BatchDetail, BatchItem
from inferry.domain.tenants import ApiKey, Limits, Tenant
from inferry.durable import provider_run
from inferry.durable.batches import NewBatch
from inferry.durable.provider_requests import has_ceilings
from support.virtual_time import run_virtual


class Provider:
    """Executes requests `takes_s` after their submission. `outages` says how many calls fail first."""

    worker = "hosted"
    models: tuple[str, ...] = ("m",)
    paths = frozenset({"/v1/x"})
    pool: str | None = None
    price_factor = 0.5

    def __init__(self, takes_s: float = 3600.0) -> None:
        self.takes_s = takes_s
        self.outages = 0
        self.loses_answers = 0
        self.is_visible = True
        self.submitted: dict[str, tuple[float, list[ProviderRequest]]] = {}
        self.cancelled: dict[str, float] = {}
        self.polls = 0
        self.now: Callable[[], float] = lambda: 0.0

    def _check(self) -> None:
        if self.outages:
            self.outages -= 1
            raise WorkerLost("down")

    async def submit(self, marker: str, path: str, requests: Sequence[ProviderRequest]) -> str:
        self._check()
        id = f"p{len(self.submitted)}-{marker}"
        self.submitted[id] = self.now(), list(requests)
        if self.loses_answers:
            self.loses_answers -= 1
            raise WorkerLost("lost")
        return id

    async def find(self, marker: str, since: float, count: int) -> str | None:
        self._check()
        return next((id for id in self.submitted if id.endswith(marker)), None)

    async def state(self, provider_id: str) -> ProviderState:
        self._check()
        self.polls += 1
        begun, _ = self.submitted[provider_id]
        return ProviderState(has_ended=provider_id in self.cancelled or self.now() >= begun + self.takes_s)

    async def results(self, provider_id: str) -> AsyncIterator[ProviderResult]:
        self._check()
        for number, one in enumerate(self.submitted[provider_id][1]):
            if provider_id in self.cancelled and number:
                yield ProviderResult(custom_id=one.custom_id, outcome="canceled")
            else:
                yield ProviderResult(custom_id=one.custom_id, body=b"{}", prompt_tokens=10, output_tokens=5)

    async def cancel(self, provider_id: str) -> None:
        self._check()
        self.cancelled[provider_id] = self.now()

    def close(self) -> None: ...


Work = Callable[[Bench, Provider, list[LedgerEntry]], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    def run(work: Work, provider: Provider) -> None:
        async def scenario() -> None:
            async with Bench(tmp_path / "db", Engine()) as bench:
                charged: list[LedgerEntry] = []
                bench.runner._providers.by_worker["hosted"] = provider
                bench.runner._providers.cost_of = lambda model, prompt, cached, output: prompt + output
                bench.runner._providers.charge = charged.append
                provider.now = bench.clock.wall
                await work(bench, provider, charged)

        run_virtual(scenario())

    return run


async def create(bench: Bench, count: int, window_s: float = 86_400.0) -> Batch:
    items = [BatchItem(number, f"r{number}", b'{"model":"m","stream":false}') for number in range(1, count + 1)]
    detail = BatchDetail(output_ttl_s=1000.0)
    new: dict[str, Any] = {"tenant": "acme", "key_id": "k", "api": "anthropic", "endpoint": "/v1/x"}
    return await bench.batches.create(NewBatch(**new, window_s=window_s, detail=detail, items=items))


def test_results_are_stored_and_charged_once_they_are_there(run: Callable[..., None]) -> None:
    async def work(bench: Bench, provider: Provider, charged: list[LedgerEntry]) -> None:
        batch = await bench.ended(await create(bench, 5))
        assert (batch.status, batch.completed) == ("completed", 5)
        assert [request.body for _, requests in provider.submitted.values() for request in requests] == [
            b'{"model":"m"}'
        ] * 5
        assert not bench.engine.calls
        assert {entry.cost_nanos for entry in charged} == {8}, "half of 15, rounded up"
        assert len({entry.job_id for entry in charged}) == 5
        assert provider.polls < 130, "polls become rare"

    run(work, Provider())


def test_at_the_deadline_the_provider_batch_is_cancelled_and_its_results_stay(run: Callable[..., None]) -> None:
    async def work(bench: Bench, provider: Provider, charged: list[LedgerEntry]) -> None:
        created = await create(bench, 5, window_s=600.0)
        batch = await bench.ended(created)
        assert batch.status == "expired"
        assert (batch.completed, batch.failed) == (1, 4)
        assert [time - created.created_at for time in provider.cancelled.values()] == [pytest.approx(600.0, abs=1.0)]
        assert len(charged) == 1

    run(work, Provider(takes_s=3600.0))


def test_an_outage_of_the_provider_delays_a_batch(run: Callable[..., None]) -> None:
    async def work(bench: Bench, provider: Provider, charged: list[LedgerEntry]) -> None:
        provider.outages = 8
        batch = await bench.ended(await create(bench, 3))
        assert (batch.status, batch.completed) == ("completed", 3)
        assert len(provider.submitted) == 1

    run(work, Provider())


def test_a_submission_whose_answer_was_lost_is_found_again(run: Callable[..., None]) -> None:
    async def work(bench: Bench, provider: Provider, charged: list[LedgerEntry]) -> None:
        provider.loses_answers = 1
        assert (await bench.ended(await create(bench, 3))).completed == 3
        assert len(provider.submitted) == 1

    run(work, Provider())


def test_large_batches_are_several_provider_batches(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_run, "MAX_ITEMS", 10)

    async def work(bench: Bench, provider: Provider, charged: list[LedgerEntry]) -> None:
        assert (await bench.ended(await create(bench, 25))).completed == 25
        assert sorted(len(requests) for _, requests in provider.submitted.values()) == [5, 10, 10]

    run(work, Provider())


def test_items_of_a_worker_without_batch_api_any_more_are_calls(run: Callable[..., None]) -> None:
    async def work(bench: Bench, provider: Provider, charged: list[LedgerEntry]) -> None:
        batch = await create(bench, 3)
        while not provider.submitted:
            await asyncio.sleep(0.01)
        await bench.runner.close()
        del bench.runner._providers.by_worker["hosted"]
        bench.runner.start()
        assert (await bench.ended(batch)).completed == 3
        assert len(bench.engine.calls) == 3

    run(work, Provider())


@pytest.mark.parametrize("field", [name for name in Limits.__struct_fields__ if "ceiling" in name])
def test_a_ceiling_of_tenant_or_key_keeps_items_from_providers(field: str) -> None:
    limits = msgspec.structs.replace(Limits(), **{field: 1})
    key = ApiKey(key_id="k", tenant="a", secret_hash=b"", limits=limits)
    assert has_ceilings(Caller(Tenant(name="a", limits=limits)))
    assert has_ceilings(Caller(Tenant(name="a"), key))
    assert not has_ceilings(ANONYMOUS)
