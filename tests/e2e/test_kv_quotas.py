"""Quotas of KV tokens and concurrent runs through the gateway."""

from pathlib import Path
from typing import Any

from support.tenant_gateway import Answer, TenantGateway, bearer

LIMITS = {"max_kv_tokens": 400, "run_max_kv_tokens": 300, "max_concurrent_runs": 1}


def test_calls_beyond_a_quota_are_refused_with_the_amounts(tmp_path: Path, tiny_model: Path) -> None:
    worker = {"name": "local", "kind": "embedded", "model": str(tiny_model), "models": ["tiny"]}
    with TenantGateway(tmp_path, None, {"workers": [worker], "tenants": {"acme": LIMITS}}) as gateway:
        acme = gateway.key("acme")

        def call(run: str, **more: Any) -> Answer:
            body = {"model": "tiny", "prompt": [7] * 40, "max_tokens": 4, **more}
            return gateway.call("POST", "/v1/completions", body, bearer(acme, x_inferry_run_id=run))

        refused = call("a", max_tokens=1_000)
        assert (refused.status, refused.json["error"]["code"]) == (400, "kv_quota_too_small")
        assert "would hold 1,040 KV tokens; the run's limit is 300, 0 in use" in refused.json["error"]["message"]
        assert "retry-after" not in refused.headers
        assert call("a").status == 200
        refused = call("b")
        assert (refused.status, refused.json["error"]["code"]) == (429, "tenant_concurrency")
        assert int(refused.headers["retry-after"]) <= 75
        assert call("a").status == 200
        assert gateway.call("POST", "/v1/runs/a/finish", None, bearer(acme)).status == 200
        assert call("b").status == 200
        assert gateway.call("DELETE", "/v1/runs/b", None, bearer(acme)).status == 200
        assert call("c").status == 200
        other = gateway.key("globex")
        body = {"model": "tiny", "prompt": [7] * 40, "max_tokens": 400, "ignore_eos": False}
        assert gateway.call("POST", "/v1/completions", body, bearer(other)).status == 200
