"""Prompts are hazardous material: they reach the engine and the one client, and nothing else."""

import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from openai import OpenAI

from support.http_gateway import HttpGateway
from support.scripted_gateway import ScriptedGateway
from support.serving import get, post
from support.tenant_gateway import bearer
from support.upstream import Upstream, well_behaved

CANARY = "canary-5c1d9e"


def test_a_prompt_is_in_no_log_no_metric_and_no_ledger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    messages = [{"role": "user", "content": CANARY}]
    with ScriptedGateway(tmp_path) as gateway:
        call = {"model": "m", "messages": messages}
        assert post(gateway.url, "/v1/chat/completions", call)[0] == 200
        assert post(gateway.url, "/v1/completions", {"model": "m", "prompt": CANARY, "n": 2})[0] == 400
        assert post(gateway.url, "/v1/chat/completions", call | {"temperature": CANARY})[0] == 400
        gateway.worker.dies_after = 0
        assert post(gateway.url, "/v1/chat/completions", call)[0] == 502
        metrics = get(gateway.url, "/metrics")[2]
    assert CANARY not in caplog.text
    assert CANARY not in metrics
    for path in tmp_path.iterdir():
        assert CANARY.encode() not in path.read_bytes(), path


def test_a_batch_is_in_no_log_and_no_metric_and_its_errors_quote_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"model": "m", "messages": [{"role": "user", "content": CANARY}]}
    good = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body})
    with ScriptedGateway(tmp_path) as gateway, OpenAI(base_url=gateway.url + "/v1", api_key="unused") as api:
        found = []
        for content in (good, good.replace("POST", CANARY), CANARY, json.dumps({"custom_id": [CANARY]})):
            file = api.files.create(file=("in.jsonl", content.encode()), purpose="batch")
            batch = api.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
            while batch.status not in ("completed", "failed"):
                time.sleep(0.01)
                batch = api.batches.retrieve(batch.id)
            found.append(batch)
        assert [batch.status for batch in found] == ["completed", "failed", "failed", "failed"]
        shown = "".join(batch.model_dump_json() for batch in found) + get(gateway.url, "/metrics")[2]
    assert CANARY not in shown
    assert CANARY not in caplog.text


def test_an_error_of_an_engine_that_quotes_the_prompt_reaches_its_caller_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two tenants send the same call under the same names at the same time. The engine numbers its answers."""
    caplog.set_level(logging.DEBUG)

    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if CANARY not in json.dumps(body):
            return await well_behaved(up, request, body)
        number = len(up.bodies)
        if number_of_calls(up) == 2:
            up.release.set()
        await up.release.wait()
        message = f"call {number}: the prompt `{CANARY}` is invalid"
        return web.json_response({"error": {"message": message, "param": CANARY}}, status=400)

    def number_of_calls(up: Upstream) -> int:
        return sum(CANARY in json.dumps(body) for body in up.bodies)

    call = {"model": "m", "messages": [{"role": "user", "content": CANARY}], "temperature": 0}
    names = {"idempotency-key": "same", "x-inferry-run-id": "run", "x-inferry-step-id": "step"}
    with HttpGateway(tmp_path, script) as gateway, ThreadPoolExecutor(2) as threads:
        keys = [gateway.key("acme"), gateway.key("globex")]

        def ask(headers: Mapping[str, str]) -> Any:
            return gateway.call("POST", "/v1/chat/completions", call, headers)

        answers = list(threads.map(ask, [{**bearer(key), **names} for key in keys]))
        assert [answer.status for answer in answers] == [400, 400]
        messages = [answer.json["error"]["message"] for answer in answers]
        assert all(CANARY in message for message in messages), "the caller may read its own prompt"
        assert len(set(messages)) == 2, "each tenant reads the answer to its own call"
        assert number_of_calls(gateway.upstream) == 2
        seen_elsewhere = [
            gateway.call("GET", f"/v1/runs/run{more}", None, bearer(keys[0])).body for more in ("", "/jobs")
        ]
        seen_elsewhere.append(gateway.as_admin("GET", "/admin/workers").body)
        seen_elsewhere.append(gateway.call("GET", "/metrics").body)
    assert CANARY.encode() not in b"".join(seen_elsewhere)
    assert CANARY not in caplog.text
    for path in tmp_path.iterdir():
        assert CANARY.encode() not in path.read_bytes(), path


def test_a_job_does_not_print_its_payload(tmp_path: Path) -> None:
    from support.builders import a_job

    job = a_job(body=CANARY.encode())
    assert CANARY not in repr(job)
    assert CANARY not in str(job)
    assert CANARY not in f"{job.payload}"


def test_a_response_that_is_not_stored_leaves_no_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    call = {"model": "m", "input": [{"role": "user", "content": CANARY}], "store": False}
    with ScriptedGateway(tmp_path) as gateway:
        assert post(gateway.url, "/v1/responses", call)[0] == 200
        for wrong in ({"temperature": CANARY}, {"truncation": CANARY}, {"input": [{"role": CANARY, "content": "a"}]}):
            status, _, error = post(gateway.url, "/v1/responses", call | wrong)
            assert status == 400
            assert CANARY not in json.dumps(error)
        metrics = get(gateway.url, "/metrics")[2]
    assert CANARY not in caplog.text
    assert CANARY not in metrics
    for path in tmp_path.iterdir():
        assert CANARY.encode() not in path.read_bytes(), path
