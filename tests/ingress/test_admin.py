"""`/admin/workers`: for operators only."""

import http.client
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferry.ingress.admin import _is_loopback
from support.scripted_gateway import ScriptedGateway
from support.serving import get, post

KEY = "correct-horse-battery-staple"


def ask(url: str, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        body = response.read()
        return response.status, dict(response.getheaders()), msgspec.json.decode(body) if body else None
    finally:
        connection.close()


def a_call(url: str) -> int:
    status, _, _ = post(url, "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    return status


def test_workers_are_listed_with_their_state(scripted: ScriptedGateway) -> None:
    status, _, body = ask(scripted.url, "GET", "/admin/workers")
    assert status == 200
    (worker,) = body["workers"]
    assert worker.items() >= {"name": "scripted", "group": "default", "phase": "ready", "breaker": "closed"}.items()
    assert worker.items() >= {"opens": 0, "share": 1.0, "drained": False, "models": ["m"]}.items()
    assert worker["capacity"]["sequences"] == 8
    assert worker["load"]["running"] == 0
    assert worker["since"] > 1_600_000_000


def test_a_drained_worker_takes_no_calls_until_it_is_readmitted(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        assert a_call(gateway.url) == 200
        status, _, body = ask(gateway.url, "POST", "/admin/workers/scripted/drain")
        assert (status, body["workers"][0]["phase"], body["workers"][0]["drained"]) == (200, "draining", True)
        assert a_call(gateway.url) == 503
        _, _, ready = get(gateway.url, "/ready")
        assert ready["workers"] == {"scripted": "draining"}
        _, _, metrics = get(gateway.url, "/metrics")
        assert 'inferry_worker_phase{worker="scripted",phase="draining"} 1.0' in metrics
        assert 'inferry_worker_breaker_state{worker="scripted",state="closed"} 1.0' in metrics
        status, _, body = ask(gateway.url, "POST", "/admin/workers/scripted/readmit?now")
        assert (status, body["workers"][0]["phase"]) == (200, "ready")
        assert a_call(gateway.url) == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("POST", "/admin/workers", 405, "GET, HEAD"),
        ("GET", "/admin/workers/scripted/drain", 405, "POST"),
        ("POST", "/admin/workers/nobody/drain", 404, None),
        ("POST", "/admin/workers/scripted/explode", 404, None),
        ("POST", "/admin/workers/drain", 404, None),
        ("GET", "/admin/nothing", 404, None),
    ],
)
def test_unknown_names_are_reported(
    scripted: ScriptedGateway, method: str, path: str, status: int, allow: str | None
) -> None:
    answered, headers, body = ask(scripted.url, method, path)
    assert (answered, headers.get("allow")) == (status, allow)
    assert body["error"]["code"] == {404: "not_found", 405: "method_not_allowed"}[status]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"x-forwarded-for": "10.0.0.1"},
        {"forwarded": "for=10.0.0.1"},
        {"host": "evil.example"},
        {"host": "127.evil.example:80"},
    ],
)
def test_browsers_and_proxies_on_loopback_need_the_admin_key(
    scripted: ScriptedGateway, headers: dict[str, str]
) -> None:
    status, _, body = ask(scripted.url, "POST", "/admin/workers/scripted/drain", headers)
    assert (status, body["error"]["code"], body["error"]["type"]) == (403, "admin_only", "permission_error")
    assert get(scripted.url, "/ready")[0] == 200


def test_with_an_admin_key_only_the_key_authorizes(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, {"server": {"admin_key": KEY}}) as gateway:
        for wrong in ({}, {"authorization": KEY}, {"authorization": f"Bearer {KEY}x"}, {"authorization": "Bearer "}):
            status, _, body = ask(gateway.url, "GET", "/admin/workers", wrong)
            assert (status, body["error"]["code"]) == (403, "admin_only")
            assert KEY not in str(body)
        right = {"authorization": f"bearer {KEY}", "x-forwarded-for": "10.0.0.1", "host": "gateway.example"}
        assert ask(gateway.url, "GET", "/admin/workers", right)[0] == 200


@pytest.mark.parametrize(
    ("address", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.5", False),
        ("::ffff:10.0.0.5", False),
        ("fe80::1%eth0", False),
        ("", False),
        ("localhost", False),
    ],
)
def test_loopback_addresses_are_recognized(address: str, is_loopback: bool) -> None:
    assert _is_loopback(address) is is_loopback
