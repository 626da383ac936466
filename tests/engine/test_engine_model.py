"""The decoder against itself one at a time, and against transformers on the same checkpoint."""

import random
import warnings
from pathlib import Path

import pytest
import torch

from inferry.domain.lanes import Lane
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.runner import TorchRunner
from support.checkpoints import reference_model
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
            cache[:, theirs] += noise
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


def assert_agrees_with_transformers(model_dir: Path, prompts: dict[int, list[int]], tokens: int = 24) -> None:
    """Same greedy tokens; where two are tied either is right, and what follows is judged by what it follows."""
    model = reference_model(model_dir)
    ours = generate(model_dir, requests_of(prompts, tokens), EngineConfig(chunk_tokens=48))
    for key, prompt in prompts.items():
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ours[key]])).logits[0]
            assert shortfall(logits, prompt, ours[key]) <= TIE
            assert torch.allclose(Teacher(model_dir).logits([*prompt, *ours[key]]), logits, atol=1e-3, rtol=1e-3)


def test_the_tiny_model_agrees_with_transformers(tiny_dir: Path) -> None:
    prompts = prompts_of([1, 3, 40, 130])
    assert_agrees_with_transformers(tiny_dir, prompts)
    model = reference_model(tiny_dir)
    ours = generate(tiny_dir, requests_of(prompts, 24))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = model.generate(torch.tensor([prompts[2]]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert ours[2] == theirs[0, 40:].tolist()
