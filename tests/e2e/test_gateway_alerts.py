"""Alerts of a running gateway: shown to operators, sent to the webhook, and free of prompts."""

import base64
import hashlib
import hmac
from pathlib import Path

import pytest

from support.callback_receiver import CallbackReceiver
from support.promtool import promtool
from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import CHAT, TenantGateway, bearer
from support.waiting import until

CANARY = "canary-93be84"
KEY = b"0123456789abcdef"
RULES = {
    # True from the second sample on, without any load.
    "InferryEventLoopLag": {"threshold": -1, "for_s": 0},
    "InferryRunBudgetNearlySpent": {"threshold": 0},
}


def a_gateway(directory: Path, url: str, **webhook: object) -> TenantGateway:
    secret = "whsec_" + base64.b64encode(KEY).decode()
    hook = {"url": url, "secret": secret, "allow_http": True, **webhook}
    config = {
        "alerts": {"rules": RULES, "webhook": hook},
        "tenants": {"acme": {"run_token_ceiling": 100_000}},
    }
    return TenantGateway(directory, lambda: ([ScriptedWorker()], {}), config)


def sample(gateway: TenantGateway) -> None:
    """Take a sample now, as the timer does every five seconds."""
    observation = gateway.service.observation
    observation._burn_at = float("-inf")
    gateway.run(observation._sample())


def test_an_alert_reaches_operators_and_the_webhook_without_any_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        CallbackReceiver() as receiver,
        a_gateway(tmp_path, receiver.url + "/hook", allowed_networks=["127.0.0.0/8"]) as gateway,
    ):
        key = gateway.key("acme")
        call = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": f"{CANARY} " * 15}]}
        run = {**bearer(key), "x-inferry-run-id": "run-7"}
        assert gateway.call("POST", CHAT, call, run).status == 200
        sample(gateway)
        sample(gateway)
        until(lambda: len(receiver.received) >= 2)
        answer = gateway.as_admin("GET", "/admin/alerts")
        metrics = gateway.call("GET", "/metrics").body.decode()
        alerts = {one["name"]: one for one in answer.json["alerts"]}
        assert gateway.call("GET", "/admin/alerts").status == 403
        assert gateway.as_admin("POST", "/admin/alerts", {}).status == 405
    spent = alerts["InferryRunBudgetNearlySpent"]
    assert (spent["state"], spent["labels"]) == ("firing", {"tenant": "acme", "run": "run-7"})
    assert set(spent) == {"name", "severity", "state", "since", "summary", "value", "labels"}
    assert alerts["InferryEventLoopLag"]["state"] == "firing"
    assert 'inferry_alerts{alert="InferryEventLoopLag",severity="warning",state="firing"} 1' in metrics
    for one in receiver.received:
        signed = f"{one.headers['webhook-id']}.{one.headers['webhook-timestamp']}.".encode() + one.body
        expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
        assert one.headers["webhook-signature"] == f"v1,{expected}"
        assert one.json["type"] == "alert.firing"
    assert {one.json["data"]["name"] for one in receiver.received} >= {
        "InferryRunBudgetNearlySpent",
        "InferryEventLoopLag",
    }
    shown = [metrics, answer.body.decode(), caplog.text, *(one.body.decode() for one in receiver.received)]
    assert not any(CANARY in text for text in shown)


def test_a_webhook_whose_name_leads_to_an_internal_address_is_not_called(tmp_path: Path) -> None:
    with (
        CallbackReceiver() as receiver,
        a_gateway(tmp_path, receiver.url.replace("127.0.0.1", "localhost"), retry_for_s=0.001) as gateway,
    ):
        sample(gateway)
        sample(gateway)
        until(lambda: gateway.metric("inferry_alert_webhooks_total") > 0)
        text = gateway.call("GET", "/metrics").body.decode()
    assert 'inferry_alert_webhooks_total{result="delivered"} 0' in text
    assert receiver.received == []


def test_requests_are_counted_by_endpoint_and_status(tmp_path: Path) -> None:
    with a_gateway(tmp_path, "https://hooks.example/") as gateway:
        key = gateway.key("acme")
        call = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
        for body in (call, {**call, "stream": True}):
            assert gateway.call("POST", CHAT, body, bearer(key)).status == 200
        assert gateway.call("POST", CHAT, call).status == 401
        assert gateway.call("GET", "/v1/runs/unknown", None, bearer(key)).status == 404
        assert gateway.call("GET", f"/{CANARY}").status == 404
        text = gateway.call("GET", "/metrics").body.decode()
    assert promtool("check", "metrics", given=text) == "", "names and units follow Prometheus' habits"
    assert f'inferry_http_requests_total{{endpoint="{CHAT}",status="2xx"}} 2' in text
    assert f'inferry_http_requests_total{{endpoint="{CHAT}",status="4xx"}} 1' in text
    assert 'inferry_http_requests_total{endpoint="/v1/runs",status="4xx"} 1' in text
    assert 'inferry_http_requests_total{endpoint="other",status="4xx"} 1' in text
    assert CANARY not in text
