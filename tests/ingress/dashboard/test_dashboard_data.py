"""What the dashboard collects: from where, how often, and what it does when the ledger fails."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.ingress.dashboard import data as dashboard_data
from inferry.ingress.dashboard import overview
from inferry.ingress.dashboard.data import DashboardData
from inferry.ingress.dashboard.timeline import timeline_steps
from inferry.ingress.dashboard.values import LiveState
from inferry.ingress.run_timeline import recorded_call
from inferry.ledger.reports import TenantSummary
from support.scripted_gateway import ScriptedGateway
from support.serving import post


class FakeLedger:
    """Counts its reads."""

    def __init__(self, rows: Sequence[TenantSummary] = (), error: Exception | None = None) -> None:
        self.rows = rows
        self.error = error
        self.opened = self.closed = 0

    def open(self) -> "FakeLedger":
        self.opened += 1
        return self

    def tenants(self, *, since: float | None = None) -> Sequence[Any]:
        if self.error is not None:
            raise self.error
        return self.rows

    def runs(self, *, limit: int, since: float | None = None) -> Sequence[Any]:
        return []

    def jobs(self, *, limit: int, tenant: str | None = None, run: str | None = None) -> list[LedgerEntry]:
        return []

    def close(self) -> None:
        self.closed += 1


def a_tenant(name: str, *, cost: int | None = None, tokens: int = 0) -> TenantSummary:
    figures: dict[str, Any] = dict.fromkeys(TenantSummary.__struct_fields__)
    figures |= dict.fromkeys(("runs", "jobs", "attempts", "done", "failed", "cancelled", "expired"), 0)
    figures |= {"tenant": name, "prompt_tokens": 0, "output_tokens": tokens, "cost_nanos": cost}
    return TenantSummary(**figures)


def collector(gateway: ScriptedGateway, ledger: FakeLedger) -> DashboardData:
    service = gateway.service
    return DashboardData(service.gateway, service.observation.history, DEFAULT_LANES, ledger.open)


async def until_read(data: DashboardData, ledger: FakeLedger) -> LiveState:
    data._live_state(data._gateway.now())
    while ledger.closed == 0 or data._recorded._reading is not None:
        await asyncio.sleep(0.01)
    return data._live_state(data._gateway.now())


def test_the_ledger_is_read_off_the_loop_and_not_for_every_snapshot(scripted: ScriptedGateway) -> None:
    ledger = FakeLedger([a_tenant("cheap", cost=1, tokens=99), a_tenant("dear", cost=5_000_000_000), a_tenant("free")])

    async def check() -> LiveState:
        data = collector(scripted, ledger)
        state = await until_read(data, ledger)
        for _ in range(20):
            data._live_state(data._gateway.now())
            assert data._recorded._reading is None
        await data.close()
        return state

    state = scripted.run(check())
    assert (ledger.opened, ledger.closed) == (1, 1)
    assert state.costs is not None
    assert [(one.tenant, one.cost) for one in state.costs.tenants] == [("dear", 5.0), ("cheap", 1e-9), ("free", None)]


def test_a_ledger_that_fails_leaves_the_rest_of_the_dashboard(
    scripted: ScriptedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = FakeLedger(error=RuntimeError("database is away"))

    async def check() -> LiveState:
        data = collector(scripted, ledger)
        state = await until_read(data, ledger)
        await data.close()
        return state

    state = scripted.run(check())
    assert state.costs is None
    assert len(state.workers) == 1
    assert "the dashboard could not read the ledger" in caplog.text


def test_a_snapshot_is_made_once_for_requests_at_the_same_time(scripted: ScriptedGateway) -> None:
    async def check() -> tuple[bool, bool]:
        data = collector(scripted, FakeLedger())
        moment = [100.0]
        data._gateway = _Clocked(data._gateway, moment)  # type: ignore[assignment]
        first = data.live()
        again = data.live()
        moment[0] += dashboard_data.FRESH_S
        later = data.live()
        await data.close()
        return first is again, later is first

    assert scripted.run(check()) == (True, False)


class _Clocked:
    """A gateway with a clock that the test sets."""

    def __init__(self, gateway: Any, moment: list[float]) -> None:
        self._gateway = gateway
        self._moment = moment

    def now(self) -> float:
        return self._moment[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)


def test_the_most_expensive_tenants_are_listed_and_the_others_counted() -> None:
    rows = [a_tenant(f"t{number}", cost=number) for number in range(1000)]
    costs = overview.tenant_costs(rows, 0.0, 1.0)
    assert [one.tenant for one in costs.tenants][:2] == ["t999", "t998"]
    assert (len(costs.tenants), costs.others) == (overview.MAX_TENANTS, 1000 - overview.MAX_TENANTS)


def test_a_run_is_listed_with_the_totals_of_its_tree(tmp_path: Path) -> None:
    call = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with ScriptedGateway(tmp_path) as gateway:
        for run, parent in (("root", None), ("sub", "root"), ("leaf", "sub")):
            headers = {"x-inferry-run-id": run} | ({} if parent is None else {"x-inferry-parent-run-id": parent})
            assert post(gateway.url, "/v1/chat/completions", call, headers)[0] == 200

        async def runs() -> Any:
            data = collector(gateway, FakeLedger())
            return msgspec.to_builtins(data.runs(10))

        (root,) = gateway.run(runs())
    assert (root["id"], root["sub_runs"], root["calls"], root["is_partial"]) == ("root", 2, 3, False)


def test_a_timeline_is_ordered_by_arrival_and_has_attempts_that_were_never_sent() -> None:
    common: dict[str, Any] = {"tenant": "t", "run_id": "r", "model": "m", "lane": "P1"}
    late = LedgerEntry(
        **common, job_id="b", attempt=1, step_id="late", outcome=Outcome.EXPIRED, ended_at=20.0, total_ms=1000.0
    )
    early = LedgerEntry(
        **common,
        job_id="a",
        attempt=1,
        step_id="early",
        outcome=Outcome.DONE,
        ended_at=12.0,
        total_ms=2000.0,
        queue_ms=500.0,
        first_token_ms=800.0,
        cost_nanos=2_000_000_000,
    )
    first, second = timeline_steps([recorded_call(late), recorded_call(early)])
    assert (first.step_id, first.arrived_at, first.sent_at, first.first_token_at) == ("early", 10.0, 10.5, 10.8)
    assert first.cost == 2.0
    assert (second.step_id, second.arrived_at, second.sent_at, second.worker) == ("late", 19.0, None, None)


def test_alerts_are_shown_where_rules_are_loaded(scripted: ScriptedGateway) -> None:
    alert = {"name": "A", "severity": "warning", "state": "firing", "since": 1.0, "summary": "s", "value": 2.0}

    async def check() -> tuple[LiveState, LiveState]:
        service = scripted.service
        history = service.observation.history
        some: list[dict[str, object]] = [{**alert, "labels": {"lane": "P0"}}]
        without = DashboardData(service.gateway, history, DEFAULT_LANES, lambda: None)
        loaded = DashboardData(service.gateway, history, DEFAULT_LANES, lambda: None, lambda: some)
        states = without._live_state(0.0), loaded._live_state(0.0)
        await without.close()
        await loaded.close()
        return states

    without, loaded = scripted.run(check())
    assert without.alerts is None
    assert loaded.alerts is not None
    assert [(one.name, one.state, one.labels) for one in loaded.alerts] == [("A", "firing", {"lane": "P0"})]
