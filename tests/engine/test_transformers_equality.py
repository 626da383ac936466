"""Greedy tokens equal those of transformers' `generate` in float32, for every family, whatever else the engine does.

The options of the engine that must not change a token are data: every family is tried with each of OPTIONS.
"""

import random
import typing
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from inferry.domain.lanes import Lane
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.runner import TorchRunner
from support.checkpoints import FAMILIES, make_checkpoint, reference_model
from support.engine_fixtures import TIE, drain, greedy, note

NEW_TOKENS = 14
CHUNK_TOKENS = 24
LENGTHS = (1, 7, 23, 24, 25, 61, 118)
STORED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _choices(name: str, values: tuple[Any, ...] | None = None) -> list[dict[str, Any]]:
    """The values of an option that the engine has."""
    if name not in EngineConfig.__struct_fields__:
        return [{}]
    values = values or typing.get_args(typing.get_type_hints(EngineConfig)[name])
    return [{name: value} for value in values]


OPTIONS = [mode | cache for mode in _choices("mode") for cache in _choices("prefix_cache", (True, False))]


@dataclass(frozen=True)
class Reference:
    """A checkpoint, prompts, and what `generate` makes of each; an output ends before the first tie."""

    directory: Path
    prompts: dict[int, list[int]]
    outputs: dict[int, list[int]]


def make_reference(directory: Path) -> Reference:
    rng = random.Random(3)
    prompts = {key: [rng.randrange(3, 200) for _ in range(length)] for key, length in enumerate(LENGTHS)}
    model = reference_model(directory)
    outputs = {}
    for key, prompt in prompts.items():
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            made = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack([row[0] for row in made.logits]).topk(2).values
        ties = ((best[:, 0] - best[:, 1]) <= TIE).nonzero()
        certain = int(ties[0]) if len(ties) else NEW_TOKENS
        outputs[key] = made.sequences[0, len(prompt) :].tolist()[:certain]
    assert sum(map(len, outputs.values())) >= 0.9 * NEW_TOKENS * len(prompts), "too many ties to compare anything"
    return Reference(directory, prompts, outputs)


@pytest.fixture(scope="module", params=[*FAMILIES, *(f"stored-as-{name}" for name in STORED)])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    name: str = request.param
    directory = tmp_path_factory.mktemp(name)
    stored = STORED.get(name.removeprefix("stored-as-"))
    if stored is None:
        return make_reference(make_checkpoint(directory, name))
    return make_reference(make_checkpoint(directory, "qwen2", dtype=stored, max_shard_size="100KB"))


@pytest.fixture(params=OPTIONS, ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "defaults")
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = request.param
    return {"chunk_tokens": CHUNK_TOKENS, "kv_tokens": 4_096, "block_tokens": 8, **chosen}


def a_core(reference: Reference, options: dict[str, Any]) -> EngineCore:
    config = EngineConfig(**options)
    return EngineCore(TorchRunner.load(reference.directory, config), config)


def requests_of(reference: Reference) -> Iterator[Request]:
    for key, prompt in reference.prompts.items():
        yield Request(key, prompt, greedy(NEW_TOKENS), key % 3, salt="tenant")


def assert_equal(reference: Reference, outputs: dict[int, list[int]]) -> None:
    for key, expected in reference.outputs.items():
        assert len(outputs[key]) == NEW_TOKENS
        assert outputs[key][: len(expected)] == expected, f"prompt of {len(reference.prompts[key])} tokens"


def test_alone_and_together_and_again(reference: Reference, options: dict[str, Any]) -> None:
    """Prompts shorter and longer than a chunk, one at a time, then in one batch, then again: prefixes may be cached."""
    core = a_core(reference, options)
    alone: dict[int, list[int]] = {}
    for request in requests_of(reference):
        assert core.add(request) is None
        drain(core, alone)
    assert_equal(reference, alone)
    for _ in range(2):
        for request in requests_of(reference):
            assert core.add(request) is None
        assert_equal(reference, drain(core))


def test_after_preemption_and_beside_random_aborts(reference: Reference, options: dict[str, Any]) -> None:
    """The KV cache holds the longest sequence and little more. Sequences of a higher lane grow and preempt the compared
    ones; some of them are aborted.
    """
    core = a_core(reference, options | {"kv_tokens": 160, "block_tokens": 4})
    rng = random.Random(5)
    others = {key: [rng.randrange(3, 200) for _ in range(rng.randint(1, 9))] for key in range(100, 120)}
    outputs: dict[int, list[int]] = {}
    waiting = [*others]
    for request in requests_of(reference):
        assert core.add(replace(request, lane=Lane.P2)) is None
    while core.has_work:
        note(core.step(), outputs)
        if waiting and rng.random() < 0.5:
            key = waiting.pop()
            assert core.add(Request(key, others[key], greedy(40), Lane.P0, salt="other")) is None
        core.abort(key for key in others if rng.random() < 0.02)
    assert core.stats().preemptions > 0
    assert_equal(reference, outputs)
