"""What reaches the large model of a cascade, and verifiers: tools, streams, answers that are refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.tenant_gateway import CHAT, Answer
from support.two_models import TwoModelGateway, chat, streamed_text
from support.waiting import until

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
ACCEPT = {"min_mean_logprob": -0.5}
PAIR: dict[str, Any] = {"small": "small", "large": "large", "shadow": 0}
CONFIG: dict[str, Any] = {
    "cascades": {
        "pair": {**PAIR, "accept": ACCEPT},
        "asked": {**PAIR, "accept": {**ACCEPT, "verifier": {"model": "large", "prompt": "Is it right?"}}},
        "called": {**PAIR, "accept": {"verifier": {"function": "support.verifiers:is_long"}}},
        "awaited": {**PAIR, "accept": {"verifier": {"function": "support.verifiers:is_long_later"}}},
        "broken": {**PAIR, "accept": {"verifier": {"function": "support.verifiers:fails"}}},
        "endless": {**PAIR, "accept": {"verifier": {"function": "support.verifiers:never_ends", "timeout_ms": 1}}},
    },
    "ensembles": {
        "scored": {
            "models": ["small", "large"],
            "choose": "verifier",
            "verifier": {"function": "support.verifiers:length"},
        }
    },
}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[TwoModelGateway]:
    with TwoModelGateway(tmp_path, CONFIG) as found:
        yield found


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    text: str = answer.json["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("stream", [False, True])
def test_the_large_model_gets_the_clients_own_request(gateway: TwoModelGateway, stream: bool) -> None:
    gateway.logprob = -2.0
    more: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto", "temperature": 0.25, "stop": ["END"]}
    answer = gateway.call("POST", CHAT, chat("pair", stream=stream, **more))
    assert answer.headers["x-inferry-path"] == "small>large"
    assert (streamed_text(answer.body) if stream else text_of(answer)) == "Large"
    small, large = gateway.upstream.bodies
    assert (small["model"], large["model"]) == ("small", "large")
    assert {name: large[name] for name in more} == more
    assert not large.get("logprobs"), "only the small model is asked for them"
    assert large["messages"] == chat("pair")["messages"]


def test_the_large_model_answers_with_a_tool_call(gateway: TwoModelGateway) -> None:
    gateway.logprob = -2.0
    gateway.tool_calls["large"] = [
        {"index": 0, "id": "call-1", "type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}
    ]
    whole = gateway.call("POST", CHAT, chat("pair", tools=TOOLS))
    (choice,) = whole.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"x": 1}'}
    message = gateway.call("POST", "/v1/messages", chat("pair", tools=[{"name": "find", "input_schema": {}}]))
    assert [block["type"] for block in message.json["content"]][-1] == "tool_use"
    assert message.json["content"][-1]["input"] == {"x": 1}
    streamed = gateway.call("POST", CHAT, chat("pair", tools=TOOLS, stream=True))
    lines = [json.loads(line[6:]) for line in streamed.body.decode().splitlines() if line.startswith("data: {")]
    calls = [call for line in lines for one in line["choices"] for call in one["delta"].get("tool_calls") or ()]
    assert "".join(call["function"].get("arguments") or "" for call in calls) == '{"x": 1}'


def test_a_sure_tool_call_of_the_small_model_is_used(gateway: TwoModelGateway) -> None:
    gateway.tool_calls["small"] = [
        {"index": 0, "id": "call-1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    ]
    answer = gateway.call("POST", CHAT, chat("pair", tools=TOOLS))
    assert answer.headers["x-inferry-path"] == "small"
    assert answer.json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "find"


def test_the_answer_of_the_large_model_is_streamed_as_it_is_generated(gateway: TwoModelGateway) -> None:
    gateway.logprob = -2.0
    answer = gateway.call("POST", CHAT, chat("pair", stream=True, stream_options={"include_usage": True}))
    lines = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    pieces = [one["delta"].get("content") for line in lines for one in line["choices"]]
    assert [piece for piece in pieces if piece] == ["Lar", "ge"], "in the pieces of the engine"
    assert lines[-1]["usage"]["prompt_tokens"] == 10
    assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("said", "path"), [("Yes.", "small"), ("no", "small>large")])
def test_a_verifying_model_is_asked_about_a_sure_answer(gateway: TwoModelGateway, said: str, path: str) -> None:
    gateway.answers["large"] = lambda body: said if body["messages"][0]["role"] == "system" else "Large"
    answer = gateway.call("POST", CHAT, chat("asked", "What is it?"))
    assert answer.headers["x-inferry-path"] == path
    verifying = gateway.upstream.bodies[1]
    assert [one["content"] for one in verifying["messages"]] == [
        "Is it right?",
        "Request:\nWhat is it?\n\nAnswer:\nSmall",
    ]


def test_an_unsure_answer_is_not_verified(gateway: TwoModelGateway) -> None:
    gateway.logprob = -2.0
    assert text_of(gateway.call("POST", CHAT, chat("asked"))) == "Large"
    assert gateway.asked() == ["small", "large"]


@pytest.mark.parametrize("name", ["called", "awaited"])
@pytest.mark.parametrize(("said", "path"), [("a long answer", "small"), ("short", "small>large")])
def test_a_function_verifies(gateway: TwoModelGateway, name: str, said: str, path: str) -> None:
    gateway.answers["small"] = said
    assert gateway.call("POST", CHAT, chat(name)).headers["x-inferry-path"] == path


@pytest.mark.parametrize("name", ["broken", "endless"])
def test_a_verifier_that_fails_or_takes_too_long_rejects(
    gateway: TwoModelGateway, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert text_of(gateway.call("POST", CHAT, chat(name, "a secret"))) == "Large"
    assert "the answer counts as rejected" in caplog.text
    assert "secret" not in caplog.text
    until(lambda: gateway.service.gateway.in_flight == 0)


def test_an_ensemble_uses_the_answer_with_the_best_score(gateway: TwoModelGateway) -> None:
    gateway.answers = {"small": "the longest of the answers", "large": "shorter"}
    answer = gateway.call("POST", CHAT, chat("scored"))
    assert (text_of(answer), answer.headers["x-inferry-path"]) == ("the longest of the answers", "small+large>small")
