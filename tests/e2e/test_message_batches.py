"""Message batches with the official Anthropic client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types.messages import MessageBatch

from support.scripted_gateway import ScriptedGateway
from support.serving import Serving, get
from support.waiting import until


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    with ScriptedGateway(tmp_path) as gateway:
        yield gateway


@pytest.fixture
def api(gateway: ScriptedGateway) -> Iterator[Anthropic]:
    with client(gateway) as api:
        yield api


def client(gateway: Serving, tenant: str = "default") -> Anthropic:
    return Anthropic(
        base_url=gateway.url, api_key="unused", max_retries=0, default_headers={"x-inferry-tenant": tenant}
    )


def a_request(number: int, **more: Any) -> Any:
    params = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": f"q{number}"}], **more}
    return {"custom_id": f"r{number}", "params": params}


def ended(api: Anthropic, id: str) -> MessageBatch:
    until(lambda: api.messages.batches.retrieve(id).processing_status == "ended")
    return api.messages.batches.retrieve(id)


def test_every_request_has_its_result_in_order(api: Anthropic, gateway: ScriptedGateway) -> None:
    created = api.messages.batches.create(requests=[a_request(number) for number in range(50)])
    assert created.processing_status == "in_progress"
    assert created.request_counts.processing + created.request_counts.succeeded == 50
    assert created.results_url is None
    batch = ended(api, created.id)
    assert batch.ended_at is not None
    assert (batch.expires_at - batch.created_at).total_seconds() == 86_400
    assert (batch.request_counts.succeeded, batch.request_counts.processing) == (50, 0)
    results = list(api.messages.batches.results(batch.id))
    assert [one.custom_id for one in results] == [f"r{number}" for number in range(50)]
    for one in results:
        assert one.result.type == "succeeded"
        assert one.result.message.content[0].type == "text"
        assert one.result.message.content[0].text == "one two three"
    until(lambda: get(gateway.url, f"/v1/runs/{batch.id}")[2]["jobs"]["done"] == 50)


def test_errors_of_requests_are_results_of_their_own(api: Anthropic) -> None:
    requests = [a_request(1), a_request(2, model="unknown"), a_request(3, max_tokens=0)]
    batch = ended(api, api.messages.batches.create(requests=requests).id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 2)
    results = {one.custom_id: one.result for one in api.messages.batches.results(batch.id)}
    assert results["r1"].type == "succeeded"
    assert results["r2"].type == "errored"
    assert results["r2"].error.error.type == "not_found_error"
    assert results["r3"].type == "errored"
    assert results["r3"].error.error.type == "invalid_request_error"


def test_a_cancelled_batch_says_which_requests_were_cancelled(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, pause_s=0.05) as gateway, client(gateway) as api:
        batch = api.messages.batches.create(requests=[a_request(number) for number in range(500)])
        until(lambda: api.messages.batches.retrieve(batch.id).request_counts.succeeded > 3)
        with pytest.raises(anthropic.NotFoundError):
            get_results(api, batch.id)
        with pytest.raises(anthropic.ConflictError):
            api.messages.batches.delete(batch.id)
        assert api.messages.batches.cancel(batch.id).processing_status in ("canceling", "ended")
        done = ended(api, batch.id)
        assert done.cancel_initiated_at is not None
        counts = done.request_counts
        assert counts.succeeded + counts.canceled == 500
        assert counts.canceled > 0
        types = [one.result.type for one in api.messages.batches.results(batch.id)]
        assert (types.count("succeeded"), types.count("canceled")) == (counts.succeeded, counts.canceled)


def get_results(api: Anthropic, id: str) -> Any:
    return api.get(f"/v1/messages/batches/{id}/results", cast_to=str)


def test_an_ended_batch_can_be_deleted(api: Anthropic) -> None:
    batch = ended(api, api.messages.batches.create(requests=[a_request(1)]).id)
    assert api.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        api.messages.batches.retrieve(batch.id)
    with pytest.raises(anthropic.NotFoundError):
        get_results(api, batch.id)


def test_batches_are_listed_in_pages_in_both_directions(api: Anthropic) -> None:
    ids = [api.messages.batches.create(requests=[a_request(1)]).id for _ in range(5)]
    assert [one.id for one in api.messages.batches.list(limit=2)] == ids[::-1]
    page = api.messages.batches.list(before_id=ids[1], limit=2)
    assert [one.id for one in page.data] == [ids[3], ids[2]]
    assert page.has_more
    for id in ids:
        ended(api, id)


def test_a_batch_of_another_tenant_is_unknown(gateway: ScriptedGateway) -> None:
    with client(gateway, "acme") as mine, client(gateway, "other") as theirs:
        batch = ended(mine, mine.messages.batches.create(requests=[a_request(1)]).id)
        for ask in (theirs.messages.batches.retrieve, theirs.messages.batches.cancel, theirs.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                ask(batch.id)
        assert not theirs.messages.batches.list().data


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [a_request(1), a_request(1)],
        [{"custom_id": "", "params": {}}],
        [{"custom_id": "x" * 65, "params": {}}],
        [{"custom_id": "x", "params": []}],
        [a_request(1, stream=True)],
        [{"custom_id": "x"}],
    ],
)
def test_an_invalid_batch_is_refused_as_anthropic_does(api: Anthropic, requests: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        api.messages.batches.create(requests=requests)
    assert refused.value.body["type"] == "error"  # type: ignore[index]
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
