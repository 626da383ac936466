"""Anthropic's client works unchanged, sync and async, against a scripted server and the real engine."""

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import pytest
from aiohttp import web
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import MessageParam, ToolParam

from inferry.domain.workers import Capacity
from support.chat_script import WEATHER_CALLS, answer, piece
from support.http_gateway import HttpGateway
from support.scripted_gateway import ScriptedGateway
from support.serving import Serving
from support.upstream import Upstream, begin, chunk, role, well_behaved
from support.waiting import until

HELLO: list[MessageParam] = [{"role": "user", "content": "Classify this ticket: I was charged twice."}]
GREEDY = {"temperature": 0}
WEATHER: ToolParam = {
    "name": "weather",
    "description": "Looks outside.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpGateway]:
    with HttpGateway(tmp_path_factory.mktemp("anthropic")) as serving:
        yield serving


@pytest.fixture(scope="module")
def key(gateway: HttpGateway) -> str:
    return gateway.key("acme")


@pytest.fixture
def api(gateway: HttpGateway, key: str) -> Iterator[Anthropic]:
    gateway.upstream.script = well_behaved
    gateway.upstream.bodies.clear()
    with Anthropic(base_url=gateway.url, api_key=key, max_retries=0) as client:
        yield client


def local(gateway: Serving, **more: Any) -> Anthropic:
    """A client of a gateway without keys."""
    return Anthropic(base_url=gateway.url, api_key="unused", max_retries=0, **more)


def test_a_message(api: Anthropic) -> None:
    message = api.messages.create(model="m", max_tokens=3, messages=HELLO, system="Be brief.")
    (block,) = message.content
    assert (block.type, block.text) == ("text", "Hello world")  # type: ignore[union-attr]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "m", "max_tokens")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (12, 3)
    assert message._request_id


def test_the_worker_gets_a_chat_request(gateway: HttpGateway, api: Anthropic) -> None:
    api.messages.create(model="m", max_tokens=3, messages=HELLO, system="Be brief.", stop_sequences=["END"])
    (body,) = gateway.upstream.bodies
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert (body["max_tokens"], body["stop"]) == (3, ["END"])


def test_a_stream(api: Anthropic) -> None:
    with api.messages.stream(model="m", max_tokens=3, messages=HELLO) as stream:
        events = list(stream)
        text, message = stream.get_final_text(), stream.get_final_message()
    assert text == "Hello world"
    assert [one.type for one in events if one.type != "text"] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


def test_an_async_stream(gateway: HttpGateway, key: str) -> None:
    async def scenario() -> str:
        async with AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0) as api:
            stream = await api.messages.create(model="m", max_tokens=3, messages=HELLO, stream=True)
            return "".join(
                [one.delta.text async for one in stream if one.type == "content_block_delta"]  # type: ignore[union-attr]
            )

    gateway.upstream.script = well_behaved
    assert asyncio.run(scenario()) == "Hello world"


EXPECTED_CALLS = [
    ("thinking", "I should look."),
    ("text", "Let me look."),
    ("tool_use", ("call-a", "weather", {"city": "Bern"})),
    ("tool_use", ("call-b", "weather", {"city": "Basel"})),
]


def summary(message: anthropic.types.Message) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for block in message.content:
        match block.type:
            case "text":
                found.append(("text", block.text))
            case "thinking":
                assert block.signature
                found.append(("thinking", block.thinking))
            case "tool_use":
                found.append(("tool_use", (block.id, block.name, block.input)))
    return found


def test_tool_calls_and_thinking(gateway: HttpGateway, api: Anthropic) -> None:
    gateway.upstream.script = WEATHER_CALLS
    message = api.messages.create(model="m", max_tokens=99, messages=HELLO, tools=[WEATHER])
    assert message.stop_reason == "tool_use"
    assert summary(message) == EXPECTED_CALLS
    with api.messages.stream(model="m", max_tokens=99, messages=HELLO, tools=[WEATHER]) as stream:
        streamed = stream.get_final_message()
    assert summary(streamed) == EXPECTED_CALLS
    assert streamed.stop_reason == "tool_use"


def test_a_tool_loop(gateway: HttpGateway, api: Anthropic) -> None:
    gateway.upstream.script = WEATHER_CALLS
    turns = list(HELLO)
    first = api.messages.create(model="m", max_tokens=99, messages=turns, tools=[WEATHER])
    turns.append({"role": "assistant", "content": first.content})
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
        for block in first.content
        if block.type == "tool_use"
    ]
    turns.append({"role": "user", "content": results})
    gateway.upstream.script = well_behaved
    second = api.messages.create(model="m", max_tokens=3, messages=turns, tools=[WEATHER])
    assert summary(second) == [("text", "Hello world")]
    sent = gateway.upstream.bodies[-1]["messages"]
    assert [one["role"] for one in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["reasoning_content"] == "I should look."
    assert [one["function"]["name"] for one in sent[1]["tool_calls"]] == ["weather", "weather"]
    assert [one["tool_call_id"] for one in sent[2:]] == ["call-a", "call-b"]


def test_the_matched_stop_sequence_is_reported(gateway: HttpGateway, api: Anthropic) -> None:
    gateway.upstream.script = answer(chunk("a"), piece("stop", stop="END"))
    message = api.messages.create(model="m", max_tokens=9, messages=HELLO, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


def test_the_embedded_engine(real: Serving) -> None:
    with local(real) as api:
        whole = api.messages.create(model="tiny", max_tokens=12, messages=HELLO, extra_body=GREEDY)
        with api.messages.stream(model="tiny", max_tokens=12, messages=HELLO, extra_body=GREEDY) as stream:
            streamed = stream.get_final_message()
    assert summary(whole) == summary(streamed)
    assert summary(whole)[0][1]
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 12
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"


def test_the_embedded_engine_reports_its_stop_sequence(real: Serving) -> None:
    with local(real) as api:
        free = summary(api.messages.create(model="tiny", max_tokens=40, messages=HELLO, extra_body=GREEDY))[0][1]
        stop = free[10:14]
        options: dict[str, Any] = {"max_tokens": 40, "stop_sequences": ["unheard of", stop], "extra_body": GREEDY}
        whole = api.messages.create(model="tiny", messages=HELLO, **options)
        with api.messages.stream(model="tiny", messages=HELLO, **options) as stream:
            streamed = stream.get_final_message()
    assert summary(whole) == summary(streamed) == [("text", free[: free.index(stop)])]
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_images_are_passed_on_where_the_engine_takes_them(gateway: HttpGateway, api: Anthropic) -> None:
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    api.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": [image]}])
    (sent,) = gateway.upstream.bodies[-1]["messages"]
    assert sent["content"] == [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


# -- token counts and models -----------------------------------------------------------------------------------------


def test_tokens_are_counted_with_the_models_tokenizer(real: Serving) -> None:
    with local(real) as api:
        for words in ("Hi", "word " * 3000):
            turns: list[MessageParam] = [{"role": "user", "content": words}]
            raw = api.messages.with_raw_response.count_tokens(model="tiny", messages=turns, system="Be brief.")
            called = api.messages.create(model="tiny", max_tokens=1, messages=turns, system="Be brief.")
            usage = called.usage
            assert raw.headers["x-inferry-token-count"] == "exact"
            assert raw.parse().input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_tokens_are_counted_by_a_worker_that_can(gateway: HttpGateway, api: Anthropic) -> None:
    asked: list[dict[str, Any]] = []

    def count(body: dict[str, Any]) -> int:
        asked.append(body)
        return 77

    gateway.upstream.tokenize = count
    try:
        raw = api.messages.with_raw_response.count_tokens(model="m", messages=HELLO, tools=[WEATHER])
    finally:
        gateway.upstream.tokenize = None
    assert (raw.parse().input_tokens, raw.headers["x-inferry-token-count"]) == (77, "exact")
    assert (asked[0]["model"], asked[0]["messages"]) == ("m", HELLO)
    assert asked[0]["tools"][0]["function"]["name"] == "weather"
    assert not gateway.upstream.bodies, "nothing was generated"


def test_tokens_are_estimated_where_nothing_counts(gateway: HttpGateway, api: Anthropic) -> None:
    raw = api.messages.with_raw_response.count_tokens(model="m", messages=HELLO)
    assert raw.headers["x-inferry-token-count"] == "estimated"
    assert raw.headers["request-id"]
    assert 1 < raw.parse().input_tokens < 200


def test_a_count_is_refused_like_a_call(api: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nope"):
        api.messages.count_tokens(model="nope", messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="must not be empty"):
        api.messages.count_tokens(model="m", messages=[])


def test_models_are_listed(gateway: HttpGateway, api: Anthropic, key: str) -> None:
    assert [model.id for model in api.models.list(limit=1000)] == ["m"]
    found = api.models.retrieve("m")
    assert (found.display_name, found.created_at.timestamp(), found.max_input_tokens) == ("m", 7, 4096)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        api.models.retrieve("nope")
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    plain = gateway.call("GET", "/v1/models", headers={"x-api-key": key})
    assert plain.json["object"] == "list"
    for query in ("limit=0", "limit=x", "limit=1001", "after_id=nope", "before_id=nope"):
        wrong = gateway.call(
            "GET", f"/v1/models?{query}", headers={"x-api-key": key, "anthropic-version": "2023-06-01"}
        )
        assert (wrong.status, wrong.json["type"]) == (400, "error"), query


def test_many_models_are_listed_in_pages(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(5)]
    with ScriptedGateway(tmp_path, models=names) as gateway, local(gateway) as api:
        assert [model.id for model in api.models.list(limit=2)] == names
        page = api.models.list(limit=2, after_id="m1")
        assert ([one.id for one in page.data], page.has_more, page.first_id, page.last_id) == (
            ["m2", "m3"],
            True,
            "m2",
            "m3",
        )
        assert [one.id for one in api.models.list(limit=2, before_id="m3").data] == ["m1", "m2"]


# -- errors ----------------------------------------------------------------------------------------------------------


def test_errors_become_the_clients_own_exceptions(gateway: HttpGateway, api: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        api.messages.create(model="nope", max_tokens=3, messages=HELLO)
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert unknown.value.request_id == unknown.value.body["request_id"]  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
        document: Any = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
        api.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": [document]}])
    with (
        Anthropic(base_url=gateway.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model="m", max_tokens=3, messages=HELLO)


def test_a_model_without_a_feature_refuses_it_by_name(real: Serving) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image: Any = {"type": "image", "source": source}
    with local(real) as api, pytest.raises(anthropic.BadRequestError, match="image"):
        api.messages.create(model="tiny", max_tokens=3, messages=[{"role": "user", "content": [image]}])


def test_a_long_prompt_is_refused_as_clients_expect_it(real: Serving) -> None:
    with local(real) as api:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
            api.messages.create(model="tiny", max_tokens=3, messages=[{"role": "user", "content": "word " * 50_000}])
        with pytest.raises(anthropic.BadRequestError, match=r"exceed context limit: \d+ \+ 100000 > \d+"):
            api.messages.create(model="tiny", max_tokens=100_000, messages=HELLO, timeout=60)


def test_overload_is_529_with_a_time_to_retry(tmp_path: Path) -> None:
    config = {"lanes": {"P1": {"queue_limit": 1}}}
    with ScriptedGateway(tmp_path, config, capacity=Capacity(sequences=1)) as gateway, local(gateway) as api:

        def ask(number: int) -> anthropic.APIStatusError | None:
            try:
                api.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": f"{number}"}])
            except anthropic.APIStatusError as error:
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
    assert busy.status_code == 529
    assert int(busy.response.headers["retry-after"]) >= 1
    assert busy.response.headers["x-inferry-drop-reason"] == "queue_full"
    assert busy.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


async def close_gate(gateway: ScriptedGateway) -> None:
    gateway.worker.gate.clear()


async def open_gate(gateway: ScriptedGateway) -> None:
    gateway.worker.gate.set()


def test_an_error_after_the_first_byte_is_raised_and_not_swallowed(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        gateway.worker.dies_after = 2
        with local(gateway) as api:
            heard: list[str] = []
            with (
                pytest.raises(anthropic.APIStatusError) as broken,
                api.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream,
            ):
                heard.extend(stream.text_stream)
    assert "".join(heard) == "one two"
    assert broken.value.body["error"]["type"] == "api_error"  # type: ignore[index]


def test_a_worker_that_answers_in_no_known_shape_is_an_error(gateway: HttpGateway, api: Anthropic) -> None:
    nameless = {"index": 0, "function": {"arguments": "{}"}}
    gateway.upstream.script = answer(chunk("a"), piece(tool_calls=[nameless]), piece("tool_calls"))
    with (
        pytest.raises(anthropic.APIStatusError, match="tool call without a name"),
        api.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream,
    ):
        list(stream)


def test_a_client_that_leaves_cancels_its_call(gateway: HttpGateway, api: Anthropic) -> None:
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
    with api.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
        assert next(iter(stream.text_stream)) == "a"
    gateway.run(until_gone())


def test_a_waiting_stream_gets_pings(tmp_path: Path) -> None:
    config = {"server": {"heartbeat_interval_s": 0.05}}
    with ScriptedGateway(tmp_path, config) as gateway:
        gateway.run(close_gate(gateway))
        request = b'{"model":"m","max_tokens":3,"stream":true,"messages":[{"role":"user","content":"hi"}]}'
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as sock:
            head = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(request)
            sock.sendall(head + request)
            got = b""
            while got.count(b'event: ping\ndata: {"type":"ping"}\n\n') < 2:
                got += sock.recv(65536)
        gateway.run(open_gate(gateway))
