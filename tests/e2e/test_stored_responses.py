"""Stored and background responses with OpenAI's client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from openai import OpenAI
from openai.types.responses import Response

from support.chat_script import WEATHER_CALLS, answer, piece, tool_call
from support.http_gateway import HttpGateway
from support.scripted_gateway import ScriptedGateway
from support.serving import Serving, get, post
from support.upstream import Upstream, chunk
from support.waiting import until

HELLO = "Classify this ticket: I was charged twice."
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}
GREETING = answer(chunk("Hel"), chunk("lo"), piece("stop"))


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


def ended(api: OpenAI, id: str) -> Response:
    until(lambda: api.responses.retrieve(id).status not in ("queued", "in_progress"))
    return api.responses.retrieve(id)


async def close_gate(gateway: ScriptedGateway) -> None:
    gateway.worker.gate.clear()


async def open_gate(gateway: ScriptedGateway) -> None:
    gateway.worker.gate.set()


# -- stored responses ------------------------------------------------------------------------------------------------


def test_stored_responses_count_for_the_quota_of_their_tenant(tmp_path: Path) -> None:
    config = {"storage": {"max_bytes_per_tenant": 20_000}}
    with ScriptedGateway(tmp_path, config) as gateway, client(gateway) as api, client(gateway, "other") as other:
        created: list[Response] = []
        with pytest.raises(openai.APIStatusError, match="the tenant may store 20000 bytes") as refused:
            while len(created) < 100:
                created.append(api.responses.create(model="m", input=HELLO * 10))
        assert refused.value.status_code == 413
        assert len(created) > 2
        assert api.responses.create(model="m", input=HELLO, store=False).output_text
        assert other.responses.create(model="m", input=HELLO).output_text
        with pytest.raises(openai.APIStatusError, match="the tenant may store 20000 bytes"):
            api.responses.create(model="m", input=HELLO, background=True)
        for one in created[:3]:
            api.responses.delete(one.id)
        last = api.responses.create(model="m", input=HELLO)
        assert api.responses.retrieve(last.id) == last


def test_a_response_is_stored_until_it_is_deleted(api: OpenAI) -> None:
    created = api.responses.create(model="m", input=HELLO, metadata={"of": "tests"})
    assert created.to_dict()["store"] is True
    assert api.responses.retrieve(created.id) == created
    api.responses.delete(created.id)
    asks: list[Any] = [
        api.responses.retrieve,
        api.responses.delete,
        api.responses.input_items.list,
        api.responses.cancel,
    ]
    for ask in asks:
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{created.id}' not found"):
            ask(created.id)


def test_a_streamed_response_is_stored_as_it_ended(api: OpenAI, gateway: ScriptedGateway) -> None:
    with api.responses.stream(model="m", input=HELLO) as stream:
        streamed = stream.get_final_response()
    assert api.responses.retrieve(streamed.id).output_text == streamed.output_text == "one two three"
    gateway.worker.dies_after = 2
    *_, last = api.responses.create(model="m", input=HELLO, stream=True)
    assert last.type == "response.failed"
    assert api.responses.retrieve(last.response.id).status == "failed"


@pytest.mark.parametrize("config", [{}, {"storage": {"store": "never"}}])
def test_nothing_is_stored_where_it_is_not_wanted(tmp_path: Path, config: dict[str, Any]) -> None:
    with ScriptedGateway(tmp_path, config) as gateway, client(gateway) as api:
        created = api.responses.create(model="m", input=HELLO, store=None if config else False)
        assert created.to_dict()["store"] is False
        with pytest.raises(openai.PermissionDeniedError if config else openai.NotFoundError):
            api.responses.retrieve(created.id)
        if config:
            for more in ({"background": True}, {"previous_response_id": "resp_1"}):
                with pytest.raises(openai.PermissionDeniedError, match="stores no responses"):
                    api.responses.create(model="m", input=HELLO, extra_body=more)


def test_responses_expire(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, {"storage": {"response_ttl_s": 0.2}}) as gateway, client(gateway) as api:
        created = api.responses.create(model="m", input=HELLO)

        def is_gone() -> bool:
            try:
                api.responses.retrieve(created.id)
            except openai.NotFoundError:
                return True
            return False

        until(is_gone)


def test_input_items_are_listed_in_pages(api: OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": f"{number}"} for number in range(7)]
    items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "7"}]})
    created = api.responses.create(model="m", input=items)
    listed = list(api.responses.input_items.list(created.id, limit=3))
    assert texts(listed) == [f"{number}" for number in reversed(range(8))]
    ordered = list(api.responses.input_items.list(created.id, limit=2, order="asc", after=listed[-2].id))
    assert texts(ordered) == [f"{number}" for number in range(2, 8)]
    assert len({one.id for one in listed}) == 8
    with pytest.raises(openai.BadRequestError, match="after"):
        api.responses.input_items.list(created.id, after="msg_unknown")
    text = api.responses.create(model="m", input=HELLO)
    (only,) = api.responses.input_items.list(text.id)
    assert (only.type, texts([only])) == ("message", [HELLO])


def texts(items: list[Any]) -> list[str]:
    return [item.content[0].text for item in items]


# -- conversations ---------------------------------------------------------------------------------------------------


def test_a_response_follows_on_another(tmp_path: Path) -> None:
    with HttpGateway(tmp_path, WEATHER_CALLS, {"auth": {"mode": "off"}}) as gateway, client(gateway) as api:
        first = api.responses.create(model="m", input=HELLO, instructions="Be brief.", tools=[WEATHER])
        results: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
            for item in first.output
            if item.type == "function_call"
        ]
        gateway.upstream.script = GREETING
        second = api.responses.create(model="m", input=results, previous_response_id=first.id, tools=[WEATHER])
        third = api.responses.create(model="m", input="Thanks", previous_response_id=second.id, instructions="Now.")
        assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
        sent = gateway.upstream.bodies[-1]["messages"]
        assert [one["role"] for one in sent] == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
        assert [sent[0]["content"], sent[1]["content"], sent[-1]["content"]] == ["Now.", HELLO, "Thanks"]
        assert sent[2]["reasoning_content"] == "I should look."
        kinds = [item.type for item in api.responses.input_items.list(third.id, order="asc")]
        calls = ["function_call", "function_call", "function_call_output", "function_call_output"]
        assert kinds == ["message", "reasoning", "message", *calls, "message", "message"]
        api.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match=f"Previous response with id '{first.id}' not found"):
            api.responses.create(model="m", input="Hm", previous_response_id=third.id)


def test_a_response_whose_call_was_cut_off_can_be_followed(tmp_path: Path) -> None:
    cut_off = answer(*tool_call(0, "call-a", "weather", '{"city":'), piece("length"))
    with HttpGateway(tmp_path, cut_off, {"auth": {"mode": "off"}}) as gateway, client(gateway) as api:
        first = api.responses.create(model="m", input=HELLO, tools=[WEATHER])
        assert (first.status, first.output[-1].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
        gateway.upstream.script = GREETING
        api.responses.create(model="m", input="Again.", previous_response_id=first.id, tools=[WEATHER])
        sent = gateway.upstream.bodies[-1]["messages"]
        assert [one["role"] for one in sent] == ["user"]
        assert [part["text"] for part in sent[0]["content"]] == [HELLO, "Again."]


def test_items_are_referred_to_by_their_ids(tmp_path: Path) -> None:
    with HttpGateway(tmp_path, WEATHER_CALLS, {"auth": {"mode": "off"}}) as gateway, client(gateway) as api:
        first = api.responses.create(model="m", input=HELLO, tools=[WEATHER])
        references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output[:3]]
        result: Any = {"type": "function_call_output", "call_id": "call-a", "output": "rain"}
        gateway.upstream.script = GREETING
        second = api.responses.create(model="m", input=[{"role": "user", "content": HELLO}, *references, result])
        sent = gateway.upstream.bodies[-1]["messages"]
        assert [one["role"] for one in sent] == ["user", "assistant", "tool"]
        assert sent[1]["tool_calls"][0]["id"] == "call-a"
        kinds = [item.type for item in api.responses.input_items.list(second.id, order="asc")]
        assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]
        for unknown in ("msg_unknown", f"{first.output[0].id}9"):
            with pytest.raises(openai.NotFoundError, match="Item with id"):
                api.responses.create(model="m", input=[{"type": "item_reference", "id": unknown}])


def test_tenants_do_not_see_each_others_responses(gateway: ScriptedGateway) -> None:
    with client(gateway, "acme") as mine, client(gateway, "other") as theirs:
        created = mine.responses.create(model="m", input=HELLO)
        running = mine.responses.create(model="m", input=HELLO, background=True)
        for id in (created.id, running.id):
            for ask in (
                theirs.responses.retrieve,
                theirs.responses.delete,
                theirs.responses.cancel,
                theirs.responses.input_items.list,
            ):
                with pytest.raises(openai.NotFoundError):
                    ask(id)
            with pytest.raises(openai.NotFoundError):
                theirs.responses.create(model="m", input="x", previous_response_id=id)
        reference: Any = {"type": "item_reference", "id": created.output[0].id}
        with pytest.raises(openai.NotFoundError):
            theirs.responses.create(model="m", input=[reference])
        assert mine.responses.retrieve(created.id).output_text == "one two three"
        assert ended(mine, running.id).status == "completed"


# -- background ------------------------------------------------------------------------------------------------------


def test_a_background_response_is_polled(api: OpenAI, gateway: ScriptedGateway) -> None:
    gateway.run(close_gate(gateway))
    created = api.responses.create(
        model="m", input=HELLO, background=True, extra_headers={"x-inferry-lane": "P2", "x-inferry-run-id": "night"}
    )
    assert (created.status, created.background, created.output) == ("queued", True, [])
    assert created.service_tier == "flex"
    assert api.responses.retrieve(created.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        api.responses.create(model="m", input="Thanks", previous_response_id=created.id)
    gateway.run(open_gate(gateway))
    response = ended(api, created.id)
    assert (response.status, response.output_text) == ("completed", "one two three")
    assert (response.id, response.created_at) == (created.id, created.created_at)
    assert response.usage is not None
    ((job,),) = [plan.jobs for plan in gateway.worker.plans]
    assert (job.lane.name, job.run_id) == ("P2", "night")
    follow_up = api.responses.create(model="m", input="Thanks", previous_response_id=created.id)
    assert follow_up.status == "completed"


def test_a_background_response_can_be_streamed_and_resumed(api: OpenAI, gateway: ScriptedGateway) -> None:
    gateway.run(close_gate(gateway))
    stream = api.responses.create(model="m", input=HELLO, background=True, stream=True)
    gateway.run(open_gate(gateway))
    events = list(stream)
    kinds = [one.type for one in events[:3]]
    assert kinds == ["response.created", "response.queued", "response.in_progress"]
    id = events[0].response.id  # type: ignore[union-attr]
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    until(lambda: api.responses.retrieve(id).status == "completed")
    again = list(api.responses.retrieve(id, stream=True, starting_after=3))
    assert again == events[4:]
    plain = api.responses.create(model="m", input=HELLO)
    with pytest.raises(openai.BadRequestError, match="background"):
        api.responses.retrieve(plain.id, stream=True)


def test_a_client_that_leaves_does_not_end_a_background_response(api: OpenAI, gateway: ScriptedGateway) -> None:
    gateway.run(close_gate(gateway))
    with api.responses.create(model="m", input=HELLO, background=True, stream=True) as stream:
        id = stream.response.headers["x-request-id"]
    gateway.run(open_gate(gateway))
    assert ended(api, id).output_text == "one two three"


def test_cancelling_frees_the_engine(api: OpenAI, gateway: ScriptedGateway) -> None:
    gateway.run(close_gate(gateway))
    created = api.responses.create(model="m", input=HELLO, background=True)
    until(lambda: gateway.worker.running == 1)
    assert api.responses.cancel(created.id).status == "cancelled"
    until(lambda: gateway.worker.running == 0)
    assert api.responses.retrieve(created.id).status == "cancelled"
    assert api.responses.cancel(created.id).status == "cancelled"
    gateway.run(open_gate(gateway))
    done = api.responses.create(model="m", input=HELLO, background=True)
    assert ended(api, done.id).status == "completed"
    assert api.responses.cancel(done.id).status == "completed"
    plain = api.responses.create(model="m", input=HELLO)
    with pytest.raises(openai.BadRequestError, match="background"):
        api.responses.cancel(plain.id)


def test_a_cancelled_stream_has_a_last_event_and_can_be_read_again(api: OpenAI, gateway: ScriptedGateway) -> None:
    gateway.run(close_gate(gateway))
    stream = api.responses.create(model="m", input=HELLO, background=True, stream=True)
    first = next(stream)
    assert first.type == "response.created"
    id = first.response.id
    until(lambda: gateway.worker.running == 1)
    assert api.responses.cancel(id).status == "cancelled"
    events = [first, *stream]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert (last.response.id, last.response.status) == (id, "cancelled")
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert list(api.responses.retrieve(id, stream=True)) == events
    assert api.responses.cancel(id).status == "cancelled"
    assert list(api.responses.retrieve(id, stream=True)) == events


def test_deleting_ends_a_background_response(api: OpenAI, gateway: ScriptedGateway) -> None:
    gateway.run(close_gate(gateway))
    created = api.responses.create(model="m", input=HELLO, background=True)
    until(lambda: gateway.worker.running == 1)
    api.responses.delete(created.id)
    until(lambda: gateway.worker.running == 0)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(created.id)


def test_what_cannot_be_executed_is_refused_at_once(api: OpenAI, gateway: ScriptedGateway) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        api.responses.create(model="nope", input=HELLO, background=True)
    with pytest.raises(openai.BadRequestError, match="`tools` is not supported"):
        api.responses.create(model="m", input=HELLO, background=True, tools=[WEATHER])
    with pytest.raises(openai.BadRequestError, match="store"):
        api.responses.create(model="m", input=HELLO, background=True, store=False)
    status, _, error = post(
        gateway.url, "/v1/responses", {"model": "m", "input": "x", "background": True}, {"x-inferry-lane": "P9"}
    )
    assert (status, error["error"]["code"]) == (400, "unknown_lane")


def test_a_failed_background_response_has_its_reason(tmp_path: Path) -> None:
    async def refuse(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such grammar"}}, status=400)

    with HttpGateway(tmp_path, refuse, {"auth": {"mode": "off"}}) as gateway, client(gateway) as api:
        response = ended(api, api.responses.create(model="m", input=HELLO, background=True).id)
        *_, last = api.responses.create(model="m", input=HELLO, background=True, stream=True)
    assert response.status == "failed"
    assert response.error is not None
    assert response.error.code == "invalid_prompt"
    assert "no such grammar" in response.error.message
    assert last.type == "response.failed"
    assert last.response.error == response.error


def test_background_responses_survive_a_restart(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, {"server": {"drain_timeout_s": 0.1}}) as gateway, client(gateway) as api:
        gateway.run(close_gate(gateway))
        plain = api.responses.create(model="m", input=HELLO, background=True).id
        api.responses.create(model="m", input=HELLO, background=True, stream=True).close()
        until(lambda: gateway.worker.running == 2)
        streamed = next(one for one in running_ids(gateway) if one != plain)
    with ScriptedGateway(tmp_path) as gateway, client(gateway) as api:
        response = ended(api, plain)
        assert (response.status, response.output_text) == ("completed", "one two three")
        lost = ended(api, streamed)
        assert lost.status == "failed"
        assert lost.error is not None
        assert "the gateway" in lost.error.message
        until(lambda: gateway.run(unfinished(gateway)) == 0)


def running_ids(gateway: ScriptedGateway) -> list[str]:
    return [id for _, id in gateway.service.storage.background._tasks]


async def unfinished(gateway: ScriptedGateway) -> int:
    return len(await gateway.service.storage.documents.of_kind("background"))


# -- paths -----------------------------------------------------------------------------------------------------------


def test_other_paths_and_methods(gateway: ScriptedGateway) -> None:
    assert get(gateway.url, "/v1/responses")[0] == 405
    assert get(gateway.url, "/v1/responses/resp_1/cancel")[0] == 405
    assert post(gateway.url, "/v1/responses/resp_1/input_items", {})[0] == 405
    assert post(gateway.url, "/v1/responses/resp_1", {})[0] == 405
    assert get(gateway.url, "/v1/responses/resp_1/nothing")[0] == 404
    for query, param in (("stream=false&starting_after=x", "starting_after"), ("stream=maybe", "stream")):
        status, _, error = get(gateway.url, f"/v1/responses/resp_1?{query}")
        assert (status, error["error"]["param"]) == (400, param)
    assert get(gateway.url, "/v1/responses/resp_1?surprise=1")[0] == 400
