"""Repeated calls of composed models: their steps are joined or replayed, as those of ordinary models."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.tenant_gateway import CHAT
from support.two_models import TwoModelGateway, chat, streamed_text
from support.waiting import until

STAGE: dict[str, Any] = {"kind": "generate", "model": "small", "max_tokens": 16}
CONFIG: dict[str, Any] = {
    "routes": {"auto": {"default": "small"}, "nested": {"default": "pair"}},
    "cascades": {
        "pair": {"small": "small", "large": "large", "accept": {"min_mean_logprob": -0.5}, "shadow": 0},
    },
    "ensembles": {"three": {"models": ["small", "large", "small"], "min_answers": 3}},
    "pipelines": {
        "line": {
            "inputs": {"text": {}},
            "chat_input": "text",
            "stages": {
                "draft": {**STAGE, "messages": [{"content": "{{ input.text }}"}]},
                "answer": {**STAGE, "messages": [{"content": "Again: {{ draft }}"}]},
            },
        }
    },
    "prices": {"small": {"input": 1.0, "output": 1.0}, "large": {"input": 10.0, "output": 10.0}},
}
STEP = {"x-inferry-run-id": "r1", "x-inferry-step-id": "s1", "x-inferry-replay": "allow"}
KEY = {"idempotency-key": "k", "x-inferry-replay": "allow"}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[TwoModelGateway]:
    with TwoModelGateway(tmp_path, CONFIG) as found:
        yield found


@pytest.mark.parametrize(("model", "asked"), [("pair", 1), ("three", 3)])
def test_a_repeated_call_is_answered_from_the_answers_of_its_steps(
    gateway: TwoModelGateway, model: str, asked: int
) -> None:
    for stream in (False, True, False):
        answer = gateway.call("POST", CHAT, chat(model, stream=stream), STEP)
        assert answer.status == 200, answer.body
        text = streamed_text(answer.body) if stream else answer.json["choices"][0]["message"]["content"]
        assert text == "Small"
    assert len(gateway.asked()) == asked
    assert gateway.call("GET", "/v1/runs/r1").json["tokens"]["output"] == 2 * asked


@pytest.mark.parametrize(
    ("model", "at_once", "asked"),
    [("small", 1, 1), ("auto", 1, 1), ("pair", 1, 1), ("nested", 1, 1), ("three", 3, 3), ("line", 1, 2)],
)
def test_calls_with_one_key_share_the_executions_of_their_steps(
    gateway: TwoModelGateway, model: str, at_once: int, asked: int
) -> None:
    gateway.hold = {"small", "large"}
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(gateway.call, "POST", CHAT, chat(model), KEY) for _ in range(3)]
        try:
            until(lambda: len(gateway.service.gateway._single_flight.readers()) == 3 * at_once)
        finally:
            gateway.release()
        answers = [one.result(120) for one in calls]
    answers.append(gateway.call("POST", CHAT, chat(model), KEY))
    assert [one.status for one in answers] == [200] * 4, answers
    assert len(gateway.asked()) == asked


def test_each_prompt_of_a_repeated_call_of_a_route_is_asked_once(gateway: TwoModelGateway) -> None:
    body = {"model": "auto", "prompt": ["a", "b"], "max_tokens": 8}
    for _ in range(2):
        answer = gateway.call("POST", "/v1/completions", body, KEY)
        assert [one["text"] for one in answer.json["choices"]] == ["Small", "Small"]
    assert len(gateway.asked()) == 2


@pytest.mark.parametrize("model", ["auto", "pair"])
def test_another_tenant_body_or_run_is_another_call(gateway: TwoModelGateway, model: str) -> None:
    gateway.call("POST", CHAT, chat(model), KEY)
    gateway.call("POST", CHAT, chat(model), {**KEY, "x-inferry-tenant": "other"})
    gateway.call("POST", CHAT, chat(model, "Another?"), KEY)
    for run in ("r1", "r2"):
        gateway.call("POST", CHAT, chat(model), {**KEY, "x-inferry-run-id": run})
    for _ in range(2):  # a step without a run is no name
        gateway.call("POST", CHAT, chat(model), {"x-inferry-step-id": "s1", "x-inferry-replay": "allow"})
    assert len(gateway.asked()) == 7


@pytest.mark.parametrize("model", ["pair", "three"])
def test_each_of_several_equal_calls_has_its_own_request_id_and_lane(gateway: TwoModelGateway, model: str) -> None:
    gateway.hold = {"small", "large"}
    at_once = 3 if model == "three" else 1
    with ThreadPoolExecutor(2) as threads:
        calls = []
        try:
            for number, lane in enumerate(("P0", "P1")):
                headers = {**KEY, "x-request-id": f"q{number}", "x-inferry-lane": lane}
                calls.append(threads.submit(gateway.call, "POST", CHAT, chat(model), headers))
                until(lambda: len(gateway.service.gateway._single_flight.readers()) == len(calls) * at_once)
        finally:
            gateway.release()
        answers = [one.result(120).headers for one in calls]
    assert [(one["x-request-id"], one["x-inferry-lane"]) for one in answers] == [("q0", "P0"), ("q1", "P1")]
    assert len(gateway.asked()) == at_once
