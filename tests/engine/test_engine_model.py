"""The decoder against itself one at a time, and against transformers on the same checkpoint."""

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from inferry.domain.lanes import Lane
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.runner import TorchRunner
from support.engine_fixtures import TIE, Teacher, drain, generate, generate_alone, greedy, note, shortfall

VOCABULARY = 4096


def prompts_of(lengths: list[int], vocabulary: int = VOCABULARY, seed: int = 1) -> dict[int, list[int]]:
    rng = random.Random(seed)
    return {key: [rng.randrange(7, vocabulary) for _ in range(length)] for key, length in enumerate(lengths)}


def requests_of(prompts: dict[int, list[int]], tokens: int = 16) -> list[Request]:
    return [Request(key, prompt, greedy(tokens), Lane(key % 3)) for key, prompt in prompts.items()]


def assert_same_up_to_ties(teacher: Teacher, prompt: list[int], output: list[int], alone: list[int]) -> None:
    assert len(output) == len(alone)
    if output != alone:
        assert shortfall(teacher.logits([*prompt, *output]), prompt, output) <= TIE


def test_sixty_four_at_once_give_the_tokens_that_each_gives_alone(tiny_dir: Path) -> None:
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 300, 700, 1100] + [5 + 3 * n for n in range(51)]
    prompts = prompts_of(lengths)
    teacher = Teacher(tiny_dir)
    together = generate(tiny_dir, requests_of(prompts), EngineConfig(chunk_tokens=128))
    alone = generate_alone(tiny_dir, requests_of(prompts))
    for key, prompt in prompts.items():
        assert_same_up_to_ties(teacher, prompt, together[key], alone[key])
        assert shortfall(teacher.logits([*prompt, *together[key]]), prompt, together[key]) <= TIE


def test_sequences_continue_unchanged_when_their_neighbours_end(tiny_dir: Path) -> None:
    prompts = prompts_of([170] * 40)
    config = EngineConfig(chunk_tokens=4_096)
    core = EngineCore(TorchRunner.load(tiny_dir, config), config)
    for request in requests_of(prompts, 12):
        core.add(request)
    outputs: dict[int, list[int]] = {}
    for _ in range(4):
        note(core.step(), outputs)
    # Those that stay hold few of the many blocks that lie between them.
    stay = range(3, 40, 4)
    core.abort(key for key in prompts if key not in stay)
    drain(core, outputs)
    alone = generate_alone(tiny_dir, [request for request in requests_of(prompts, 12) if request.key in stay])
    teacher = Teacher(tiny_dir)
    for key in stay:
        assert_same_up_to_ties(teacher, prompts[key], outputs[key], alone[key])


def test_nothing_in_a_block_reaches_a_sequence_that_does_not_hold_it(tiny_dir: Path) -> None:
    """Blocks of others may lie between those of a batch; what is in them must not matter, to the last bit."""
    config = EngineConfig(chunk_tokens=4_096)
    outputs: list[dict[int, list[int]]] = []
    for noise in (0.0, 1e4):
        runner = TorchRunner.load(tiny_dir, config)
        core = EngineCore(runner, config)
        for request in requests_of(prompts_of([170] * 24), 10):
            core.add(request)
        heard: dict[int, list[int]] = {}
        for _ in range(3):
            note(core.step(), heard)
        gone = [core._sequences[key] for key in range(0, 24, 3)]
        theirs = [block for sequence in gone for block in sequence.blocks]
        core.abort(range(0, 24, 3))
        for cache in runner._decoder._cache:
            cache[theirs] += noise
        drain(core, heard)
        outputs.append({key: tokens for key, tokens in heard.items() if key % 3})
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 33])
def test_however_prompts_are_cut_into_chunks_the_tokens_are_the_same(tiny_dir: Path, chunk_tokens: int) -> None:
    prompts = prompts_of([15, 16, 17, 50, 34, 3, 1, 8], seed=chunk_tokens)
    teacher = Teacher(tiny_dir)
    whole = generate(tiny_dir, requests_of(prompts, 6))
    cut = generate(tiny_dir, requests_of(prompts, 6), EngineConfig(chunk_tokens=chunk_tokens))
    for key, prompt in prompts.items():
        assert_same_up_to_ties(teacher, prompt, cut[key], whole[key])


def test_running_out_of_kv_cache_changes_no_token(tiny_dir: Path) -> None:
    prompts = prompts_of([20, 33, 47, 5, 60, 18, 90, 41])
    teacher = Teacher(tiny_dir)
    plenty = generate(tiny_dir, requests_of(prompts, 40))
    token_account = generate(tiny_dir, requests_of(prompts, 40), EngineConfig(kv_tokens=192, chunk_tokens=64))
    for key, prompt in prompts.items():
        assert_same_up_to_ties(teacher, prompt, token_account[key], plenty[key])


def transformers_logits(model_dir: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def assert_agrees_with_transformers(model_dir: Path, prompts: dict[int, list[int]], tokens: int = 24) -> None:
    """Same greedy tokens; where two are tied either is right, and what follows is judged by what it follows."""
    model = transformers_logits(model_dir)
    ours = generate(model_dir, requests_of(prompts, tokens), EngineConfig(chunk_tokens=48))
    for key, prompt in prompts.items():
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ours[key]])).logits[0]
            assert shortfall(logits, prompt, ours[key]) <= TIE
            assert torch.allclose(Teacher(model_dir).logits([*prompt, *ours[key]]), logits, atol=1e-3, rtol=1e-3)


def test_the_tiny_model_agrees_with_transformers(tiny_dir: Path) -> None:
    prompts = prompts_of([1, 3, 40, 130])
    assert_agrees_with_transformers(tiny_dir, prompts)
    model = transformers_logits(tiny_dir)
    ours = generate(tiny_dir, requests_of(prompts, 24))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = model.generate(torch.tensor([prompts[2]]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert ours[2] == theirs[0, 40:].tolist()


SHAPE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "llama3-rope": ("Llama", {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500_000.0}}),
    "linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}}),
    "attention-bias": ("Llama", {"attention_bias": True, "num_key_value_heads": 4}),
    "one-kv-head": ("Llama", {"num_key_value_heads": 1}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_family_agrees_with_transformers(family: str, tmp_path: Path) -> None:
    kind, extra = FAMILIES[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(7)
        config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **extra})
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path)
    assert_agrees_with_transformers(tmp_path, prompts_of([1, 9, 50, 120], SHAPE["vocab_size"]), tokens=16)


def test_sharded_and_half_precision_checkpoints_load_as_float32(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(torch.bfloat16)
        model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert_agrees_with_transformers(tmp_path, prompts_of([5, 30], SHAPE["vocab_size"]), tokens=8)
