"""Every inference API as an async job and as an item of a batch: its own shape, lane P2, one charge."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

import pytest
from openai import OpenAI
from openai.types import Batch, CreateEmbeddingResponse

from inferry.durable.execute import StoredCall
from inferry.ingress.stored_calls import StoredCalls
from support.async_job_gateway import Jobs
from support.pooling_worker import PROMPT_TOKENS, PoolingWorker
from support.tenant_gateway import bearer
from support.waiting import until

USAGE: Final = {"prompt_tokens": PROMPT_TOKENS, "total_tokens": PROMPT_TOKENS}
PROBS: Final = [0.25, 0.75]
MESSAGES: Final = [{"role": "user", "content": "the question"}]
TEXTS: Final = ["a", "b"]
CALLS: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, {"object": "chat.completion"}),
    "/v1/completions": ({"prompt": "x"}, {"object": "text_completion"}),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 5}, {"type": "message", "role": "assistant"}),
    "/v1/responses": ({"input": "the question"}, {"object": "response", "status": "completed", "background": False}),
    "/v1/embeddings": (
        {"input": TEXTS},
        {
            "object": "list",
            "data": [{"object": "embedding", "index": index, "embedding": [1.0, 0.0]} for index in range(2)],
            "usage": USAGE,
        },
    ),
    "/v1/score": (
        {"text_1": "a", "text_2": TEXTS},
        {"data": [{"object": "score", "index": index, "score": 0.5} for index in range(2)], "usage": USAGE},
    ),
    "/v1/rerank": (
        {"query": "a", "documents": ["b"]},
        {"results": [{"index": 0, "document": {"text": "b"}, "relevance_score": 0.5}], "usage": USAGE},
    ),
    "/v1/classify": (
        {"input": ["a"]},
        {"data": [{"index": 0, "label": "high", "probs": PROBS, "num_classes": 2}]},
    ),
}
"""A body of every inference path, and some of its answer."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    prices = {"m": {"input": 1.0, "output": 2.0}}
    with Jobs(tmp_path_factory.mktemp("apis"), {"prices": prices}, PoolingWorker) as gateway:
        yield gateway


@pytest.fixture
def api(gateway: Jobs) -> Iterator[OpenAI]:
    with OpenAI(base_url=gateway.url + "/v1", api_key=gateway.acme, max_retries=0) as api:
        yield api


def charges(gateway: Jobs, run_id: str) -> Counter[str]:
    """How many rows of the ledger have a cost, by step."""
    query = "SELECT step_id FROM attempts WHERE run_id = ? AND cost_nanos > 0"
    with closing(sqlite3.connect(str(gateway.config.ledger).removeprefix("sqlite:///"))) as connection:
        return Counter(step for (step,) in connection.execute(query, (run_id,)))


def lanes(gateway: Jobs, run_id: str) -> list[str]:
    return [job.lane.name for plan in gateway.worker.plans for job in plan.jobs if job.run_id == run_id]


def upload(api: OpenAI, endpoint: str, *bodies: Any) -> str:
    lines = [
        json.dumps({"custom_id": f"r{number}", "method": "POST", "url": endpoint, "body": {"model": "m", **body}})
        for number, body in enumerate(bodies)
    ]
    return api.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch").id


def ended(gateway: Jobs, id: str) -> Any:
    """A batch, by the path of the API: the client's types do not know every endpoint."""

    def batch() -> Any:
        return gateway.call("GET", f"/v1/batches/{id}", None, bearer(gateway.acme)).json

    until(lambda: batch()["status"] in ("completed", "failed"))
    return batch()


def create(gateway: Jobs, file: str, endpoint: str) -> str:
    wanted = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
    answer = gateway.call("POST", "/v1/batches", wanted, bearer(gateway.acme))
    assert answer.status == 200, answer.body
    id: str = answer.json["id"]
    return id


def test_every_inference_path_is_tested_here(gateway: Jobs) -> None:
    assert set(gateway.service.app.inference_paths) == set(CALLS)


@pytest.mark.parametrize("endpoint", CALLS)
def test_every_api_works_as_an_async_job(gateway: Jobs, endpoint: str) -> None:
    body, expected = CALLS[endpoint]
    job = gateway.ended(gateway.create({"model": "m", **body}, endpoint).json["id"])
    assert (job["status"], job["lane"], job["response"]["status_code"]) == ("completed", "P2", 200), job
    answer = job["response"]["body"]
    assert {name: answer.get(name) for name in expected} == expected
    assert lanes(gateway, job["id"]) == ["P2"]
    assert charges(gateway, job["id"]) == {job["id"]: 1}


@pytest.mark.parametrize("endpoint", CALLS)
def test_every_api_works_as_an_item_of_a_batch(gateway: Jobs, api: OpenAI, endpoint: str) -> None:
    body, expected = CALLS[endpoint]
    batch = ended(gateway, create(gateway, upload(api, endpoint, body, {**body, "user": "second"}), endpoint))
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 2), batch
    lines = [json.loads(line) for line in api.files.content(batch["output_file_id"]).read().splitlines()]
    assert [line["custom_id"] for line in lines] == ["r0", "r1"]
    for line in lines:
        answer = line["response"]["body"]
        assert {name: answer.get(name) for name in expected} == expected
    assert lanes(gateway, batch["id"]) == ["P2", "P2"]
    assert list(charges(gateway, batch["id"]).values()) == [1, 1]


def test_a_batch_of_embeddings_by_the_official_client(api: OpenAI) -> None:
    file = upload(api, "/v1/embeddings", *({"input": f"text {number}"} for number in range(50)))
    id = api.batches.create(input_file_id=file, endpoint="/v1/embeddings", completion_window="24h").id
    until(lambda: api.batches.retrieve(id).status == "completed")
    batch: Batch = api.batches.retrieve(id)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.error_file_id) == (50, None)
    assert batch.output_file_id is not None
    lines = [json.loads(line) for line in api.files.content(batch.output_file_id).read().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"r{number}" for number in range(50)]
    for line in lines:
        answer = CreateEmbeddingResponse.model_validate(line["response"]["body"])
        assert [one.embedding for one in answer.data] == [[1.0, 0.0]]


# -- background: the stored call would end before its work -----------------------------------------------------------


@pytest.mark.parametrize("value", [True, "yes"])
def test_a_background_response_is_not_an_item_of_a_batch(gateway: Jobs, api: OpenAI, value: Any) -> None:
    body = {"input": "x", "background": value}
    batch = ended(gateway, create(gateway, upload(api, "/v1/responses", {"input": "x"}, body), "/v1/responses"))
    assert batch["status"] == "failed"
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"], error["param"]) == ("invalid_request", 2, "body")
    assert error["message"] == "`background` is not supported in batches"
    assert lanes(gateway, batch["id"]) == []


def test_background_may_be_false_in_stored_work(gateway: Jobs, api: OpenAI) -> None:
    body = {"input": "x", "background": False}
    job = gateway.ended(gateway.create({"model": "m", **body}, "/v1/responses").json["id"])
    assert job["response"]["body"]["status"] == "completed"
    batch = ended(gateway, create(gateway, upload(api, "/v1/responses", body), "/v1/responses"))
    assert batch["status"] == "completed"


def test_a_stored_call_begins_no_background_response(gateway: Jobs) -> None:
    """One that was accepted by an earlier version."""
    app = gateway.service.app
    call = StoredCall(
        tenant="acme",
        key_id=None,
        path="/v1/responses",
        body=b'{"model":"m","input":"x","background":true}',
        job_id="j-0",
        run_id="a-stored-call",
        step_id="s",
    )
    answer = gateway.run(StoredCalls(app.serve, app.inference_paths, gateway.service.tenants).call(call))
    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "background")
    assert lanes(gateway, "a-stored-call") == []
