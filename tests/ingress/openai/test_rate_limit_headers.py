"""Rate limits in the headers of every response."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferry.ingress.openai.rate_limit_headers import format_duration
from support.scripted_gateway import ScriptedGateway
from support.serving import post

CALL: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
LIMITS = {"requests_per_minute": 3, "tokens_per_minute": 100_000}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedGateway]:
    tenants = {"acme": LIMITS, "lone": {"tokens_per_minute": 100_000}}
    with ScriptedGateway(tmp_path_factory.mktemp("rates"), {"tenants": tenants}) as gateway:
        yield gateway


def call(gateway: ScriptedGateway, tenant: str, **body: Any) -> tuple[int, dict[str, str]]:
    status, headers, _ = post(gateway.url, "/v1/chat/completions", CALL | body, {"x-inferry-tenant": tenant})
    return status, {name.lower(): value for name, value in headers.items()}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.02, "20ms"), (0.0201, "21ms"), (1, "1s"), (8.64, "8.64s"), (360, "6m0s"), (90.5, "1m30.5s"),
     (3600, "1h0m0s"), (59.9999, "1m0s")],
)  # fmt: skip
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_full_responses_streams_and_refusals_have_rate_limit_headers(gateway: ScriptedGateway) -> None:
    seen = [call(gateway, "acme"), call(gateway, "acme", stream=True), call(gateway, "acme"), call(gateway, "acme")]
    assert [status for status, _ in seen] == [200, 200, 200, 429]
    assert [headers["x-ratelimit-limit-requests"] for _, headers in seen] == ["3"] * 4
    assert [headers["x-ratelimit-remaining-requests"] for _, headers in seen] == ["2", "1", "0", "0"]
    for _, headers in seen:
        assert headers["x-ratelimit-limit-tokens"] == "100000"
        assert 0 < int(headers["x-ratelimit-remaining-tokens"]) <= 100_000
        assert headers["x-ratelimit-reset-requests"].endswith("s")
    refused = seen[-1][1]
    assert refused["x-inferry-drop-reason"] == "rate_limited"
    assert refused["x-should-retry"] == "true"
    assert 1 <= int(refused["retry-after"]) <= 21
    assert 0 < int(refused["retry-after-ms"]) <= 21_000


def test_an_invalid_call_of_a_rate_limited_caller_has_the_headers_too(gateway: ScriptedGateway) -> None:
    status, headers = call(gateway, "lone", max_tokens=-1)
    assert status == 400
    assert headers["x-ratelimit-limit-tokens"] == "100000"
    assert "x-ratelimit-limit-requests" not in headers


def test_callers_without_rate_limits_get_no_headers(gateway: ScriptedGateway) -> None:
    for body in ({}, {"stream": True}):
        status, headers = call(gateway, "free", **body)
        assert status == 200
        assert not [name for name in headers if name.startswith("x-ratelimit")]


def test_shadow_refusals_are_counted_in_metrics(tmp_path: Path) -> None:
    tenants = {"acme": {"requests_per_minute": 1, "shadow": True}}
    with ScriptedGateway(tmp_path, {"tenants": tenants}) as gateway:
        assert [call(gateway, "acme")[0] for _ in range(3)] == [200, 200, 200]
        page = gateway.service.app._metrics.render()[0].decode()
    assert 'inferry_shadow_refusals_total{limit="requests_per_minute"} 2' in page
    assert 'inferry_shadow_refusals_total{limit="day_money_ceiling"} 0' in page
    assert "inferry_budget_overrun_tokens_total 0" in page
