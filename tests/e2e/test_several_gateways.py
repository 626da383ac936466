"""Gateways that share Redis and PostgreSQL: one budget, cancelled runs everywhere, and Redis away."""

import asyncio
import http.client
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from inferry.cli import wiring
from inferry.cli.config.loader import parse
from inferry.cli.config.schema import ConfigError
from inferry.domain.clock import SystemClock
from inferry.ledger.stores.holdings import HoldingStore
from inferry.ledger.stores.opening import open_queries
from support.redis_server import RedisServer
from support.scripted_gateway import ScriptedGateway
from support.scripted_worker import ScriptedWorker
from support.serving import get, post
from support.waiting import until

CHAT = "/v1/chat/completions"
TTL_MS = 600


@contextmanager
def gateways(
    directory: Path, redis: RedisServer, ledger: str, count: int = 3, more: dict[str, Any] | None = None, **script: Any
) -> Iterator[list[ScriptedGateway]]:
    config = {"ledger": ledger, "cluster": {"redis": redis.url, "ttl_ms": TTL_MS}, **(more or {})}
    with ExitStack() as stack:
        found = [stack.enter_context(ScriptedGateway(directory, config, **script)) for _ in range(count)]
        for one in found:
            until(lambda one=one: metric(one, "inferry_redis_up") == 1)  # type: ignore[misc]
        yield found


def call(gateway: ScriptedGateway, run: str = "run", tokens: int = 10) -> tuple[int, str | None]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}
    status, _, answer = post(gateway.url, CHAT, body, {"x-inferry-run-id": run})
    return status, answer["error"]["code"] if "error" in answer else None


def metric(gateway: ScriptedGateway, name: str) -> float:
    page: str = get(gateway.url, "/metrics")[2]
    return float(next(line for line in page.splitlines() if line.startswith(f"{name} ")).split()[1])


def delete(url: str, path: str) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        connection.request("DELETE", path)
        return connection.getresponse().status
    finally:
        connection.close()


def tokens_in(ledger: str) -> int:
    with open_queries(ledger) as queries:
        return sum(row.prompt_tokens + row.output_tokens for row in queries.jobs(limit=100_000))


def limited(**limits: Any) -> dict[str, Any]:
    return {"tenants": {"default": limits}}


def test_calls_over_three_gateways_share_the_ceiling_of_their_run(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    ceiling = 3_000
    with gateways(tmp_path, redis_server, postgres_url, more=limited(run_token_ceiling=ceiling)) as found:
        with ThreadPoolExecutor(12) as clients:
            answers = list(clients.map(lambda number: call(found[number % 3]), range(240)))
        codes = {code for _, code in answers}
        assert codes <= {None, "run_budget_exhausted"}
        assert (402, "run_budget_exhausted") in answers
        until(lambda: all(one.service.gateway.in_flight == 0 for one in found))
    used = tokens_in(postgres_url)
    assert ceiling * 0.8 <= used <= ceiling


def test_a_gateway_that_joins_knows_what_others_have_spent(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    more = limited(run_token_ceiling=200)
    with gateways(tmp_path, redis_server, postgres_url, 1, more) as (first,):
        while call(first) == (200, None):
            pass
        with gateways(tmp_path, redis_server, postgres_url, 1, more) as (second,):
            assert call(second) == (402, "run_budget_exhausted")
            assert call(second, run="another") == (200, None)
    assert tokens_in(postgres_url) <= 200 + 100


def test_grants_return_to_zero_when_all_gateways_are_idle(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    more = limited(run_token_ceiling=10_000, day_token_ceiling=20_000)

    def held() -> int:
        with redis_server.client() as client:
            accounts: list[Any] = [client.hgetall(key) for key in client.keys("inferry:1:0:*")]
            return sum(int(amount) for one in accounts for field, amount in one.items() if field.startswith(b"h"))

    with gateways(tmp_path, redis_server, postgres_url, 2, more) as found:
        assert [call(one) for one in found] == [(200, None)] * 2
        assert held() > 0
        until(lambda: held() == 0)
        assert [call(one) for one in found] == [(200, None)] * 2
    assert held() == 0


def test_a_run_cancelled_at_one_gateway_ends_at_the_others(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with gateways(tmp_path, redis_server, postgres_url, 2) as (first, second):
        second.worker.gate.clear()
        with ThreadPoolExecutor(4) as clients:
            calls = [clients.submit(call, second, "doomed") for _ in range(4)]
            until(lambda: second.service.gateway.in_flight == 4)
            assert delete(first.url, "/v1/runs/doomed") == 200
            assert {one.result() for one in calls} == {(409, "run_cancelled")}
        assert call(second, "doomed") == (409, "run_cancelled")


def test_settings_applied_at_one_gateway_are_those_of_the_others(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    def active(gateway: ScriptedGateway) -> tuple[int, Any]:
        found = get(gateway.url, "/admin/settings")[2]
        version = next(one for one in found["versions"] if one["number"] == found["active"])
        return found["active"], version["sections"]["lanes"]["P1"].get("max_wait_ms")

    with gateways(tmp_path, redis_server, postgres_url, 2) as (first, second):
        assert active(first) == active(second)
        status, _, answer = post(first.url, "/admin/settings", {"sections": {"lanes": {"P1": {"max_wait_ms": 777}}}})
        assert status == 200, answer
        applied = active(first)
        assert applied[1] == 777
        until(lambda: active(second) == applied)
        assert call(second) == (200, None)
    with open_queries(postgres_url) as queries:
        assert [row.settings_version for row in queries.jobs(limit=10)] == [applied[0]]


def test_without_redis_calls_without_limits_go_on_and_limited_ones_end_with_their_grant(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    more = {"tenants": {"default": {}, "acme": {"day_token_ceiling": 1_000_000}}}
    with gateways(tmp_path, redis_server, postgres_url, 1, more) as (gateway,):

        def limited_call() -> tuple[int, str | None]:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
            status, _, answer = post(gateway.url, CHAT, body, {"x-inferry-tenant": "acme"})
            return status, answer["error"]["code"] if "error" in answer else None

        assert limited_call() == (200, None)
        redis_server.kill()
        until(lambda: metric(gateway, "inferry_redis_up") == 0)
        assert call(gateway) == (200, None)
        until(lambda: not gateway.service.gate.watermarks.is_valid)  # type: ignore[union-attr]
        assert limited_call() == (503, "ledger_unavailable")
        assert call(gateway) == (200, None)
        redis_server.start()
        until(lambda: metric(gateway, "inferry_limit_generation") == 2)
        assert limited_call() == (200, None)


def test_sharing_needs_postgresql_and_a_valid_url() -> None:
    def problem(**cluster: Any) -> str:
        with pytest.raises(ConfigError) as found:
            parse({"cluster": cluster})
        return str(found.value)

    assert "requires a ledger in PostgreSQL" in problem(redis="redis://localhost")
    assert "cluster.redis must be of the form" in problem(redis="http://localhost")
    assert "cluster.ttl_ms must be between 300 and 3000" in problem(redis="redis://localhost", ttl_ms=5000)
    assert "cluster.name must be" in problem(redis="redis://localhost", name="a b")


def test_a_gateway_of_its_own_does_not_start_beside_gateways_that_share(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferry.ledger.stores.postgres.LOCK_WAIT_S", 0.1)

    async def start() -> None:
        wiring.assemble(parse({"ledger": postgres_url}), [ScriptedWorker()], {}, SystemClock())

    refused = pytest.raises(ConfigError, match="another gateway already uses this ledger")
    with gateways(tmp_path, redis_server, postgres_url, 1), refused:
        asyncio.run(start())


def test_requests_per_minute_are_shared(tmp_path: Path, redis_server: RedisServer, postgres_url: str) -> None:
    with gateways(tmp_path, redis_server, postgres_url, 3, limited(requests_per_minute=40)) as found:
        with ThreadPoolExecutor(12) as clients:
            answers = list(clients.map(lambda number: call(found[number % 3]), range(90)))
        assert {code for _, code in answers} == {None, "rate_limited"}
        # The bucket refills while they are made, at 40 a minute.
        assert 36 <= answers.count((200, None)) <= 80


def test_concurrent_calls_are_shared_and_those_of_a_stopped_gateway_are_free_again(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with gateways(tmp_path, redis_server, postgres_url, 2, limited(max_concurrent=3)) as (first, second):
        first.worker.gate.clear()
        with ThreadPoolExecutor(4) as clients:
            calls = [clients.submit(call, first) for _ in range(3)]
            until(lambda: first.worker.running == 3)
            assert call(second) == (429, "tenant_concurrency")
            first.run(_set(first.worker.gate))
            assert [one.result() for one in calls] == [(200, None)] * 3
        until(lambda: call(second) == (200, None))
        first.stop()
        first.join()
        until(lambda: call(second) == (200, None))


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_a_gateway_that_stops_leaves_nothing_held(tmp_path: Path, redis_server: RedisServer, postgres_url: str) -> None:
    with gateways(tmp_path, redis_server, postgres_url, 1, limited(day_token_ceiling=100_000)) as (gateway,):
        assert call(gateway) == (200, None)
    store = HoldingStore(postgres_url, list)
    assert store.begin_rebuild(time.time())[1] == []
    store.close()
