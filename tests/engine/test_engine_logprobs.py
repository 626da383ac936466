"""Log probabilities of the engine equal those of transformers, whatever else the engine does."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from msgspec.structs import replace

from inferry.domain.constraints import Constraint
from inferry.domain.sampling import Sampling
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.grammars import Grammars
from inferry.engine.messages import Request, TokenLogprobs
from inferry.engine.runner import TorchRunner
from support.engine_fixtures import greedy

NEAR = 1e-4
CONFIGS = {
    "whole prompts": EngineConfig(max_sequences=4, kv_tokens=4_096, chunk_tokens=512),
    "chunks": EngineConfig(max_sequences=4, kv_tokens=4_096, chunk_tokens=7, block_tokens=8),
    "preemptions": EngineConfig(max_sequences=4, kv_tokens=96, chunk_tokens=16, block_tokens=8),
    "no prefix cache": EngineConfig(max_sequences=4, kv_tokens=96, chunk_tokens=16, block_tokens=8, prefix_cache=False),
    "hybrid": EngineConfig(mode="hybrid", max_sequences=2, kv_tokens=4_096, chunk_tokens=64),
    "dynamic": EngineConfig(mode="dynamic", max_sequences=2, kv_tokens=4_096, chunk_tokens=128),
    "static": EngineConfig(mode="static", max_sequences=4, kv_tokens=4_096, chunk_tokens=256),
}


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def runner(tiny_dir: Path) -> TorchRunner:
    return TorchRunner.load(tiny_dir, CONFIGS["whole prompts"])


class Answers:
    """Tokens and log probabilities by key."""

    def __init__(self, core: EngineCore, requests: Sequence[Request]) -> None:
        self.tokens: dict[int, list[int]] = {request.key: [] for request in requests}
        self.logprobs: dict[int, list[TokenLogprobs]] = {request.key: [] for request in requests}
        for request in requests:
            assert core.add(request) is None
        while core.has_work:
            done = core.step()
            assert {one.key for one in done.logprobs} <= {key for key, _ in done.tokens}
            for key, token in done.tokens:
                self.tokens[key].append(token)
            for one in done.logprobs:
                self.logprobs[one.key].append(one)
        self.preemptions = core.stats().preemptions


def check(model: transformers.PreTrainedModel, request: Request, answers: Answers) -> None:
    """One entry for each token, with the values of transformers and its most likely tokens."""
    tokens, found, top = answers.tokens[request.key], answers.logprobs[request.key], request.sampling.logprobs
    assert top is not None
    assert len(found) == len(tokens) > 0
    with torch.inference_mode():
        logits = model(torch.tensor([[*request.prompt_ids, *tokens]])).logits[0]
    expected = logits.log_softmax(dim=-1)[len(request.prompt_ids) - 1 : -1]
    for row, token, one in zip(expected, tokens, found, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=NEAR)
        assert [value for _, value in one.top] == pytest.approx(row.topk(top).values.tolist(), abs=NEAR)
        assert [value for _, value in one.top] == pytest.approx([float(row[id]) for id, _ in one.top], abs=NEAR)
        assert len({id for id, _ in one.top}) == top


def some_requests(sampling: Sampling, lengths: Sequence[int] = (3, 25, 1, 17)) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(key, [rng.randrange(7, 4096) for _ in range(length)], replace(sampling, logprobs=(0, 20, 2, 5)[key]), 0)
        for key, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_values_are_those_of_transformers_in_every_mode(
    tiny_dir: Path, model: transformers.PreTrainedModel, name: str, temperature: float
) -> None:
    config = CONFIGS[name]
    sampling = Sampling(temperature=temperature, top_p=0.9, top_k=50, seed=3, max_tokens=12, ignore_eos=True)
    requests = some_requests(sampling)
    answers = Answers(EngineCore(TorchRunner.load(tiny_dir, config), config), requests)
    for request in requests:
        check(model, request, answers)
    assert (answers.preemptions > 0) == (config.kv_tokens == 96)


def test_a_sequence_that_starts_in_the_prefix_cache_has_the_same_values(
    model: transformers.PreTrainedModel, runner: TorchRunner
) -> None:
    core = EngineCore(runner, CONFIGS["whole prompts"])
    prompt = list(range(100, 200))
    for key in (1, 2):
        request = Request(key, prompt, replace(greedy(6), logprobs=3), 0)
        check(model, request, Answers(core, [request]))
    blocks = core.stats().kv_blocks
    assert blocks is not None
    assert blocks.prefix_hits > 0


def test_under_a_grammar_values_are_those_of_the_free_model(
    tiny_dir: Path, model: transformers.PreTrainedModel, runner: TorchRunner
) -> None:
    config = CONFIGS["whole prompts"]
    grammars = Grammars(tiny_dir, runner.vocab_size, runner.eos_ids, None)
    grammars.wait_until_loaded()
    constraint = Constraint("response_format", schema=json.dumps({"type": "array", "items": {"enum": ["red"]}}))
    sampling = Sampling(temperature=1.0, seed=1, max_tokens=20, constraint=constraint, logprobs=4)
    requests = [Request(1, [50, 60, 70], sampling, 0), Request(2, [50, 60], replace(greedy(8), logprobs=1), 0)]
    answers = Answers(EngineCore(runner, config, grammars=grammars), requests)
    for request in requests:
        check(model, request, answers)
    best = [one.top[0][0] for one in answers.logprobs[1]]
    assert best != answers.tokens[1], "the grammar has excluded the most likely token"


def test_sequences_that_do_not_ask_have_none_and_others_their_own(
    model: transformers.PreTrainedModel, runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(runner, CONFIGS["whole prompts"])
    requests = [Request(1, [5, 6], greedy(4), 0), Request(2, [5, 6, 7], replace(greedy(4), logprobs=0), 0)]
    answers = Answers(core, requests)
    assert answers.logprobs[1] == []
    check(model, requests[1], answers)

    def never(*_: object) -> None:
        raise AssertionError("computed for a sequence that does not ask")

    monkeypatch.setattr("inferry.engine.logprobs.LogprobRows", never)
    assert Answers(core, requests[:1]).tokens[1] == answers.tokens[1]


@pytest.mark.parametrize("top", [-1, 21])
def test_a_number_of_tokens_out_of_range_is_rejected(runner: TorchRunner, top: int) -> None:
    rejected = EngineCore(runner, CONFIGS["whole prompts"]).add(Request(1, [5], replace(greedy(), logprobs=top), 0))
    assert rejected is not None
    assert "0 to 20" in rejected.message
