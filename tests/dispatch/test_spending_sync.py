"""Past spending is read until the ledger answers."""

import asyncio

import pytest

from inferry.admission.quota_gate import QuotaGate
from inferry.dispatch import spending_sync as module
from inferry.dispatch.spending_sync import SpendingSync
from inferry.domain.callers import Caller
from inferry.domain.clock import ManualClock
from inferry.domain.errors import TenantBudgetExhausted
from inferry.domain.spending import Spending
from inferry.domain.tenants import Limits, Tenant
from support.builders import a_job


def test_a_ledger_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    gate, clock, tries = QuotaGate({}), ManualClock(), 0

    def spent() -> list[Spending]:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise RuntimeError("away")
        return [Spending(tenant="a", period="day", tokens=100, nanos=0, at=clock.wall())]

    async def main() -> None:
        sync = SpendingSync(gate, clock, spent)
        sync.request_sync()
        async with asyncio.timeout(120):
            while sync._task is not None:
                await asyncio.sleep(0)
        await sync.close()

    asyncio.run(main())
    assert tries == 3
    with pytest.raises(TenantBudgetExhausted):
        gate.admit(
            a_job(tokens=5),
            Caller(Tenant(name="a", limits=Limits(day_token_ceiling=100))),
            ("r",),
            clock.now(),
            clock.wall(),
        )
