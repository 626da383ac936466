"""Options of chat completions in Messages and Responses, with the official clients: passed on, or refused by name."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam
from openai import OpenAI

from support.chat_script import answer, piece
from support.http_gateway import HttpGateway
from support.scripted_gateway import ScriptedGateway
from support.serving import Serving
from support.upstream import chunk

HELLO = "Classify this ticket: I was charged twice."
TURNS: list[MessageParam] = [{"role": "user", "content": HELLO}]
OPTIONS: dict[str, Any] = {"presence_penalty": 0.5, "bad_words": ["a"], "seed": 7, "top_k": 3, "min_p": 0.1}
LACKING: list[dict[str, Any]] = [{"presence_penalty": 0.5}, {"min_p": 0.5}, {"bad_words": ["a"]}, {"n": 2}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpGateway]:
    script = answer(chunk("Hello"), piece("stop"))
    with HttpGateway(tmp_path_factory.mktemp("options"), script) as serving:
        yield serving


def messages(gateway: Serving, key: str = "unused") -> Anthropic:
    return Anthropic(base_url=gateway.url, api_key=key, max_retries=0)


def responses(gateway: Serving, key: str = "unused") -> OpenAI:
    return OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


def test_options_reach_the_engine(gateway: HttpGateway) -> None:
    key = gateway.key("acme")
    with messages(gateway, key) as api:
        api.messages.create(model="m", max_tokens=3, messages=TURNS, extra_body=OPTIONS)
    with responses(gateway, key) as client:
        client.responses.create(model="m", input=HELLO, extra_body={**OPTIONS, "stop": ["END"]})
    first, second = gateway.upstream.bodies
    assert {name: first[name] for name in OPTIONS} == {name: second[name] for name in OPTIONS} == OPTIONS
    assert second["stop"] == ["END"]


@pytest.mark.parametrize("options", LACKING)
def test_a_response_refuses_by_name_what_its_engine_lacks(real: Serving, options: dict[str, Any]) -> None:
    (name,) = options
    with responses(real) as api, pytest.raises(openai.BadRequestError) as refused:
        api.responses.create(model="tiny", input=HELLO, extra_body=options)
    assert (refused.value.code, refused.value.param) == ("unsupported_feature", name)
    assert f"`{name}` is not supported" in refused.value.message


@pytest.mark.parametrize("options", LACKING)
def test_a_message_and_its_count_refuse_by_name_what_the_engine_lacks(real: Serving, options: dict[str, Any]) -> None:
    (name,) = options
    calls: list[Callable[[Anthropic], object]] = [
        lambda api: api.messages.create(model="tiny", max_tokens=3, messages=TURNS, extra_body=options),
        lambda api: api.messages.count_tokens(model="tiny", messages=TURNS, extra_body=options),
    ]
    for call in calls:
        with messages(real) as api, pytest.raises(anthropic.BadRequestError) as refused:
            call(api)
        error: Any = refused.value.body
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert f"`{name}` is not supported" in error["error"]["message"]


def test_a_count_refuses_values_out_of_range_like_a_call(real: Serving) -> None:
    with messages(real) as api, pytest.raises(anthropic.BadRequestError, match="`temperature` must be between"):
        api.messages.count_tokens(model="tiny", messages=TURNS, extra_body={"temperature": 3})


def test_log_probabilities_that_the_engine_lacks_are_refused_by_name(tmp_path: Path) -> None:
    with (
        ScriptedGateway(tmp_path) as gateway,
        responses(gateway) as api,
        pytest.raises(openai.BadRequestError, match=r"`include: message\.output_text\.logprobs` is not supported"),
    ):
        api.responses.create(model="m", input=HELLO, include=["message.output_text.logprobs"])
