"""The gateway before `transformers serve` and llama-cpp-python's server, through the official client.

llama-cpp-python's server runs with its defaults, under which a second call interrupts the first.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from support.engine_process import EngineProcess
from support.gateway_process import GatewayProcess
from support.other_engines import CONTEXT, LlamaCppServer, TransformersServer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

HELLO: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SERVERS: dict[str, type[TransformersServer] | type[LlamaCppServer]] = {
    "transformers": TransformersServer,
    "llamacpp": LlamaCppServer,
}


class Engine:
    def __init__(self, kind: str, server: EngineProcess, gateway: GatewayProcess, client: OpenAI) -> None:
        self.kind = kind
        self.server = server
        self.gateway = gateway
        self.client = client

    def chat(self, **more: Any) -> Any:
        asked: Any = {"model": "m", "messages": HELLO, "temperature": 0, "max_tokens": 12, **more}
        return self.client.chat.completions.create(**asked)


@pytest.fixture(scope="module", params=SERVERS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    scratch = tmp_path_factory.mktemp("engine")
    worker = {"kind": request.param, "name": "a", "models": ["m"], "isolation": "none", "context_tokens": CONTEXT}
    with SERVERS[request.param](scratch) as server:
        config = {"workers": [{**worker, "url": server.url}]}
        with (
            GatewayProcess(scratch / "gateway", config) as gateway,
            OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0, timeout=300) as client,
        ):
            yield Engine(request.param, server, gateway, client)


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_a_whole_answer_and_a_stream_say_the_same(engine: Engine) -> None:
    whole = engine.chat()
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens > 0
    assert 1 <= whole.usage.completion_tokens <= 12
    events = list(engine.chat(stream=True, stream_options={"include_usage": True}))
    pieces = [choice.delta.content or "" for event in events for choice in event.choices]
    assert "".join(pieces) == text_of(whole)
    assert events[-1].usage is not None
    direct = OpenAI(base_url=engine.server.url + "/v1", api_key="unused", timeout=300)
    with direct:
        own = direct.chat.completions.create(model="m", messages=HELLO, temperature=0, max_tokens=12)
    assert text_of(own) == text_of(whole)


def test_the_newer_name_of_the_output_limit_is_known(engine: Engine) -> None:
    asked: Any = {"model": "m", "messages": HELLO, "temperature": 0, "max_completion_tokens": 5}
    short = engine.client.chat.completions.create(**asked)
    assert short.choices[0].finish_reason == "length"
    assert text_of(engine.chat()).startswith(text_of(short))
    assert len(text_of(short)) < len(text_of(engine.chat()))


def test_calls_at_once_are_all_answered_in_full(engine: Engine) -> None:
    alone = text_of(engine.chat(max_tokens=60))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: engine.chat(max_tokens=60), range(4)))
    assert {text_of(answer) for answer in answers} == {alone}
    assert {answer.choices[0].finish_reason for answer in answers} == {"length"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", [TOOL]), ("n", 2), ("response_format", {"type": "json_object"}), ("ignore_eos", True), ("stop", ["e"])],
)
def test_what_the_engine_lacks_is_refused_by_name(engine: Engine, field: str, value: Any) -> None:
    if engine.kind == "llamacpp" and field == "stop":
        assert engine.chat(stop=value, max_tokens=100).choices[0].finish_reason == "stop"
        return
    with pytest.raises(BadRequestError) as caught:
        engine.chat(extra_body={field: value})
    assert caught.value.code == "unsupported_feature"
    assert f"`{field}`" in caught.value.message


def test_a_prompt_of_token_ids_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(BadRequestError) as caught:
        engine.client.completions.create(model="m", prompt=[5, 6, 7], max_tokens=3)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": " the end"}], ids=lambda fields: next(iter(fields)))
def test_echo_and_suffix_are_the_servers_own_or_refused_by_name(engine: Engine, fields: dict[str, Any]) -> None:
    asked: Any = {"model": "m", "prompt": "hello there", "temperature": 0, "max_tokens": 5, **fields}
    with pytest.raises(BadRequestError) as caught:
        engine.client.completions.create(**asked, stream=True)
    assert caught.value.param == next(iter(fields))
    if engine.kind == "transformers":
        with pytest.raises(BadRequestError) as caught:
            engine.client.completions.create(**asked)
        assert caught.value.param == next(iter(fields))
        return
    with OpenAI(base_url=engine.server.url + "/v1", api_key="unused", timeout=300) as direct:
        own = direct.completions.create(**asked).choices[0].text
    assert own.startswith("hello there") or own.endswith(" the end")
    assert engine.client.completions.create(**asked).choices[0].text == own


def test_contents_in_parts_and_developers_are_understood(engine: Engine) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}]}]
    assert text_of(engine.chat(messages=parts)) == text_of(engine.chat())
    rule = {"content": "Be kind."}
    by_role = [text_of(engine.chat(messages=[{"role": role, **rule}, *HELLO])) for role in ("system", "developer")]
    assert by_role[0] == by_role[1]


def test_a_prompt_that_is_too_long_is_the_clients_mistake(engine: Engine) -> None:
    """Of a size that the gateway's estimate allows where the engine has to count."""
    if engine.kind == "transformers":
        pytest.skip("it knows no end of its context")
    sizes = [CONTEXT // 4 * quarter for quarter in (4, 5, 6, 8)]
    for size in sizes:
        with pytest.raises(BadRequestError) as caught:
            engine.client.completions.create(model="m", prompt="8/" * size, max_tokens=1)
        assert caught.value.code == "context_length_exceeded"
    assert engine.gateway.metric_by_label("inferry_worker_up") == dict.fromkeys(
        engine.gateway.metric_by_label("inferry_worker_up"), 1
    )
    assert text_of(engine.chat())


def test_the_log_says_that_tenants_share_the_cache(engine: Engine) -> None:
    assert "tenants share its prefix cache" in engine.gateway.log_path.read_text()
