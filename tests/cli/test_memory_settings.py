"""Settings of an embedded worker's memory in a configuration."""

from typing import Any

import pytest

from inferry.cli.config.loader import parse
from inferry.cli.config.schema import ConfigError
from inferry.cli.config.workers import EmbeddedWorkerConfig
from inferry.cli.simulate_setup import simulated_workers
from inferry.sim.costs import load_model


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ({"kind": "embedded", "kv_tokens": 3}, "kv_tokens must be at least 64"),
        ({"kind": "embedded", "kv_tokens": "many"}, "kv_tokens"),
        ({"kind": "vllm", "name": "a", "url": "http://a", "kv_tokens": 0}, "kv_tokens must be at least 1"),
        ({"kind": "embedded", "memory_share": 1.5}, "memory_share must be between 0.01 and 1"),
        ({"kind": "embedded", "context_tokens": 0}, "context_tokens must be at least 1"),
        ({"kind": "embedded", "dtype": "int8"}, "dtype"),
    ],
)
def test_an_invalid_setting_is_refused_by_name(worker: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"workers\[0\]\.{message}"):
        parse({"workers": [worker]})


def test_automatic_kv_tokens_are_those_of_the_model_in_a_simulation() -> None:
    config = parse({"workers": [{"kind": "embedded", "kv_tokens": "auto"}]})
    (worker,) = config.workers
    assert isinstance(worker, EmbeddedWorkerConfig)
    model = load_model()
    (simulated,) = simulated_workers(config, model)
    assert simulated.capacity.kv_tokens == model.flags.kv_tokens
