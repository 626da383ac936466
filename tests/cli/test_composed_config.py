"""Mistakes in `routes`, `cascades` and `ensembles` that check-config names."""

from typing import Any

import pytest

from inferry.cli.config.loader import parse
from inferry.cli.config.schema import ConfigError

WORKER = {"name": "up", "kind": "vllm", "url": "http://127.0.0.1:1", "models": ["small", "large"]}
CASCADE = {"small": "small", "large": "large", "accept": {"min_mean_logprob": -0.1}}


def check(**sections: Any) -> str:
    try:
        parse({"workers": [WORKER], **sections})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"cascades": {"c": CASCADE}}, ""),
        ({"routes": {"r": {"default": "c"}}, "cascades": {"c": CASCADE}}, ""),
        ({"routes": {"r": {"default": "tiny"}}}, "routes.r.default: no worker and no composed model has the name tiny"),
        ({"routes": {"r": {"default": "r"}}}, "routes.r: calls itself"),
        ({"routes": {"a": {"default": "b"}, "b": {"default": "a"}}}, "routes.a: calls itself"),
        ({"routes": {"small": {"default": "large"}}}, "routes.small: a worker serves a model"),
        ({"routes": {"c": {"default": "large"}}, "cascades": {"c": CASCADE}}, "the name is used twice"),
        ({"cascades": {"c": {**CASCADE, "large": "small"}}}, "are the same model"),
        ({"cascades": {"c": {**CASCADE, "shadow": 2}}}, "cascades.c.shadow must be between 0 and 1"),
        ({"cascades": {"c": {**CASCADE, "accept": {"schema": False}}}}, "accepts every answer"),
        ({"cascades": {"c": {**CASCADE, "accept": {"min_mean_logprob": 0.5}}}}, "must not be above 0"),
        ({"cascades": {"c": {**CASCADE, "accept": {"verifier": {}}}}}, "needs either a model or a function"),
        (
            {"cascades": {"c": {**CASCADE, "accept": {"verifier": {"function": "no.such:thing"}}}}},
            "cannot be imported",
        ),
        ({"ensembles": {"e": {"models": ["small"]}}}, "must have 2 to 16 members"),
        ({"ensembles": {"e": {"models": ["small", "large"], "min_answers": 3}}}, "min_answers"),
        ({"ensembles": {"e": {"models": ["small", "large"], "choose": "verifier"}}}, "ensembles.e.verifier"),
        (
            {"routes": {"r": {"rules": [{"when": {"lanes": ["P9"]}, "model": "small"}], "default": "small"}}},
            "routes.r.rules[0].when.lanes",
        ),
    ],
)
def test_mistakes_are_named(sections: dict[str, Any], problem: str) -> None:
    found = check(**sections)
    assert (problem in found) if problem else found == ""


def test_a_threshold_may_be_set_for_the_embedded_engine() -> None:
    embedded = {"name": "local", "kind": "embedded", "models": ["tiny"]}
    cascade = {**CASCADE, "small": "tiny"}
    assert check(workers=[WORKER, embedded], cascades={"c": cascade}) == ""
