"""Trees of runs over restarts and several gateways: one ceiling, and one cancellation, for the whole tree."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from e2e.test_several_gateways import CHAT, delete, gateways, limited, metric, tokens_in
from support.redis_server import RedisServer
from support.scripted_gateway import ScriptedGateway
from support.serving import post
from support.waiting import until

CEILING = 200


def call(gateway: ScriptedGateway, run: str | None, parent: str | None = None) -> tuple[int, str | None]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
    headers = {"x-inferry-run-id": run, "x-inferry-parent-run-id": parent}
    given = {name: value for name, value in headers.items() if value is not None}
    status, _, answer = post(gateway.url, CHAT, body, given)
    return status, answer["error"]["code"] if "error" in answer else None


def spend_all(gateway: ScriptedGateway, run: str) -> None:
    while (answer := call(gateway, run)) == (200, None):
        pass
    assert answer == (402, "run_budget_exhausted")


def spent(gateway: ScriptedGateway, run: str) -> int:
    async def read() -> int:
        found = gateway.service.gateway.run_budget("default", run)
        return 0 if found is None else found.spent_tokens

    return gateway.run(read())


def test_after_a_restart_a_sub_run_that_omits_its_parent_has_the_ceiling_of_its_root(tmp_path: Path) -> None:
    config: dict[str, Any] = limited(run_token_ceiling=CEILING)
    with ScriptedGateway(tmp_path, config) as gateway:
        assert call(gateway, "child", "parent") == (200, None)
        assert call(gateway, "parent", "root") == (200, None)
        spend_all(gateway, "root")
    with ScriptedGateway(tmp_path, config) as gateway:
        assert call(gateway, "child") == (402, "run_budget_exhausted")
        assert call(gateway, "new", "child") == (402, "run_budget_exhausted")


def test_after_a_restart_a_cancelled_run_and_its_sub_runs_stay_cancelled(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        assert call(gateway, "child", "root") == (200, None)
        gateway.worker.gate.clear()
        with ThreadPoolExecutor(1) as clients:
            running = clients.submit(call, gateway, "root")
            until(lambda: gateway.service.gateway.in_flight == 1)
            assert delete(gateway.url, "/v1/runs/root") == 200
            assert running.result() == (409, "run_cancelled")
    with ScriptedGateway(tmp_path) as gateway:
        assert call(gateway, "root") == (409, "run_cancelled")
        assert call(gateway, "child") == (409, "run_cancelled")


def test_a_sub_run_at_another_gateway_has_the_ceiling_of_its_root(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with gateways(tmp_path, redis_server, postgres_url, 2, limited(run_token_ceiling=CEILING)) as (first, second):
        assert call(first, "parent", "root") == (200, None)
        spend_all(first, "root")
        assert call(second, "child", "parent") == (402, "run_budget_exhausted")
        assert call(second, "parent") == (402, "run_budget_exhausted")
        assert call(second, None, "parent") == (402, "run_budget_exhausted")
        assert call(second, "other") == (200, None)


def test_a_sub_run_at_another_gateway_is_charged_to_its_root(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with gateways(tmp_path, redis_server, postgres_url, 2, limited(run_token_ceiling=CEILING)) as (first, second):
        assert call(first, "parent", "root") == (200, None)
        spend_all(second, "parent")
        assert spent(second, "root") <= CEILING
        assert call(first, "root") == (402, "run_budget_exhausted")


def test_concurrent_sub_runs_over_gateways_share_the_ceiling_of_their_root(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    ceiling = 1000
    with gateways(tmp_path, redis_server, postgres_url, 3, limited(run_token_ceiling=ceiling)) as found:
        assert call(found[0], "parent", "root") == (200, None)
        with ThreadPoolExecutor(12) as clients:
            answers = list(clients.map(lambda one: call(found[one % 3], f"child-{one % 8}", "parent"), range(120)))
        assert {code for _, code in answers} == {None, "run_budget_exhausted"}
        until(lambda: all(one.service.gateway.in_flight == 0 for one in found))
    assert tokens_in(postgres_url) <= ceiling


def test_a_cycle_over_two_gateways_is_refused(tmp_path: Path, redis_server: RedisServer, postgres_url: str) -> None:
    with gateways(tmp_path, redis_server, postgres_url, 2, limited(run_token_ceiling=CEILING)) as (first, second):
        assert call(first, "child", "parent") == (200, None)
        assert call(second, "parent", "child")[0] == 400


def test_a_cancelled_root_ends_sub_runs_at_other_gateways(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with gateways(tmp_path, redis_server, postgres_url, 2) as (first, second):
        assert call(first, "parent", "root") == (200, None)
        second.worker.gate.clear()
        with ThreadPoolExecutor(1) as clients:
            running = clients.submit(call, second, "child", "parent")
            until(lambda: second.service.gateway.in_flight == 1)
            assert delete(first.url, "/v1/runs/root") == 200
            assert running.result() == (409, "run_cancelled")
        assert call(second, "child") == (409, "run_cancelled")


def test_without_redis_a_new_run_waits_only_where_runs_have_a_ceiling(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    more = {"tenants": {"default": {}, "acme": {"run_token_ceiling": CEILING}}}
    with gateways(tmp_path, redis_server, postgres_url, 1, more) as (gateway,):
        redis_server.pause()
        try:
            until(lambda: metric(gateway, "inferry_redis_up") == 0)
            assert call(gateway, "child", "parent") == (200, None)
            headers = {"x-inferry-tenant": "acme", "x-inferry-run-id": "child", "x-inferry-parent-run-id": "parent"}
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
            status, _, answer = post(gateway.url, CHAT, body, headers)
            assert (status, answer["error"]["code"]) == (503, "ledger_unavailable")
        finally:
            redis_server.resume()
