"""The runner on the CPU, its kernels in Triton's interpreter, against the CPU's own runner."""

import random
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from msgspec.structs import replace
from tokenizers import Tokenizer

from inferry.domain.constraints import Constraint
from inferry.domain.sampling import Sampling
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.gpu.loading import load_runner
from inferry.engine.grammars import Grammars
from inferry.engine.messages import Request, TokenLogprobs
from inferry.engine.runner import TorchRunner
from support.engine_fixtures import TIE, Teacher, drain, greedy, shortfall
from support.grammar_fixtures import write_byte_tokenizer
from support.pooling_models import embedding_model, scoring_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of one group of heads: the interpreter is slow."""
    torch.manual_seed(1)
    directory = tmp_path_factory.mktemp("small")
    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, eos_token_id=7, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def windowed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second of two layers has a window, and rotations are scaled by YaRN."""
    torch.manual_seed(2)
    directory = tmp_path_factory.mktemp("windowed")
    config = transformers.Qwen2Config(
        vocab_size=400, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, eos_token_id=7, initializer_range=0.2,
        use_sliding_window=True, sliding_window=6, max_window_layers=1,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        },
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def requests_of(lengths: list[int], sampling: Sampling) -> list[Request]:
    generator = random.Random(3)
    return [
        Request(key, [generator.randrange(1, 400) for _ in range(length)], sampling, lane=0)
        for key, length in enumerate(lengths)
    ]


def outputs_of(core: EngineCore, requests: list[Request]) -> dict[int, list[int]]:
    for request in requests:
        assert core.add(request) is None
    outputs = drain(core)
    assert core.pool.free == core.pool.total
    return outputs


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(max_sequences=4, kv_tokens=512, chunk_tokens=64, block_tokens=16),
        EngineConfig(max_sequences=4, kv_tokens=512, chunk_tokens=7, block_tokens=8),
        EngineConfig(max_sequences=4, kv_tokens=40, chunk_tokens=16, block_tokens=4),
        EngineConfig(mode="hybrid", max_sequences=2, kv_tokens=512, chunk_tokens=64, block_tokens=16),
        EngineConfig(mode="dynamic", max_sequences=2, kv_tokens=512, chunk_tokens=64, block_tokens=16),
        EngineConfig(mode="static", max_sequences=4, kv_tokens=512, chunk_tokens=96, block_tokens=16),
    ],
    ids=["whole prompts", "chunks", "preemptions", "hybrid", "dynamic", "static"],
)
def test_tokens_are_those_of_the_reference(small_dir: Path, config: EngineConfig) -> None:
    requests = requests_of([3, 19, 1, 11], greedy(5))
    outputs = outputs_of(EngineCore(load_runner(small_dir, config, CPU), config), requests)
    teacher = Teacher(small_dir)
    for request in requests:
        output = outputs[request.key]
        assert len(output) == 5
        logits = teacher.logits([*request.prompt_ids, *output])
        assert shortfall(logits, request.prompt_ids, output) < TIE


def test_windows_and_scaled_rotations_are_those_of_the_reference(windowed_dir: Path) -> None:
    config = EngineConfig(max_sequences=4, kv_tokens=512, chunk_tokens=8, block_tokens=4)
    requests = requests_of([19, 3], greedy(4))
    runner = load_runner(windowed_dir, config, CPU)
    runner.warm_up()
    outputs = outputs_of(EngineCore(runner, config), requests)
    model = transformers.AutoModelForCausalLM.from_pretrained(windowed_dir, dtype=torch.float32).eval()
    for request in requests:
        output = outputs[request.key]
        with torch.inference_mode():
            logits = model(torch.tensor([[*request.prompt_ids, *output]])).logits[0]
        assert shortfall(logits, request.prompt_ids, output) < TIE


def test_cached_prefixes_are_not_computed_again_and_change_no_token(small_dir: Path) -> None:
    config = EngineConfig(max_sequences=4, kv_tokens=512, chunk_tokens=64, block_tokens=4)
    core = EngineCore(load_runner(small_dir, config, CPU), config)
    (first,) = requests_of([13], greedy(4))
    (output,) = outputs_of(core, [first]).values()
    again = Request(9, [*first.prompt_ids, *output, 5], greedy(3), lane=0)
    assert core.add(again) is None
    tokens: list[int] = []
    cached: list[int] = []
    while core.has_work:
        done = core.step()
        tokens += [token for _, token in done.tokens]
        cached += [end.account.cached_tokens for end in done.ends]
    assert cached == [16]
    logits = Teacher(small_dir).logits([*again.prompt_ids, *tokens])
    assert shortfall(logits, again.prompt_ids, tokens) < TIE


def test_seeded_draws_are_those_of_the_cpu(small_dir: Path) -> None:
    config = EngineConfig(max_sequences=4, kv_tokens=512, chunk_tokens=64, block_tokens=16)
    sampling = Sampling(temperature=0.9, top_p=0.8, top_k=30, max_tokens=4, seed=7, ignore_eos=True)
    requests = requests_of([5, 8], sampling)
    actual = outputs_of(EngineCore(load_runner(small_dir, config, CPU), config), requests)
    assert actual == outputs_of(EngineCore(TorchRunner.load(small_dir, config), config), requests)


@pytest.mark.parametrize("make", [embedding_model, scoring_model, partial(scoring_model, labels=3)])
def test_pooled_results_are_those_of_the_cpu(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    directory = make(tmp_path / "model")
    config = EngineConfig(max_sequences=4, kv_tokens=512, chunk_tokens=8, block_tokens=16)
    results = []
    for runner in (load_runner(directory, config, CPU), TorchRunner.load(directory, config)):
        core = EngineCore(runner, config)
        for key, length in enumerate([2, 9]):
            core.add(Request(key, list(range(1, length + 1)), Sampling(), lane=0, pooled=True))
        found: dict[int, torch.Tensor] = {}
        while core.has_work:
            found |= {key: torch.frombuffer(bytearray(data), dtype=torch.float32) for key, data in core.step().pooled}
        results.append([found[key] for key in range(2)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def test_masked_rows_meet_their_schemas_and_free_rows_are_those_of_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, eos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path, 300)
    schema = Constraint("response_format", schema='{"enum":["red","green","blue"]}', is_strict=True)
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "top_k": 9, "top_p": 0.8, "seed": 4},
    ]
    requests = [
        Request(key, [5 + key] * 4, Sampling(max_tokens=12, constraint=schema if key < 3 else None, **one), lane=0)  # type: ignore[arg-type]
        for key, one in enumerate([*settings, *settings])
    ]
    engine = EngineConfig(max_sequences=6, kv_tokens=512, chunk_tokens=64, block_tokens=16)
    found = []
    for runner in (TorchRunner.load(tmp_path, engine), load_runner(tmp_path, engine, CPU)):
        grammars = Grammars(tmp_path, runner.vocab_size, runner.eos_ids, None)
        found.append(outputs_of(EngineCore(runner, engine, grammars=grammars), requests))
    assert found[1] == found[0]
    decode = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode
    assert all(decode(found[1][key]) in ('"red"', '"green"', '"blue"') for key in range(3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_those_of_the_cpu(small_dir: Path, temperature: float) -> None:
    config = EngineConfig(max_sequences=4, kv_tokens=40, chunk_tokens=16, block_tokens=4)
    sampling = Sampling(temperature=temperature, top_k=30, seed=2, max_tokens=5, ignore_eos=True)
    wanted = [None, 0, 20, 3]
    requests = [
        replace(request, sampling=replace(sampling, logprobs=top))
        for request, top in zip(requests_of([3, 19, 1, 11], sampling), wanted, strict=True)
    ]
    found: list[list[TokenLogprobs]] = []
    for runner in (load_runner(small_dir, config, CPU), TorchRunner.load(small_dir, config)):
        core = EngineCore(runner, config)
        for request in requests:
            assert core.add(request) is None
        steps = []
        while core.has_work:
            steps.append(core.step())
        found.append(sorted((one for step in steps for one in step.logprobs), key=lambda one: one.key))
    assert [one.key for one in found[0]] == [key for key, top in enumerate(wanted) if top is not None for _ in range(5)]
    for ours, theirs in zip(*found, strict=True):
        assert ours.key == theirs.key
        assert ours.logprob == pytest.approx(theirs.logprob, abs=TIE)
        assert len(ours.top) == wanted[ours.key]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=TIE)


def test_log_probabilities_under_a_grammar_are_those_of_the_free_model(small_dir: Path, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, 400)
    config = EngineConfig(max_sequences=4, kv_tokens=512, chunk_tokens=64, block_tokens=16)
    runner = load_runner(small_dir, config, CPU)
    core = EngineCore(runner, config, grammars=Grammars(tmp_path, runner.vocab_size, runner.eos_ids, None))
    constraint = Constraint("structured_outputs", regex="[ab]{4}")
    prompt = [3, 4, 5]
    sampling = Sampling(temperature=0.0, max_tokens=8, constraint=constraint, logprobs=1)
    assert core.add(Request(1, prompt, sampling, lane=0)) is None
    tokens: list[int] = []
    found: list[TokenLogprobs] = []
    while core.has_work:
        done = core.step()
        tokens += [token for _, token in done.tokens]
        found += done.logprobs
    expected = Teacher(small_dir).logits([*prompt, *tokens]).log_softmax(dim=-1)[len(prompt) - 1 :]
    assert len(found) == len(tokens) == 4
    for row, token, one in zip(expected, tokens, found, strict=False):
        assert one.logprob == pytest.approx(float(row[token]), abs=TIE)
        assert one.top[0][1] == pytest.approx(float(row.max()), abs=TIE)
