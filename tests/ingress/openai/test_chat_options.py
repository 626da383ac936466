"""Options of chat completions in Messages and Responses: passed on, or refused by the name that the client used."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from inferry.domain.errors import InvalidRequest, UnsupportedFeature
from inferry.ingress.anthropic.decode import MessagesEndpoint
from inferry.ingress.anthropic.format import MessagesFormat
from inferry.ingress.openai.features import features_of
from inferry.ingress.openai.request_schema import ChatCompletionRequest, ChatOptions
from inferry.ingress.responses.endpoint import ResponsesEndpoint
from inferry.ingress.responses.format import ResponsesErrors
from inferry.ingress.wire_format import ClientRequest

TRANSLATED = {"model", "stream", "stream_options", "max_tokens", "service_tier", "user", "prompt_cache_key"}
RESERVED = {"priority": 1, "vllm_xargs": {"a": 1}, "lora_path": "p", "kv_transfer_params": {}, "session_id": "s"}
PASSED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "seed": 7,
    "stop_token_ids": [1],
    "ignore_eos": True,
    "cache_salt": "s",
    "logit_bias": {"5": 1},
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "min_p": 0.1,
    "min_tokens": 2,
    "use_beam_search": True,
    "structured_outputs": {"choice": ["a"]},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= 'a'",
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "logits_processors": ["a"],
    "truncate_prompt_tokens": 3,
    "thinking_token_budget": 3,
    "chat_template": "t",
    "chat_template_kwargs": {"a": 1},
    "documents": [{"a": "b"}],
}
REFUSED: dict[str, Any] = {
    "n": 2,
    "logprobs": True,
    "prompt_logprobs": 0,
    "echo": True,
    "functions": [{"name": "f"}],
    "modalities": ["audio"],
    "audio": {"voice": "v"},
    "continue_final_message": True,
    "max_completion_tokens": 3,
    "response_format": {"type": "json_object"},
}
WITHOUT_EFFECT: dict[str, Any] = {
    "n": 1,
    "logprobs": False,
    "prompt_logprobs": None,
    "echo": False,
    "functions": [],
    "modalities": ["text"],
    "audio": None,
    "continue_final_message": False,
    "max_completion_tokens": None,
    "response_format": {"type": "text"},
}


def message(**fields: Any) -> ClientRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return MessagesEndpoint().decode(msgspec.json.encode(body))


def response(**fields: Any) -> ClientRequest:
    found = ResponsesEndpoint(lambda: 1.0).decode(msgspec.json.encode({"model": "m", "input": "Hi", **fields}))
    assert isinstance(found, ClientRequest)
    return found


Decode = Callable[..., ClientRequest]
both = pytest.mark.parametrize("decode", [message, response])


@both
@pytest.mark.parametrize("name", PASSED)
def test_an_option_reaches_the_engine_as_in_chat(decode: Decode, name: str) -> None:
    value = PASSED[name]
    request = decode(**{name: value})
    body = msgspec.json.decode(request.body)
    assert {one: body[one] for one in body if one not in ("model", "messages", "max_tokens")} == {name: value}
    chat = msgspec.json.decode(
        msgspec.json.encode({"model": "m", "messages": [], name: value}), type=ChatCompletionRequest
    )
    assert getattr(request.wire, name) == getattr(chat, name)
    assert features_of(request.wire) == features_of(chat)


@both
@pytest.mark.parametrize("name", REFUSED)
def test_an_option_without_a_place_in_the_answer_is_refused_by_its_name(decode: Decode, name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=f"`{name}` is not supported by this API") as refused:
        decode(**{name: REFUSED[name]})
    assert refused.value.param == name
    request = decode(**{name: WITHOUT_EFFECT[name]})
    assert name not in msgspec.json.decode(request.body)
    assert features_of(request.wire) == []


def test_every_option_of_chat_is_passed_on_refused_or_translated() -> None:
    known = {*PASSED, *REFUSED, *TRANSLATED, "stop", "top_logprobs"}
    reserved = set(ChatOptions.__struct_fields__) - known
    assert reserved >= set(RESERVED)
    for name in reserved:
        for decode in (message, response):
            with pytest.raises(InvalidRequest, match="set by the gateway"):
                decode(**{name: "x"})
    assert known <= set(ChatOptions.__struct_fields__)


def test_stop_strings_have_the_name_of_each_api() -> None:
    for stop in ("END", ["END", "STOP"]):
        request = response(stop=stop)
        assert msgspec.json.decode(request.body)["stop"] == stop
        assert request.wire.stop == stop
    with pytest.raises(
        UnsupportedFeature, match="`stop` is not supported by this API: use `stop_sequences`"
    ) as refused:
        message(stop="END")
    assert "use `stop_sequences`" in shown(MessagesFormat(), refused.value)["message"]
    assert "stop" not in msgspec.json.decode(message(stop=[]).body)


@pytest.mark.parametrize(
    ("decode", "fields", "own"),
    [
        (message, {"max_completion_tokens": 3}, "max_tokens"),
        (message, {"response_format": {"type": "json_object"}}, "output_config.format"),
        (response, {"max_completion_tokens": 3}, "max_output_tokens"),
        (response, {"max_tokens": 3}, "max_output_tokens"),
        (response, {"response_format": {"type": "json_object"}}, "text.format"),
        (response, {"logprobs": True}, "include: message.output_text.logprobs"),
    ],
)
def test_an_error_has_the_name_that_was_used_and_the_name_to_use(
    decode: Decode, fields: dict[str, Any], own: str
) -> None:
    (name,) = fields
    with pytest.raises(UnsupportedFeature) as refused:
        decode(**fields)
    format = MessagesFormat() if decode is message else ResponsesErrors()
    error = shown(format, refused.value)
    assert error["message"] == f"`{name}` is not supported by this API: use `{own}`"
    assert error.get("param", name) == name


def test_messages_have_no_place_for_likely_tokens() -> None:
    with pytest.raises(UnsupportedFeature, match="`top_logprobs` is not supported by this API"):
        message(top_logprobs=3)


def test_arguments_of_the_template_are_joined_with_the_switch_for_thinking() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    request = message(thinking=thinking, chat_template_kwargs={"thinking": False, "a": 1})
    given = msgspec.json.decode(b"{" + request.reasoning.removeprefix(b",") + b"}")
    assert given == {"chat_template_kwargs": {"enable_thinking": True, "thinking": False, "a": 1}}
    with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
        message(thinking=thinking, chat_template_kwargs=[1])


def shown(format: Any, error: UnsupportedFeature) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(format.error_body(error, "r"))["error"]
    return found
