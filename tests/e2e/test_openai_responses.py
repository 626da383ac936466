"""OpenAI's client with the Responses API, sync and async, against a scripted server and the real engine."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import FunctionToolParam, Response
from pydantic import BaseModel

from inferry.domain.workers import Capacity
from support.chat_script import WEATHER_CALLS, answer, piece
from support.http_gateway import HttpGateway
from support.scripted_gateway import ScriptedGateway
from support.serving import Serving
from support.upstream import Upstream, begin, chunk, role, well_behaved
from support.waiting import until

HELLO = "Classify this ticket: I was charged twice."
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "description": "Looks outside.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": None,
}


GREETING = answer(chunk("Hel"), chunk("lo"), chunk(" world"), piece("stop"), output=3)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpGateway]:
    with HttpGateway(tmp_path_factory.mktemp("responses")) as serving:
        yield serving


@pytest.fixture(scope="module")
def key(gateway: HttpGateway) -> str:
    return gateway.key("acme")


@pytest.fixture
def api(gateway: HttpGateway, key: str) -> Iterator[OpenAI]:
    gateway.upstream.script = GREETING
    gateway.upstream.bodies.clear()
    with OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
        yield client


def local(gateway: Serving, **more: Any) -> OpenAI:
    """A client of a gateway without keys."""
    return OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, **more)


def test_a_response(gateway: HttpGateway, api: OpenAI) -> None:
    response = api.responses.create(
        model="m", input=HELLO, instructions="Be brief.", max_output_tokens=99, metadata={"of": "tests"}
    )
    assert response.output_text == "Hello world"
    assert (response.status, response.model, response.object) == ("completed", "m", "response")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (12, 3, 15)
    assert (response.instructions, response.max_output_tokens, response.metadata) == ("Be brief.", 99, {"of": "tests"})
    assert response._request_id
    (body,) = gateway.upstream.bodies
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HELLO}]
    assert body["max_tokens"] == 99


def test_a_stream(api: OpenAI) -> None:
    with api.responses.stream(model="m", input=HELLO) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert response.output_text == "Hello world"
    assert [one.type for one in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [one.sequence_number for one in events] == list(range(len(events)))


def test_an_async_stream(gateway: HttpGateway, key: str) -> None:
    async def scenario() -> str:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as api:
            stream = await api.responses.create(model="m", input=HELLO, stream=True)
            return "".join([one.delta async for one in stream if one.type == "response.output_text.delta"])

    gateway.upstream.script = GREETING
    assert asyncio.run(scenario()) == "Hello world"


EXPECTED_CALLS = [
    ("reasoning", "I should look."),
    ("message", "Let me look."),
    ("function_call", ("call-a", "weather", {"city": "Bern"})),
    ("function_call", ("call-b", "weather", {"city": "Basel"})),
]


def summary(response: Response) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for item in response.output:
        match item.type:
            case "message":
                (part,) = item.content
                found.append(("message", part.text if part.type == "output_text" else part.refusal))
            case "reasoning":
                found.append(("reasoning", "".join(part.text for part in item.content or ())))
            case "function_call":
                found.append(("function_call", (item.call_id, item.name, json.loads(item.arguments))))
    return found


def test_tool_calls_and_reasoning(gateway: HttpGateway, api: OpenAI) -> None:
    gateway.upstream.script = WEATHER_CALLS
    response = api.responses.create(model="m", input=HELLO, tools=[WEATHER])
    assert summary(response) == EXPECTED_CALLS
    assert {item.status for item in response.output} == {"completed"}  # type: ignore[union-attr]
    with api.responses.stream(model="m", input=HELLO, tools=[WEATHER]) as stream:
        streamed = stream.get_final_response()
    assert summary(streamed) == EXPECTED_CALLS
    assert streamed.tools[0].name == "weather"  # type: ignore[union-attr]


def test_a_tool_loop(gateway: HttpGateway, api: OpenAI) -> None:
    gateway.upstream.script = WEATHER_CALLS
    items: list[Any] = [{"role": "user", "content": HELLO}]
    first = api.responses.create(model="m", input=items, tools=[WEATHER], store=False)
    items += first.output
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in first.output
        if item.type == "function_call"
    ]
    gateway.upstream.script = GREETING
    second = api.responses.create(model="m", input=items, tools=[WEATHER], store=False)
    assert second.output_text == "Hello world"
    sent = gateway.upstream.bodies[-1]["messages"]
    assert [one["role"] for one in sent] == ["user", "assistant", "tool", "tool"]
    assert (sent[1]["content"], sent[1]["reasoning_content"]) == ("Let me look.", "I should look.")
    assert [one["function"]["name"] for one in sent[1]["tool_calls"]] == ["weather", "weather"]
    assert [one["tool_call_id"] for one in sent[2:]] == ["call-a", "call-b"]


def test_structured_outputs_are_parsed(gateway: HttpGateway, api: OpenAI) -> None:
    class Ticket(BaseModel):
        topic: str
        is_urgent: bool

    gateway.upstream.script = answer(chunk('{"topic": "billing", '), chunk('"is_urgent": true}'), piece("stop"))
    response = api.responses.parse(model="m", input=HELLO, text_format=Ticket)
    assert response.output_parsed == Ticket(topic="billing", is_urgent=True)
    wanted = gateway.upstream.bodies[-1]["response_format"]
    assert (wanted["type"], wanted["json_schema"]["name"], wanted["json_schema"]["strict"]) == (
        "json_schema",
        "Ticket",
        True,
    )


def test_a_response_that_reaches_its_limit_is_incomplete(gateway: HttpGateway, api: OpenAI) -> None:
    gateway.upstream.script = well_behaved
    response = api.responses.create(model="m", input=HELLO, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    events = list(api.responses.create(model="m", input=HELLO, max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_the_embedded_engine(real: Serving) -> None:
    with local(real) as api:
        whole = api.responses.create(model="tiny", input=HELLO, max_output_tokens=12, temperature=0)
        *_, last = api.responses.create(model="tiny", input=HELLO, max_output_tokens=12, temperature=0, stream=True)
    assert last.type == "response.incomplete"
    assert whole.output_text == last.response.output_text
    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    assert whole.usage == last.response.usage


# -- errors ----------------------------------------------------------------------------------------------------------


def test_errors_become_the_clients_own_exceptions(gateway: HttpGateway, api: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        api.responses.create(model="nope", input=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="`tools\\[0\\]`: tools of the type `code_interpreter`"):
        api.responses.create(
            model="m", input=HELLO, tools=[{"type": "code_interpreter", "container": {"type": "auto"}}]
        )
    with (
        OpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.responses.create(model="m", input=HELLO)


def test_a_model_without_a_feature_refuses_it_by_name(real: Serving) -> None:
    image: Any = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    with local(real) as api, pytest.raises(openai.BadRequestError, match="image_url"):
        api.responses.create(model="tiny", input=[{"role": "user", "content": [image]}])


def test_a_refused_call_names_the_time_to_retry(tmp_path: Path) -> None:
    """Codex gives up after a 429 without it."""
    config = {"lanes": {"P1": {"queue_limit": 1}}}
    with ScriptedGateway(tmp_path, config, capacity=Capacity(sequences=1)) as gateway, local(gateway) as api:

        def ask(number: int) -> openai.RateLimitError | None:
            try:
                api.responses.create(model="m", input=f"{number}")
            except openai.RateLimitError as error:
                gateway.run(open_gate(gateway))
                return error
            return None

        gateway.run(close_gate(gateway))
        with ThreadPoolExecutor(3) as threads:
            running = threads.submit(ask, 0)
            until(lambda: gateway.worker.plans)
            refused = list(threads.map(ask, (1, 2)))  # one is queued
            assert running.result() is None
    (busy,) = [error for error in refused if error is not None]
    assert int(busy.response.headers["retry-after"]) >= 1
    assert busy.code == "queue_full"


async def close_gate(gateway: ScriptedGateway) -> None:
    gateway.worker.gate.clear()


async def open_gate(gateway: ScriptedGateway) -> None:
    gateway.worker.gate.set()


def test_an_error_after_the_first_byte_ends_the_stream_as_failed(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        gateway.worker.dies_after = 2
        with local(gateway) as api:
            events = list(api.responses.create(model="m", input=HELLO, stream=True))
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == "one two"
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"


def test_a_worker_that_answers_in_no_known_shape_is_an_error(gateway: HttpGateway, api: OpenAI) -> None:
    nameless = {"index": 0, "function": {"arguments": "{}"}}
    gateway.upstream.script = answer(chunk("a"), piece(tool_calls=[nameless]), piece("tool_calls"))
    with pytest.raises(openai.InternalServerError, match="tool call without a name"):
        api.responses.create(model="m", input=HELLO)


def test_a_client_that_leaves_cancels_its_call(gateway: HttpGateway, api: OpenAI) -> None:
    async def endless(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(role() + chunk("a"))
        await asyncio.Event().wait()
        return response

    async def until_gone() -> None:
        async with asyncio.timeout(120):
            await gateway.upstream.gone.wait()

    gateway.upstream.script = endless
    gateway.upstream.gone.clear()
    with api.responses.create(model="m", input=HELLO, stream=True) as stream:
        assert next(one.delta for one in stream if one.type == "response.output_text.delta") == "a"
    gateway.run(until_gone())


def test_a_waiting_stream_gets_events(tmp_path: Path) -> None:
    """Codex does not count comments as signs of life."""
    config = {"server": {"heartbeat_interval_s": 0.05}}
    with ScriptedGateway(tmp_path, config) as gateway, local(gateway) as api:
        gateway.run(close_gate(gateway))
        with api.responses.stream(model="m", input=HELLO) as stream:
            events = []
            for one in stream:
                events.append(one)
                if sum(event.type == "keepalive" for event in events) == 2:  # type: ignore[comparison-overlap]
                    gateway.run(open_gate(gateway))
            response = stream.get_final_response()
    assert [one.type for one in events[:2]] == ["response.created", "response.in_progress"]
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert response.output_text == "one two three"
