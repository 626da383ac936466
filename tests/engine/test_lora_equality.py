"""Greedy tokens with LoRA adapters equal those of transformers with the adapter merged into the weights, in float32.

Jobs of several adapters and of none run in one engine, in every mode, with and without the prefix cache.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from inferry.domain.lanes import Lane
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.runner import TorchRunner
from support.adapters import make_adapter, merged_model
from support.checkpoints import make_checkpoint, reference_model
from support.engine_fixtures import TIE, drain, greedy, note

NEW_TOKENS = 10
LENGTHS = (1, 7, 24, 25, 61)
FAMILIES = ("llama", "llama-mha-head-dim", "qwen2", "qwen3", "mistral-window", "qwen2-yarn-tied")
ADAPTERS: dict[int, dict[str, Any]] = {
    1: {"rank": 4},
    2: {"modules": ["q_proj", "v_proj"], "rank": 8, "use_rslora": True, "lora_alpha": 10},
    3: {"ranks": {"down_proj": 2, "k_proj": 6}, "rank_pattern": {"down_proj": 2, "k_proj": 6}}
    | {"alpha_pattern": {"up_proj": 3}},
}
MODES = ("continuous", "hybrid", "dynamic", "static")


@dataclass(frozen=True)
class Reference:
    """By adapter (0: none), prompts of LENGTHS and their outputs, each up to the first tie."""

    base: Path
    directories: dict[int, Path]
    prompts: dict[int, list[int]]
    outputs: dict[tuple[int, int], list[int]]


def greedy_output(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            if float(best.values[0] - best.values[1]) <= TIE:
                break
            tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp(request.param)
    base = make_checkpoint(folder / "base", request.param)
    directories = {
        adapter: make_adapter(folder / str(adapter), base, seed=adapter, **settings)
        for adapter, settings in ADAPTERS.items()
    }
    rng = random.Random(3)
    prompts = {key: [rng.randrange(3, 200) for _ in range(length)] for key, length in enumerate(LENGTHS)}
    models = {0: reference_model(base)} | {key: merged_model(base, path) for key, path in directories.items()}
    outputs = {
        (adapter, key): greedy_output(model, prompt)
        for adapter, model in models.items()
        for key, prompt in prompts.items()
    }
    assert sum(map(len, outputs.values())) >= 0.9 * NEW_TOKENS * len(outputs), "too many ties to compare anything"
    for key in prompts:
        assert len({tuple(outputs[adapter, key]) for adapter in models}) > 1
    return Reference(base, directories, prompts, outputs)


def a_core(reference: Reference, **options: Any) -> EngineCore:
    chosen = {"chunk_tokens": 24, "kv_tokens": 4_096, "block_tokens": 8, "max_adapters": 3, **options}
    config = EngineConfig(**chosen)
    runner = TorchRunner.load(reference.base, config)
    assert runner.adapters is not None
    for adapter, directory in reference.directories.items():
        runner.adapters.load(adapter, directory)
    return EngineCore(runner, config)


def requests_of(reference: Reference, lane: int | None = None) -> list[Request]:
    """All prompts with each adapter and without one, in mixed order. The gateway gives each adapter a batch number."""
    made = [
        Request(
            100 * adapter + key, prompt, greedy(NEW_TOKENS), key % 3 if lane is None else lane, "tenant",
            adapter=adapter, batch=adapter,
        )
        for adapter in (0, *reference.directories)
        for key, prompt in reference.prompts.items()
    ]  # fmt: skip
    random.Random(9).shuffle(made)
    return made


def assert_equal(reference: Reference, outputs: dict[int, list[int]]) -> None:
    for (adapter, key), expected in reference.outputs.items():
        assert outputs[100 * adapter + key][: len(expected)] == expected, f"adapter {adapter}, prompt {key}"


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_mixed_adapters_together_and_again(reference: Reference, mode: str, prefix_cache: bool) -> None:
    core = a_core(reference, mode=mode, prefix_cache=prefix_cache)
    for _ in range(2):
        for request in requests_of(reference):
            assert core.add(request) is None
        assert_equal(reference, drain(core))
    assert core.pool.free == core.pool.total


@pytest.mark.parametrize("mode", MODES)
def test_after_preemption_and_beside_random_aborts(reference: Reference, mode: str) -> None:
    core = a_core(reference, mode=mode, kv_tokens=160, block_tokens=4)
    rng = random.Random(5)
    others = {key: [rng.randrange(3, 200) for _ in range(rng.randint(1, 9))] for key in range(1000, 1020)}
    outputs: dict[int, list[int]] = {}
    waiting = [*others]
    for request in requests_of(reference, Lane.P2):
        assert core.add(request) is None
    while core.has_work:
        note(core.step(), outputs)
        if waiting and rng.random() < 0.5:
            key = waiting.pop()
            other = Request(key, others[key], greedy(40), Lane.P0, "tenant", adapter=key % 4, batch=key % 4)
            assert core.add(other) is None
        core.abort(key for key in others if rng.random() < 0.02)
    assert core.stats().preemptions > 0
    assert_equal(reference, outputs)


def test_adapters_share_no_cached_prefix(reference: Reference) -> None:
    core = a_core(reference)
    prompt = reference.prompts[len(LENGTHS) - 1]
    cached: dict[int, int] = {}
    for key, adapter in enumerate((0, 1, 2, 1, 0, 2)):
        assert core.add(Request(key, prompt, greedy(2), 0, "tenant", adapter=adapter)) is None
        while core.has_work:
            cached |= {end.account.key: end.account.cached_tokens for end in core.step().ends}
    assert [cached[key] for key in range(6)] == [0, 0, 0, 56, 56, 56]
