"""Several processes on one port: each call is served as by one process, and every limit holds over all of them."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.several_processes import Answered, EngineThread, Processes, a_body, expected_text, over_all, processes
from support.waiting import until

CONFIG: dict[str, Any] = {
    "tenants": {
        "narrow": {"max_concurrent": 3},
        "slow": {"requests_per_minute": 5},
        "poor": {"run_token_ceiling": 120},
    },
    "server": {"drain_timeout_s": 60},
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Processes, EngineThread]]:
    with processes(tmp_path_factory.mktemp("gateway"), CONFIG) as found:
        yield found


@pytest.fixture
def gateway(running: tuple[Processes, EngineThread]) -> Processes:
    return running[0]


@pytest.fixture
def engine(running: tuple[Processes, EngineThread]) -> Iterator[EngineThread]:
    yield running[1]
    running[1].first = None
    running[1].open()


def _call(gateway: Processes, body: Any, **headers: str) -> Answered:
    return gateway.call("POST", "/v1/completions", body, headers)


def test_every_process_serves_whole_answers_and_streams(gateway: Processes, engine: EngineThread) -> None:
    for number, stream in enumerate((False, True)):
        body = a_body(number, 12, stream=stream)
        for answered in over_all(gateway, lambda body=body: _call(gateway, body)):  # type: ignore[misc]
            assert answered.status == 200
            text = answered.text if stream else answered.json["choices"][0]["text"]
            assert text == expected_text(body)
            assert b'"token_ids":[' not in answered.body  # requested for a failover only
            assert answered.headers["x-inferry-worker"] == "up"
            assert float(answered.headers["x-inferry-queue-ms"]) >= 0


def test_a_concurrency_limit_holds_over_all_processes(gateway: Processes, engine: EngineThread) -> None:
    engine.hold(1)
    calls = [gateway.begin(a_body(number, 4), {"x-inferry-tenant": "narrow"}) for number in range(24)]
    until(lambda: sum(one.status == 429 for one in calls) == 21)
    assert engine.running == 3
    engine.open()
    until(lambda: sum(one.status == 200 for one in calls) == 3)
    codes = {one.json["error"]["code"] for one in calls if one.status == 429}
    assert codes == {"tenant_concurrency"}
    assert _call(gateway, a_body(tokens=2), **{"x-inferry-tenant": "narrow"}).status == 200


def test_a_limit_of_requests_per_minute_holds_over_all_processes(gateway: Processes, engine: EngineThread) -> None:
    began = time.monotonic()
    answers = gateway.call_many([(a_body(number, 2), {"x-inferry-tenant": "slow"}) for number in range(24)])
    refilled = (time.monotonic() - began) / 12  # one call in twelve seconds
    served = [one for one in answers if one.status == 200]
    assert 5 <= len(served) <= 5 + refilled
    assert all(0 <= int(one.headers["x-ratelimit-remaining-requests"]) <= 4 for one in served)
    refused = [one for one in answers if one.status != 200]
    assert {(one.status, one.json["error"]["code"]) for one in refused} == {(429, "rate_limited")}
    assert all(int(one.headers["retry-after"]) >= 1 for one in refused)


def test_a_budget_holds_over_all_processes(gateway: Processes, engine: EngineThread) -> None:
    headers = {"x-inferry-tenant": "poor", "x-inferry-run-id": "costly"}
    answers = gateway.call_many([(a_body(number, 30), headers) for number in range(16)])
    assert {one.status for one in answers} <= {200, 402}
    assert any(one.status == 402 for one in answers)
    spent = sum(one.json["usage"]["total_tokens"] for one in answers if one.status == 200)
    assert 0 < spent <= 120
    run = gateway.call("GET", "/v1/runs/costly", headers={"x-inferry-tenant": "poor"}).json
    assert run["tokens"]["prompt"] + run["tokens"]["output"] == spent


def test_a_client_that_disconnects_ends_its_call_at_the_engine(gateway: Processes, engine: EngineThread) -> None:
    import http.client

    engine.hold(2)
    for number in range(8):
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(a_body(number, 6, stream=True)))
        assert connection.getresponse().read1(10)
        assert engine.running == 1
        connection.close()
        until(lambda: engine.running == 0)
    until(gateway.is_empty)


def test_a_run_is_cancelled_through_any_process(gateway: Processes, engine: EngineThread) -> None:
    engine.hold(2)
    headers = {"x-inferry-run-id": "doomed"}
    calls = [gateway.begin(a_body(number, 6, stream=True), headers) for number in range(12)]
    until(lambda: engine.running == 12)
    until(lambda: all(one.body for one in calls))
    report = gateway.call("DELETE", "/v1/runs/doomed").json
    assert (report["running"], report["queued"]) == (12, 0)
    until(lambda: all(one.status for one in calls))
    assert all(one.events[-1]["error"]["code"] == "run_cancelled" for one in calls)
    later = over_all(gateway, lambda: _call(gateway, a_body(), **headers))
    assert {(one.status, one.json["error"]["code"]) for one in later} == {(409, "run_cancelled")}
    until(gateway.is_empty)


def test_a_repeated_call_is_answered_once(gateway: Processes, engine: EngineThread) -> None:
    asked = len(engine.upstream.bodies)
    headers = {"idempotency-key": "only-once", "x-inferry-replay": "allow"}
    answers = gateway.call_many([(a_body(3, 5), headers)] * 12)
    assert {one.status for one in answers} == {200}
    assert len({one.json["choices"][0]["text"] for one in answers}) == 1
    assert len(engine.upstream.bodies) == asked + 1
    assert sum("x-inferry-shared-with" in one.headers for one in answers) == 11


def test_files_batches_and_jobs_are_the_same_in_every_process(gateway: Processes, engine: EngineThread) -> None:
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": a_body(number, 3)}
        for number in range(4)
    ]
    parts = [
        ('name="purpose"', "batch"),
        ('name="file"; filename="b.jsonl"', "\n".join(json.dumps(line) for line in lines)),
    ]
    form = (
        "".join(f"--x\r\ncontent-disposition: form-data; {name}\r\n\r\n{part}\r\n" for name, part in parts)
        + "--x--\r\n"
    )
    multipart = {"content-type": "multipart/form-data; boundary=x"}
    for _ in range(6):
        uploaded = gateway.call("POST", "/v1/files", form.encode(), multipart)
        assert uploaded.status == 200, uploaded.body
    batch = {"input_file_id": uploaded.json["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    made = gateway.call("POST", "/v1/batches", batch).json
    until(lambda: gateway.call("GET", f"/v1/batches/{made['id']}").json["status"] == "completed")
    done = gateway.call("GET", f"/v1/batches/{made['id']}").json
    assert done["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
    output = gateway.call("GET", f"/v1/files/{done['output_file_id']}/content")
    assert len(output.body.splitlines()) == 4
    job = gateway.call("POST", "/v1/jobs", {"endpoint": "/v1/completions", "body": a_body(2, 3)})
    assert job.status in (200, 202), job.body
    until(lambda: gateway.call("GET", f"/v1/jobs/{job.json['id']}").json["status"] == "completed")


def test_pages_for_operators_are_the_same_in_every_process(gateway: Processes, engine: EngineThread) -> None:
    before = gateway.metric("inferry_http_requests_total")
    answers = over_all(gateway, lambda: _call(gateway, a_body(tokens=2)))
    until(lambda: gateway.metric("inferry_http_requests_total") >= before + len(answers))
    for _ in range(12):
        assert gateway.call("GET", "/", headers={"accept": "text/html"}).body.startswith(b"<!doctype html>")
        assert [worker["name"] for worker in gateway.call("GET", "/admin/workers").json["workers"]] == ["up"]
        assert gateway.call("GET", "/ready").json == {"status": "ready", "workers": {"up": "ready"}}
        assert gateway.call("GET", "/health").json == {"status": "ok"}
        assert gateway.call("GET", "/v1/nothing").status == 404


def test_one_connection_may_alternate_between_forwarded_and_local_requests(
    gateway: Processes, engine: EngineThread
) -> None:
    import http.client

    for _ in range(6):
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        for _ in range(3):
            connection.request("GET", "/v1/models")
            assert json.loads(connection.getresponse().read())["data"][0]["id"] == "m"
            socket = connection.sock
            connection.request("POST", "/v1/completions", json.dumps(a_body(tokens=2)))
            assert connection.getresponse().read()
            assert connection.sock is socket
        connection.close()


def test_a_new_key_is_known_to_every_process_at_once(tmp_path: Path) -> None:
    with processes(tmp_path) as (gateway, _):
        key = gateway.call("POST", "/admin/keys", {"tenant": "acme"}).json["key"]
        with_key = {"authorization": f"Bearer {key}"}
        assert {_call(gateway, a_body(tokens=2), **with_key).status for _ in range(16)} == {200}
        assert {_call(gateway, a_body(tokens=2)).status for _ in range(16)} == {401}
        key_id = gateway.call("GET", "/admin/keys").json["keys"][0]["id"]
        assert gateway.call("DELETE", f"/admin/keys/{key_id}").status == 200
        assert {_call(gateway, a_body(tokens=2), **with_key).status for _ in range(16)} == {401}
