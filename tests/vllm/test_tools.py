"""Tools and structured outputs with a real engine behind the gateway, through the official client.

The model is tiny and knows nothing, so every answer is forced: a grammar leaves it no choice but to be valid.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from support.gateway_process import GatewayProcess
from support.vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HELLO: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
CITIES = ["Oslo", "Bergen"]
SPACES = "\u0120\u010a\u0109\u010d"
"""How byte-level tokenizers spell space, newline, tab and return."""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}, "tomorrow": {"type": "boolean"}},
    "required": ["city", "tomorrow"],
    "additionalProperties": False,
}
# Without `strict` vLLM promises JSON, and not that it is what the schema says.
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def api(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    scratch = tmp_path_factory.mktemp("tools")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with VllmServer(model, scratch / "vllm.log", *tools) as server:
        workers = [{"kind": "vllm", "name": "a", "url": server.url}]
        with (
            GatewayProcess(scratch / "gateway", {"workers": workers}) as gateway,
            OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0, timeout=120) as client,
        ):
            yield client


@pytest.fixture(scope="module")
def compact(model: Path) -> dict[str, int]:
    """Biases against spaces: JSON allows them anywhere, and a model that knows nothing would go on writing them."""
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    return {str(token): -100 for name, token in vocabulary.items() if set(name) <= set(SPACES)}


def is_weather(text: str | None) -> bool:
    assert text is not None
    found = json.loads(text)
    return found["city"] in CITIES and isinstance(found["tomorrow"], bool) and len(found) == 2


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_forced_tool_is_called_with_valid_arguments(api: OpenAI, compact: dict[str, int], choice: Any) -> None:
    asked: Any = {"model": "m", "messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 400}
    asked |= {"logit_bias": compact, "parallel_tool_calls": False}  # it would not know when to stop calling, either
    whole = api.chat.completions.create(**asked).choices[0].message
    with api.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (whole, streamed):
        assert message.tool_calls
        for call in message.tool_calls:
            assert call.type == "function"
            assert call.function.name == "weather"
            assert is_weather(call.function.arguments)
            assert call.id


def test_an_offered_tool_need_not_be_called(api: OpenAI) -> None:
    answer = api.chat.completions.create(model="m", messages=HELLO, tools=[WEATHER], tool_choice="auto", max_tokens=5)
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 5


def test_structured_outputs_match_the_schema(api: OpenAI, compact: dict[str, int]) -> None:
    asked: Any = {"model": "m", "messages": HELLO, "response_format": FORMAT, "max_tokens": 200}
    asked["logit_bias"] = compact
    assert is_weather(api.chat.completions.create(**asked).choices[0].message.content)
    pieces = [one.choices[0].delta.content or "" for one in api.chat.completions.create(**asked, stream=True)]
    assert is_weather("".join(pieces))


def test_choices_log_probabilities_and_penalties_come_from_the_engine(api: OpenAI) -> None:
    answer = api.chat.completions.create(
        model="m",
        messages=HELLO,
        n=2,
        seed=3,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"5": -100},
        max_completion_tokens=6,
    )
    assert [one.index for one in answer.choices] == [0, 1]
    for one in answer.choices:
        assert one.logprobs is not None
        assert one.logprobs.content is not None
        assert 1 <= len(one.logprobs.content) <= 6
        assert all(len(token.top_logprobs) == 2 for token in one.logprobs.content)
