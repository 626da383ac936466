"""Repeated calls of composed models: their steps are joined or replayed, as those of ordinary models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.tenant_gateway import CHAT
from support.two_models import TwoModelGateway, chat, streamed_text

CONFIG: dict[str, Any] = {
    "routes": {"auto": {"default": "small"}},
    "cascades": {
        "pair": {"small": "small", "large": "large", "accept": {"min_mean_logprob": -0.5}, "shadow": 0},
    },
    "ensembles": {"three": {"models": ["small", "large", "small"], "min_answers": 3}},
    "prices": {"small": {"input": 1.0, "output": 1.0}, "large": {"input": 10.0, "output": 10.0}},
}
STEP = {"x-inferry-run-id": "r1", "x-inferry-step-id": "s1", "x-inferry-replay": "allow"}


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
