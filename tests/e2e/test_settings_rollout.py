"""Settings changed on a running gateway, for some of its runs or all: a worse version is rolled back by itself."""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from inferry.domain.workers import Capacity
from support.scripted_gateway import ScriptedGateway
from support.tenant_gateway import Answer

LIMIT_S = 120.0
STABLE = {"P1": {"ttft_ms": 1000, "itl_ms": 1000}}
WORSE = {"P1": {**STABLE["P1"], "window": "fixed", "coalesce_ms": 3000, "max_wait_ms": 3000}}
"""Every call is held for 3 s, which is more than its target, unless enough calls to fill the worker come together."""
CLIENTS = 24


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    config = {"lanes": STABLE, "settings": {"min_runs": 10, "check_interval_s": 0.1}}
    with ScriptedGateway(tmp_path, config, capacity=Capacity(sequences=64)) as serving:
        yield serving


def ask(gateway: ScriptedGateway, method: str, path: str, body: Any = None, run: str = "") -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=LIMIT_S)
    try:
        headers = {"x-inferry-run-id": run} if run else {}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def complete(gateway: ScriptedGateway, run: str) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return ask(gateway, "POST", "/v1/chat/completions", body, run).status


def complete_until(
    gateway: ScriptedGateway, is_over: Callable[[], bool], call: Callable[[str], Any] | None = None
) -> set[Any]:
    """What calls of many clients at once return, each a run of its own."""
    numbers, found = count(), set[Any]()
    give_up_at = time.monotonic() + LIMIT_S
    with ThreadPoolExecutor(CLIENTS) as clients:
        while not is_over():
            assert time.monotonic() < give_up_at, ask(gateway, "GET", "/admin/settings/comparison").body
            runs = [f"run-{next(numbers)}" for _ in range(CLIENTS)]
            found |= set(clients.map(call or (lambda run: complete(gateway, run)), runs))
    return found


def state(gateway: ScriptedGateway) -> tuple[int, int | None]:
    found = ask(gateway, "GET", "/admin/settings").json
    return found["active"], found["candidate"]


def test_a_worse_version_is_rolled_back_by_itself_and_no_call_fails(gateway: ScriptedGateway) -> None:
    assert state(gateway) == (1, None)
    applied = ask(gateway, "POST", "/admin/settings", {"sections": {"lanes": WORSE}, "share": 0.5})
    assert applied.status == 200, applied.body
    assert state(gateway) == (1, 2)
    assert complete_until(gateway, lambda: state(gateway)[1] is None) == {200}
    history = ask(gateway, "GET", "/admin/settings").json
    assert [change["kind"] for change in history["changes"]] == ["rollback", "trial", "file"]
    assert "attainment of P1 fell" in history["changes"][0]["reason"]
    compared = ask(gateway, "GET", "/admin/settings/comparison").json
    attainment = next(one for one in compared["measures"] if one["name"] == "attainment")
    assert attainment["high"] < -0.02


def test_a_worse_version_for_all_runs_is_rolled_back_by_itself_and_no_call_fails(gateway: ScriptedGateway) -> None:
    before = [f"before-{number}" for number in range(60)]
    assert {complete(gateway, run) for run in before} == {200}
    assert ask(gateway, "POST", "/admin/settings", {"sections": {"lanes": WORSE}}).status == 200
    assert state(gateway) == (2, None)
    assert complete_until(gateway, lambda: state(gateway) == (1, None)) == {200}
    latest = ask(gateway, "GET", "/admin/settings").json["changes"][0]
    assert latest["kind"] == "rollback"
    assert "attainment of P1 fell" in latest["reason"]


def test_a_version_whose_clients_give_up_is_rolled_back_though_no_call_completes(gateway: ScriptedGateway) -> None:
    before = [f"before-{number}" for number in range(60)]
    assert {complete(gateway, run) for run in before} == {200}
    assert ask(gateway, "POST", "/admin/settings", {"sections": {"lanes": WORSE}}).status == 200

    def give_up(run: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=1.5)
        with closing(connection), suppress(TimeoutError):
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"x-inferry-run-id": run})
            connection.getresponse()

    complete_until(gateway, lambda: state(gateway) == (1, None), give_up)
    assert "attainment of P1 fell" in ask(gateway, "GET", "/admin/settings").json["changes"][0]["reason"]


def test_settings_apply_to_the_running_gateway_and_back(gateway: ScriptedGateway) -> None:
    limited = {"P1": {**STABLE["P1"], "queue_limit": 7}}
    assert ask(gateway, "POST", "/admin/settings", {"sections": {"lanes": limited}}).status == 200
    assert 'inferry_queue_limit{lane="P1"} 7' in ask(gateway, "GET", "/metrics").body.decode()
    assert complete(gateway, "a") == 200
    assert ask(gateway, "POST", "/admin/settings/rollback", {"reason": "too few"}).status == 200
    assert state(gateway) == (1, None)
    assert 'inferry_queue_limit{lane="P1"} 10000' in ask(gateway, "GET", "/metrics").body.decode()
    assert complete(gateway, "b") == 200


def test_a_trial_of_what_belongs_to_the_lane_is_refused_by_name(gateway: ScriptedGateway) -> None:
    shares = {"P1": {**STABLE["P1"], "share": 0.2}}
    refused = ask(gateway, "POST", "/admin/settings", {"sections": {"lanes": shares}, "share": 0.5})
    assert refused.status == 400
    assert "lanes.P1.share" in refused.json["error"]["message"]
    assert state(gateway) == (1, None)


def test_invalid_settings_are_refused_and_change_nothing(gateway: ScriptedGateway) -> None:
    invalid: list[dict[str, Any]] = [{"P1": {"share": 2}}, {"P1": {"shares": 0.1}}, {"P9": {}}]
    for lanes in invalid:
        assert ask(gateway, "POST", "/admin/settings", {"sections": {"lanes": lanes}}).status == 400
    assert ask(gateway, "POST", "/admin/settings", {"sections": {"workers": []}}).status == 400
    assert ask(gateway, "POST", "/admin/settings", {"version": 99}).status == 404
    assert ask(gateway, "POST", "/admin/settings/rollback").status == 409
    assert state(gateway) == (1, None)


def test_a_restart_keeps_what_was_applied_and_a_changed_file_replaces_it(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, {"lanes": STABLE}) as serving:
        sections = {"sections": {"lanes": {"P1": {**STABLE["P1"], "max_batch": 3}}}}
        assert ask(serving, "POST", "/admin/settings", sections).status == 200
    with ScriptedGateway(tmp_path, {"lanes": STABLE}) as serving:
        assert state(serving) == (2, None)
    with ScriptedGateway(tmp_path, {"lanes": {"P1": {**STABLE["P1"], "max_batch": 9}}}) as serving:
        assert state(serving) == (3, None)


def test_applied_settings_that_no_longer_fit_the_file_give_way_to_those_of_the_file(tmp_path: Path) -> None:
    def config(group: str) -> dict[str, Any]:
        worker = {"name": "up", "kind": "vllm", "url": "http://127.0.0.1:1", "models": ["m"], "group": group}
        return {"lanes": STABLE, "workers": [worker]}

    with ScriptedGateway(tmp_path, config("batch")) as serving:
        sections = {"sections": {"lanes": {"P1": {**STABLE["P1"], "groups": ["batch"]}}}}
        assert ask(serving, "POST", "/admin/settings", sections).status == 200
        assert state(serving) == (2, None)
    with ScriptedGateway(tmp_path, config("other")) as serving:
        found = ask(serving, "GET", "/admin/settings").json
        assert (found["active"], found["candidate"]) == (3, None)
        assert complete(serving, "r") == 200
    with ScriptedGateway(tmp_path, config("other")) as serving:
        assert state(serving) == (3, None)
