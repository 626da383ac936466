"""Hits of the embedded engine's prefix cache, as clients, the ledger and metrics see them."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from support.tenant_gateway import TenantGateway, bearer
from support.waiting import until

TEXT = "Tickets about invoices go to billing. " * 20
MESSAGES = [{"role": "user", "content": TEXT}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 16, "store": False},
}


def cached_tokens(usage: dict[str, Any]) -> int:
    """The cached tokens of a usage object of any of the APIs."""
    if "cache_read_input_tokens" in usage:
        found = usage["cache_read_input_tokens"]
    else:
        found = (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"]
    return int(found)


def blocks_by_state(gateway: TenantGateway) -> dict[str, float]:
    lines = gateway.call("GET", "/metrics").body.decode().splitlines()
    return {
        line.split('state="')[1].split('"')[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("inferry_engine_kv_blocks{")
    }


def test_hits_reach_usage_in_every_api_the_ledger_and_metrics(tmp_path: Path, tiny_model: Path) -> None:
    worker = {"name": "local", "kind": "embedded", "model": str(tiny_model), "models": ["tiny"]}
    with TenantGateway(tmp_path, None, {"workers": [worker], "single_flight": {"identical": False}}) as gateway:
        key = gateway.key("acme")
        total = 0
        for path, body in CALLS.items():
            found = []
            for run in ("first", "second"):
                headers = bearer(key, x_inferry_run_id=f"{run}{path.replace('/', '-')}")
                answer = gateway.call("POST", path, {"model": "tiny", "temperature": 0, **body}, headers)
                assert answer.status == 200, answer.body
                found.append(cached_tokens(answer.json["usage"]))
            assert found[1] > 64, path
            page = gateway.call("GET", f"/v1/runs/second{path.replace('/', '-')}", None, bearer(key)).json
            assert page["tokens"]["cached"] == found[1]
            total += sum(found)
        until(lambda: gateway.metric("inferry_engine_prefix_cache_hits_total") == total)
        assert gateway.metric("inferry_engine_prefix_cache_queries_total") > total
        lines = gateway.call("GET", "/metrics").body.decode().splitlines()
        (tokens,) = (
            line.rpartition(" ")[2]
            for line in lines
            if line.startswith("inferry_tokens_total") and 'kind="cached"' in line and 'lane="P1"' in line
        )
        assert float(tokens) == total
        until(lambda: blocks_by_state(gateway)["held"] == 0)  # all calls have ended
        states = blocks_by_state(gateway)
        assert states["kept"] > 0  # the runs are open
        for path in CALLS:
            for run in ("first", "second"):
                name = f"{run}{path.replace('/', '-')}"
                method, place = ("DELETE", "") if run == "first" else ("POST", "/finish")
                assert gateway.call(method, f"/v1/runs/{name}{place}", None, bearer(key)).status == 200
        gateway.call("POST", "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1}, bearer(key))
        until(lambda: blocks_by_state(gateway)["kept"] == 0)
        assert blocks_by_state(gateway)["cached"] > 0
        assert sum(states.values()) == 65_536 // 32
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        assert database.execute("SELECT sum(cached_tokens) FROM attempts").fetchone() == (total,)
