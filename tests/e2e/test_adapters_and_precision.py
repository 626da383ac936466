"""`workers[].adapters` and `workers[].precision` in the running gateway, before two scripted servers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.several_servers import SeveralServers

ADAPTER = "support-lora"
WORKERS = {
    "plain": {"models": ["m"], "precision": "bf16"},
    "tuned": {"models": ["m"], "precision": "fp8", "adapters": [ADAPTER]},
}
TENANTS = {"exact": {"precision": "bf16"}, "cheap": {"precision": "fp8"}, "odd": {"precision": "int4"}}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[SeveralServers]:
    with SeveralServers(tmp_path, WORKERS, {"tenants": TENANTS}) as gateway:
        yield gateway


def test_calls_for_an_adapter_go_only_to_the_worker_that_has_it(gateway: SeveralServers) -> None:
    assert gateway.served_by(ADAPTER) == {"tuned"}
    assert [body["model"] for body in gateway.upstreams["tuned"].bodies] == [ADAPTER] * 6
    assert gateway.upstreams["plain"].bodies == []


def test_an_adapter_is_listed_with_its_base_model(gateway: SeveralServers) -> None:
    models = {one["id"]: one for one in gateway.call("GET", "/v1/models").json["data"]}
    assert {name: one["parent"] for name, one in models.items()} == {"m": None, ADAPTER: "m"}
    assert all(one["ready"] for one in models.values())


def test_metrics_name_the_adapter(gateway: SeveralServers) -> None:
    assert gateway.ask(ADAPTER).status == 200
    assert f'model="{ADAPTER}"' in gateway.call("GET", "/metrics").body.decode()


@pytest.mark.parametrize(("tenant", "worker"), [("exact", "plain"), ("cheap", "tuned")])
def test_a_tenant_gets_the_precision_that_it_requires(gateway: SeveralServers, tenant: str, worker: str) -> None:
    assert gateway.served_by("m", tenant) == {worker}


def test_a_precision_that_no_worker_has_is_refused(gateway: SeveralServers) -> None:
    answer = gateway.ask("m", "odd")
    assert (answer.status, answer.code) == (503, "no_worker")
    assert "int4" in answer.json["error"]["message"]
    models = gateway.call("GET", "/v1/models", headers={"x-inferry-tenant": "odd"}).json["data"]
    assert not any(one["ready"] for one in models)


def test_an_adapter_in_the_wrong_precision_is_refused(gateway: SeveralServers) -> None:
    assert gateway.ask(ADAPTER, "exact").status == 503


def test_the_precision_of_a_key_replaces_that_of_its_tenant(tmp_path: Path) -> None:
    with SeveralServers(tmp_path, WORKERS, {"tenants": TENANTS, "auth": {"mode": "on"}}) as gateway:
        for settings, worker in (({}, "plain"), ({"precision": "fp8"}, "tuned")):
            key = gateway.key("exact", limits=settings)
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            answer = gateway.call("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {key}"})
            assert answer.headers["x-inferry-worker"] == worker


def test_an_adapter_that_the_server_lists_needs_no_entry(tmp_path: Path) -> None:
    workers = {"plain": {"models": ["m"]}, "tuned": {}}
    with SeveralServers(tmp_path, workers, listed_adapters={"tuned": (ADAPTER,)}) as gateway:
        assert gateway.served_by(ADAPTER) == {"tuned"}
        view = next(view for view in gateway.service.gateway.views() if view.worker == "tuned")
        assert (sorted(view.models), sorted(view.adapters)) == (["m", ADAPTER], [ADAPTER])
