"""Batches with the official OpenAI client: files in, files out."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from support.scripted_gateway import ScriptedGateway
from support.serving import Serving, get, post
from support.waiting import until

CHAT: Final = "/v1/chat/completions"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    with ScriptedGateway(tmp_path) as gateway:
        yield gateway


@pytest.fixture
def api(gateway: ScriptedGateway) -> Iterator[OpenAI]:
    with client(gateway) as api:
        yield api


def client(gateway: Serving, tenant: str = "default") -> OpenAI:
    headers = {"x-inferry-tenant": tenant}
    return OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0, default_headers=headers)


def a_line(number: int, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}]}
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body, **more}


def upload(api: OpenAI, lines: list[dict[str, Any]]) -> str:
    content = "".join(json.dumps(line) + "\n" for line in lines)
    return api.files.create(file=("in.jsonl", content.encode()), purpose="batch").id


def create(api: OpenAI, lines: list[dict[str, Any]], **more: Any) -> Batch:
    return api.batches.create(input_file_id=upload(api, lines), endpoint=CHAT, completion_window="24h", **more)


def finished(api: OpenAI, id: str) -> Batch:
    until(lambda: api.batches.retrieve(id).status in ("completed", "failed", "expired", "cancelled"))
    return api.batches.retrieve(id)


def lines_of(api: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in api.files.content(file_id).read().splitlines()]


def test_every_request_of_a_batch_has_its_answer_in_order(api: OpenAI, gateway: ScriptedGateway) -> None:
    created = create(api, [a_line(number) for number in range(200)], metadata={"of": "tests"})
    assert created.status == "validating"
    batch = finished(api, created.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (200, 200, 0)
    assert batch.error_file_id is None
    assert batch.metadata == {"of": "tests"}
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    assert batch.expires_at == batch.created_at + 86_400
    lines = lines_of(api, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"r{number}" for number in range(200)]
    assert {line["response"]["status_code"] for line in lines} == {200}
    assert {line["response"]["body"]["choices"][0]["message"]["content"] for line in lines} == {"one two three"}
    assert len({line["id"] for line in lines}) == 200
    assert api.files.retrieve(batch.output_file_id or "").purpose == "batch_output"


def test_a_batch_is_a_run_in_lane_p2(api: OpenAI, gateway: ScriptedGateway) -> None:
    batch = finished(api, create(api, [a_line(number) for number in range(20)]).id)
    assert {job.lane.name for plan in gateway.worker.plans for job in plan.jobs if job.run_id == batch.id} == {"P2"}
    until(lambda: get(gateway.url, f"/v1/runs/{batch.id}")[0] == 200)
    until(lambda: get(gateway.url, f"/v1/runs/{batch.id}")[2]["jobs"]["done"] == 20)


def test_permanent_errors_go_to_the_error_file(api: OpenAI) -> None:
    wrong = {"model": "unknown", "messages": [{"role": "user", "content": "x"}]}
    batch = finished(api, create(api, [a_line(1), a_line(2, body=wrong), a_line(3, body={}), a_line(4)]).id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
    assert [line["custom_id"] for line in lines_of(api, batch.output_file_id)] == ["r1", "r4"]
    errors = lines_of(api, batch.error_file_id)
    assert [(one["custom_id"], one["response"]["status_code"]) for one in errors] == [("r2", 404), ("r3", 400)]
    assert errors[0]["response"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("lines", "code", "line"),
    [
        (["not json"], "invalid_json_line", 1),
        ([json.dumps(a_line(1)), "", json.dumps(a_line(1))], "duplicate_custom_id", 3),
        ([json.dumps(a_line(1, url="/v1/completions"))], "mismatched_endpoint", 1),
        ([json.dumps(a_line(1, method="GET"))], "invalid_method", 1),
        ([json.dumps(a_line(1, body=[]))], "invalid_request", 1),
        ([json.dumps(a_line(1, body={"stream": True}))], "invalid_request", 1),
        ([json.dumps(a_line(1, custom_id=""))], "invalid_custom_id", 1),
        ([json.dumps({"custom_id": "a"})], "invalid_request", 1),
        ([""], "empty_file", None),
    ],
)
def test_an_invalid_file_fails_the_batch_and_names_the_line(
    api: OpenAI, lines: list[str], code: str, line: int | None
) -> None:
    content = "\n".join(lines).encode()
    file = api.files.create(file=("in.jsonl", content or b"\n"), purpose="batch")
    batch = finished(api, api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert [(error.code, error.line) for error in batch.errors.data or []] == [(code, line)]


def test_a_batch_may_have_so_many_requests_and_no_more(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, config={"storage": {"max_batch_items": 3}}) as gateway, client(gateway) as api:
        assert finished(api, create(api, [a_line(number) for number in range(3)]).id).status == "completed"
        batch = finished(api, create(api, [a_line(number) for number in range(4)]).id)
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or []] == ["too_many_requests"]


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": "/v1/nothing"},
        {"completion_window": "soon"},
        {"completion_window": "8d"},
        {"input_file_id": "file-unknown"},
        {"metadata": {"k": "v" * 513}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
        {"output_expires_after": {"anchor": "now", "seconds": 3600}},
        {"surprise": 1},
    ],
)
def test_an_invalid_batch_is_refused(api: OpenAI, gateway: ScriptedGateway, change: dict[str, Any]) -> None:
    body = {"input_file_id": upload(api, [a_line(1)]), "endpoint": CHAT, "completion_window": "24h", **change}
    status, _, answer = post(gateway.url, "/v1/batches", body)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")


def test_only_files_for_batches_are_taken(api: OpenAI) -> None:
    file = api.files.create(file=("in.jsonl", b"{}"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def test_a_cancelled_batch_stops_and_keeps_what_is_done(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, pause_s=0.05) as gateway, client(gateway) as api:
        batch = create(api, [a_line(number) for number in range(2000)])
        until(lambda: (counts := api.batches.retrieve(batch.id).request_counts) is not None and counts.completed > 5)
        assert api.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        until(lambda: gateway.worker.running == 0)
        ended = finished(api, batch.id)
        assert ended.status == "cancelled"
        assert ended.request_counts is not None
        assert ended.request_counts.completed + ended.request_counts.failed == 2000
        done = lines_of(api, ended.output_file_id)
        left = lines_of(api, ended.error_file_id)
        assert len(done) == ended.request_counts.completed
        assert {one["error"]["code"] for one in left} == {"batch_cancelled"}
        assert sorted(line["custom_id"] for line in [*done, *left]) == sorted(f"r{n}" for n in range(2000))
        assert api.batches.cancel(batch.id).status == "cancelled"


def test_a_batch_continues_after_an_orderly_stop(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, pause_s=0.02) as gateway, client(gateway) as api:
        id = create(api, [a_line(number) for number in range(300)]).id
        until(lambda: (counts := api.batches.retrieve(id).request_counts) is not None and counts.completed > 10)
    with ScriptedGateway(tmp_path) as gateway, client(gateway) as api:
        batch = finished(api, id)
        assert batch.status == "completed"
        found = [line["custom_id"] for line in lines_of(api, batch.output_file_id)]
        assert found == [f"r{number}" for number in range(300)]
        until(lambda: get(gateway.url, f"/v1/runs/{id}")[2]["jobs"]["done"] == 300)


def test_a_finished_batch_cannot_be_cancelled(api: OpenAI) -> None:
    batch = finished(api, create(api, [a_line(1)]).id)
    with pytest.raises(openai.ConflictError):
        api.batches.cancel(batch.id)


def test_cancelling_the_run_cancels_the_batch(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, pause_s=0.05) as gateway, client(gateway) as api:
        batch = create(api, [a_line(number) for number in range(500)])
        until(lambda: gateway.worker.running > 0)
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        connection.request("DELETE", f"/v1/runs/{batch.id}")
        assert connection.getresponse().status == 200
        connection.close()
        assert finished(api, batch.id).status == "cancelled"


def test_cancelling_the_run_cancels_a_batch_of_which_no_item_has_run(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway, client(gateway, "acme") as api, client(gateway) as other:
        gateway.run(gateway.service.storage.runner.close())  # batches are left to another gateway
        batch = create(api, [a_line(1), a_line(2)])
        for stranger, id in ((other, batch.id), (api, "batch_unknown")):
            with pytest.raises(openai.NotFoundError, match="there is no run"):
                stranger.delete(f"/runs/{id}", cast_to=str)
        assert api.batches.retrieve(batch.id).status == "validating"
        assert json.loads(api.delete(f"/runs/{batch.id}", cast_to=str))["status"] == "cancelled"
        assert api.batches.retrieve(batch.id).status == "cancelling"


def test_batches_are_listed_in_pages_and_belong_to_their_tenant(gateway: ScriptedGateway) -> None:
    with client(gateway, "acme") as mine, client(gateway, "other") as theirs:
        ids = [create(mine, [a_line(1)]).id for _ in range(5)]
        assert [one.id for one in mine.batches.list(limit=2)] == ids[::-1]
        assert not theirs.batches.list().data
        for ask in (theirs.batches.retrieve, theirs.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(ids[0])
        with pytest.raises(openai.BadRequestError):
            theirs.batches.create(
                input_file_id=mine.batches.retrieve(ids[0]).input_file_id, endpoint=CHAT, completion_window="24h"
            )
        for id in ids:
            finished(mine, id)


def test_a_refused_item_waits_and_runs_later(tmp_path: Path) -> None:
    """The tenant's own limit holds for batches, and delays their items without failing them."""
    config = {"tenants": {"acme": {"max_concurrent": 2}}}
    with ScriptedGateway(tmp_path, config=config, pause_s=0.02) as gateway, client(gateway, "acme") as api:
        batch = finished(api, create(api, [a_line(number) for number in range(30)]).id)
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)
        until(lambda: get_run(gateway, batch.id, "acme")["jobs"]["done"] == 30)


def get_run(gateway: Serving, id: str, tenant: str) -> Any:
    with client(gateway, tenant) as api:
        return json.loads(api.get(f"/runs/{id}", cast_to=str))
