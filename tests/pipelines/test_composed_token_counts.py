"""Token counts of prompts for composed models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.serving import post
from support.two_models import TwoModelGateway

COUNT = "/v1/messages/count_tokens"
STAGE = {"kind": "generate", "model": "large", "messages": [{"content": "{{ input.text }}"}], "max_tokens": 16}
CONFIG: dict[str, Any] = {
    "routes": {"auto": {"default": "large"}, "nested": {"default": "pair"}},
    "cascades": {"pair": {"small": "small", "large": "large", "accept": {"min_mean_logprob": -0.5}, "shadow": 0}},
    "ensembles": {"panel": {"models": ["large", "small", "small"]}},
    "pipelines": {"piped": {"inputs": {"text": {}}, "chat_input": "text", "stages": {"answer": STAGE}}},
    "tenants": {"narrow": {"models": ["large"]}},
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoModelGateway]:
    directory: Path = tmp_path_factory.mktemp("gateway")
    with TwoModelGateway(directory, CONFIG) as found:
        yield found


def count(gateway: TwoModelGateway, model: str, **headers: str) -> tuple[int, dict[str, str], Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "some words to count"}]}
    status, answered, answer = post(gateway.url, COUNT, body, headers)
    return status, {name.lower(): value for name, value in answered.items()}, answer


@pytest.mark.parametrize("model", ["auto", "nested", "pair", "panel", "piped"])
def test_a_prompt_for_a_composed_model_is_estimated(gateway: TwoModelGateway, model: str) -> None:
    status, headers, answer = count(gateway, model)
    assert status == 200, answer
    assert headers["x-inferry-token-count"] == "estimated"
    assert answer["input_tokens"] > 0


def test_a_model_that_neither_a_worker_nor_the_configuration_has_is_unknown(gateway: TwoModelGateway) -> None:
    assert count(gateway, "nothing")[0] == 404


def test_a_caller_that_may_not_use_a_composed_model_may_not_count_with_it(gateway: TwoModelGateway) -> None:
    assert count(gateway, "auto", **{"x-inferry-tenant": "narrow"})[0] == 403
