"""Operators delete what is stored for a tenant."""

from pathlib import Path

from openai import OpenAI

from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import TenantGateway, bearer
from support.waiting import async_until


async def until_in_flight(gateway: TenantGateway, count: int) -> None:
    await async_until(lambda: gateway.service.gateway.in_flight == count)


def test_the_stored_content_of_a_tenant_is_deleted_and_its_batches_stop(tmp_path: Path) -> None:
    with TenantGateway(tmp_path, lambda: ([ScriptedWorker(pause_s=0.05)], {})) as gateway:
        keys = {tenant: gateway.key(tenant) for tenant in ("acme", "other")}
        for key in keys.values():
            with OpenAI(base_url=gateway.url + "/v1", api_key=key, max_retries=0) as api:
                api.files.create(file=("a", b"x"), purpose="user_data")
        requests = [
            {
                "custom_id": str(n),
                "params": {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
            }
            for n in range(200)
        ]
        batch = gateway.call("POST", "/v1/messages/batches", {"requests": requests}, bearer(keys["acme"])).json
        answer = gateway.as_admin("DELETE", "/admin/tenants/acme/data")
        assert (answer.status, answer.json) == (
            200,
            {"name": "acme", "documents": 0, "files": 1, "batches": 1, "jobs": 0},
        )
        assert gateway.call("GET", "/v1/files", None, bearer(keys["acme"])).json["data"] == []
        assert len(gateway.call("GET", "/v1/files", None, bearer(keys["other"])).json["data"]) == 1
        path = f"/v1/messages/batches/{batch['id']}"
        assert gateway.call("GET", path, None, bearer(keys["acme"])).status == 404
        gateway.run(gateway.service.storage.sweeper.sweep())
        gateway.run(until_in_flight(gateway, 0))
        assert gateway.as_admin("DELETE", "/admin/tenants/acme/data").json["files"] == 0
        assert gateway.call("DELETE", "/admin/tenants/acme/data").status == 403


def test_background_responses_of_the_tenant_stop(tmp_path: Path) -> None:
    with TenantGateway(tmp_path, lambda: ([ScriptedWorker(pause_s=3600.0)], {})) as gateway:
        background = gateway.service.storage.background
        body = {"model": "m", "input": "x", "background": True}
        keys = {tenant: gateway.key(tenant) for tenant in ("acme", "other")}
        ids = {
            tenant: gateway.call("POST", "/v1/responses", body, bearer(key)).json["id"] for tenant, key in keys.items()
        }
        gateway.run(until_in_flight(gateway, 2))
        assert gateway.as_admin("DELETE", "/admin/tenants/acme/data").json["documents"] == 2
        assert not background.is_running("acme", ids["acme"])
        assert background.is_running("other", ids["other"])
        gateway.run(until_in_flight(gateway, 1))
        gateway.as_admin("DELETE", "/admin/tenants/other/data")
        gateway.run(until_in_flight(gateway, 0))
