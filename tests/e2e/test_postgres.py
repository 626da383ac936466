"""A gateway on PostgreSQL: calls, budgets, keys and batches; and a server that is stopped under it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferry.cli import wiring
from inferry.cli.config.loader import parse
from inferry.cli.config.schema import ConfigError
from inferry.cli.main import app
from inferry.domain.clock import SystemClock
from inferry.ledger.stores import postgres as module
from inferry.ledger.stores.opening import open_queries
from support.postgres import PostgresServer
from support.scripted_gateway import ScriptedGateway
from support.scripted_worker import ScriptedWorker
from support.serving import get, post
from support.waiting import until

CHAT = "/v1/chat/completions"
CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that the test may stop."""
    with PostgresServer() as server:
        yield server


def call(gateway: ScriptedGateway, **headers: str) -> tuple[int, str | None]:
    status, _, body = post(gateway.url, CHAT, CALL, {name.replace("_", "-"): text for name, text in headers.items()})
    return status, body["error"]["code"] if "error" in body else None


def metric(gateway: ScriptedGateway, name: str) -> float:
    page: str = get(gateway.url, "/metrics")[2]
    return float(next(line for line in page.splitlines() if line.startswith(f"{name} ")).split()[1])


def rows_of(url: str) -> list[Any]:
    with open_queries(url) as ledger:
        return ledger.jobs(limit=100_000)


def start(url: str) -> None:
    async def main() -> None:
        wiring.assemble(parse({"ledger": url}), [ScriptedWorker()], {}, SystemClock())

    asyncio.run(main())


def command(*words: str) -> str:
    found = CliRunner().invoke(app, words, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_calls_are_in_the_ledger_and_its_commands_read_it(tmp_path: Path, postgres_url: str) -> None:
    with ScriptedGateway(tmp_path, {"ledger": postgres_url}) as gateway:
        assert call(gateway, x_inferry_run_id="r1") == (200, None)
        until(lambda: metric(gateway, "inferry_ledger_entries_written_total") == 1)
        run = get(gateway.url, "/v1/runs/r1")[2]
        assert run["jobs"]["done"] == 1
    assert [row.run_id for row in rows_of(postgres_url)] == ["r1"]
    assert [run["run_id"] for run in json.loads(command("ledger", "runs", "--ledger", postgres_url, "--json"))] == [
        "r1"
    ]
    assert json.loads(command("ledger", "tenants", "--ledger", postgres_url, "--json"))[0]["jobs"] == 1


def test_a_budget_holds_across_a_restart(tmp_path: Path, postgres_url: str) -> None:
    config = {"ledger": postgres_url, "tenants": {"default": {"day_token_ceiling": 200}}}
    with ScriptedGateway(tmp_path, config) as gateway:
        answers = 0
        while call(gateway) == (200, None):
            answers += 1
        assert answers >= 1
        assert call(gateway) == (402, "tenant_budget_exhausted")
    with ScriptedGateway(tmp_path, config) as gateway:
        assert call(gateway) == (402, "tenant_budget_exhausted")


def test_a_key_made_and_revoked_by_a_command_applies_to_a_running_gateway(tmp_path: Path, postgres_url: str) -> None:
    with ScriptedGateway(tmp_path, {"ledger": postgres_url}) as gateway:
        key = command("keys", "create", "--ledger", postgres_url, "--tenant", "acme", "--quiet").strip()
        until(lambda: call(gateway)[0] == 401)
        assert call(gateway, authorization=f"Bearer {key}") == (200, None)
        command("keys", "revoke", key.split("_")[1], "--ledger", postgres_url)
        until(lambda: call(gateway, authorization=f"Bearer {key}")[0] == 401)
    assert {row.tenant for row in rows_of(postgres_url) if row.key_id} == {"acme"}


def test_a_batch_is_stored_and_run(tmp_path: Path, postgres_url: str) -> None:
    items = [{"custom_id": f"r{number}", "params": {**CALL, "max_tokens": 10}} for number in range(20)]
    with ScriptedGateway(tmp_path, {"ledger": postgres_url}) as gateway:
        status, _, batch = post(gateway.url, "/v1/messages/batches", {"requests": items})
        assert status == 200
        path = f"/v1/messages/batches/{batch['id']}"
        until(lambda: get(gateway.url, path)[2]["processing_status"] == "ended")
        assert get(gateway.url, path)[2]["request_counts"]["succeeded"] == 20
    assert len(rows_of(postgres_url)) == 20


def test_a_second_gateway_on_one_database_does_not_start(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.0)
    with ScriptedGateway(tmp_path, {"ledger": postgres_url}) as gateway:
        with pytest.raises(ConfigError, match="another gateway already uses this ledger"):
            start(postgres_url)
        assert call(gateway) == (200, None)


def test_a_server_that_is_stopped_delays_rows_and_no_call(tmp_path: Path, own_server: PostgresServer) -> None:
    url = own_server.database()
    with ScriptedGateway(tmp_path, {"ledger": url}) as gateway:
        for _ in range(5):
            assert call(gateway) == (200, None)
        own_server.stop("immediate")
        until(lambda: metric(gateway, "inferry_ledger_up") == 0.0)
        for _ in range(20):
            assert call(gateway) == (200, None)
        assert get(gateway.url, "/ready")[0] == 200
        assert get(gateway.url, "/v1/files")[0] == 503
        assert get(gateway.url, "/admin/keys")[0] == 503
        assert get(gateway.url, "/v1/runs")[0] == 503
        own_server.start()
        until(lambda: metric(gateway, "inferry_ledger_up") == 1.0)
        until(lambda: metric(gateway, "inferry_ledger_entries_written_total") == 25)
        assert get(gateway.url, "/v1/files")[0] == 200
        assert call(gateway) == (200, None)
    assert len({row.job_id for row in rows_of(url)}) == 26


def test_a_batch_goes_on_when_the_server_is_back(tmp_path: Path, own_server: PostgresServer) -> None:
    items = [{"custom_id": f"r{number}", "params": CALL} for number in range(30)]
    url = own_server.database()
    with ScriptedGateway(tmp_path, {"ledger": url}) as gateway:
        gateway.worker.gate.clear()
        batch = post(gateway.url, "/v1/messages/batches", {"requests": items})[2]
        until(lambda: gateway.worker.running > 0)
        own_server.stop("immediate")
        until(lambda: metric(gateway, "inferry_ledger_up") == 0.0)
        gateway._loop.call_soon_threadsafe(gateway.worker.gate.set)
        until(lambda: metric(gateway, "inferry_ledger_entries_written_total") == 0 and not gateway.worker.running)
        own_server.start()
        path = f"/v1/messages/batches/{batch['id']}"
        until(lambda: get(gateway.url, path)[2].get("processing_status") == "ended")
        assert get(gateway.url, path)[2]["request_counts"]["succeeded"] == 30
    assert len({row.job_id for row in rows_of(url)}) >= 30


def test_a_budget_is_not_overspent_while_its_watermark_cannot_be_written(
    tmp_path: Path, own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferry.dispatch.loop.BUDGET_HOLD_S", 0.2)
    ceiling = 100_000_000  # so large that a block of it covers many calls
    config = {"ledger": own_server.database(), "tenants": {"free": {}, "metered": {"day_token_ceiling": ceiling}}}
    with ScriptedGateway(tmp_path, config) as gateway:
        own_server.stop("immediate")
        assert call(gateway, x_inferry_tenant="metered") == (503, "ledger_unavailable"), (
            "the first call needs a watermark"
        )
        assert call(gateway, x_inferry_tenant="free") == (200, None)
        own_server.start()
        until(lambda: call(gateway, x_inferry_tenant="metered") == (200, None))
        own_server.stop("immediate")
        assert call(gateway, x_inferry_tenant="metered") == (200, None), "within the watermark that is written"
        own_server.start()
        until(lambda: metric(gateway, "inferry_ledger_up") == 1.0)


def test_an_unreachable_server_at_the_start_is_an_error_without_the_password() -> None:
    with pytest.raises(ConfigError, match="cannot use the ledger") as caught:
        start("postgresql://me:secret@127.0.0.1:1/db")
    assert "secret" not in str(caught.value)
