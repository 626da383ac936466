"""Embeddings and scores of the engine: against transformers, and against one sequence at a time."""

import json
import random
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inferry.domain.lanes import Lane
from inferry.domain.routes import Task
from inferry.domain.sampling import Sampling
from inferry.engine.checkpoint import UnsupportedModel, read_config
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.runner import TorchRunner
from support.engine_fixtures import drain, generate, greedy
from support.pooling_models import embedding_model, scoring_model

LENGTHS = [1, 2, 3, 7, 20, 33, 64, 65, 150, 700]


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(7, 4096) for _ in range(length)] for length in lengths]


def a_core(model_dir: Path, **config: Any) -> EngineCore:
    settings = EngineConfig(**config)
    return EngineCore(TorchRunner.load(model_dir, settings), settings)


def pooled(core: EngineCore, inputs: Sequence[list[int]]) -> list[tuple[float, ...]]:
    """The results of all inputs, added at once."""
    for key, ids in enumerate(inputs):
        assert core.add(Request(key, ids, Sampling(), Lane.P1, pooled=True)) is None
    found: dict[int, bytes] = {}
    while core.has_work:
        step = core.step()
        found |= dict(step.pooled)
        assert {end.account.key for end in step.ends} == {key for key, _ in step.pooled}
        assert all(end.account.output_tokens == 0 and end.account.gpu_seconds > 0 for end in step.ends)
    assert core.pool.free == core.pool.total
    return [struct.unpack(f"<{len(found[key]) // 4}f", found[key]) for key in range(len(inputs))]


def close(a: Any, b: Any) -> bool:
    return torch.allclose(torch.as_tensor(a), torch.as_tensor(b), atol=2e-5)


def reference(model_dir: Path, kind: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        return getattr(transformers, kind).from_pretrained(model_dir, dtype=torch.float32).eval()


@torch.inference_mode()
def hidden_of(model: Any, ids: list[int]) -> torch.Tensor:
    states: torch.Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("chunk_tokens", [16, 256, 4096])
def test_embeddings_are_the_normalised_mean_of_the_last_hidden_states(tiny_dir: Path, chunk_tokens: int) -> None:
    inputs = prompts()
    model = reference(tiny_dir, "AutoModel")
    found = pooled(a_core(tiny_dir, chunk_tokens=chunk_tokens), inputs)
    for ids, vector in zip(inputs, found, strict=True):
        expected = torch.nn.functional.normalize(hidden_of(model, ids).mean(0), dim=0)
        assert close(vector, expected)


def test_embeddings_beside_generating_sequences_change_neither(tiny_dir: Path) -> None:
    alone = pooled(a_core(tiny_dir), prompts())
    requests = [Request(key + 100, ids, greedy(12), Lane.P1) for key, ids in enumerate(prompts([5, 40, 90]))]
    texts = generate(tiny_dir, requests)
    core = a_core(tiny_dir)
    for request in requests:
        core.add(request)
    core.step()
    outputs: dict[int, list[int]] = {}
    found: dict[int, bytes] = {}
    for key, ids in enumerate(prompts()):
        core.add(Request(key, ids, Sampling(), Lane.P1, pooled=True))
    while core.has_work:
        step = core.step()
        found |= dict(step.pooled)
        for key, token in step.tokens:
            outputs.setdefault(key, []).append(token)
    for key, vector in enumerate(alone):
        assert close(struct.unpack("<256f", found[key]), vector)
    assert {key: tokens[-11:] for key, tokens in outputs.items()} == {key: texts[key][-11:] for key in texts}


def test_short_inputs_are_computed_in_one_step(tiny_dir: Path) -> None:
    core = a_core(tiny_dir)
    pooled(core, prompts([4] * 60))
    assert core.stats().steps == 1


def test_a_preempted_input_starts_again(tiny_dir: Path) -> None:
    inputs = prompts([700, 700])
    expected = pooled(a_core(tiny_dir), inputs)
    core = a_core(tiny_dir, kv_tokens=1024, chunk_tokens=4)
    core.add(Request(0, inputs[0], Sampling(), Lane.P1, pooled=True))
    core.step()
    core.add(Request(7, prompts([200])[0], greedy(200), Lane.P0))
    found: dict[int, bytes] = {}
    while core.has_work:
        found |= dict(core.step().pooled)
    assert core.stats().preemptions
    assert close(struct.unpack("<256f", found[0]), expected[0])


def test_a_base_model_embeds_and_does_not_generate(tmp_path: Path) -> None:
    directory = embedding_model(tmp_path / "base")
    assert read_config(directory).tasks == {Task.EMBED, Task.SCORE}
    found = pooled(a_core(directory), prompts())
    assert all(close(a, b) for a, b in zip(found, pooled(a_core(tmp_path / "random"), prompts()), strict=True))


def test_pooling_of_the_last_token_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    directory = embedding_model(tmp_path / "last", pooling="lasttoken")
    model = reference(directory, "AutoModel")
    for ids, vector in zip(prompts(), pooled(a_core(directory), prompts()), strict=True):
        assert close(vector, torch.nn.functional.normalize(hidden_of(model, ids)[-1], dim=0))


def test_a_classification_head_scores_the_last_token(tmp_path: Path) -> None:
    directory = scoring_model(tmp_path / "scores")
    assert read_config(directory).tasks == {Task.SCORE}
    model = reference(directory, "AutoModelForSequenceClassification")
    for ids, score in zip(prompts(), pooled(a_core(directory), prompts()), strict=True):
        with torch.inference_mode():
            assert close(score, torch.sigmoid(model(torch.tensor([ids])).logits[0]))


@pytest.mark.parametrize("is_multi_label", [False, True], ids=["one label of several", "each on its own"])
def test_a_head_with_several_labels_classifies_the_last_token(tmp_path: Path, is_multi_label: bool) -> None:
    problem = "multi_label_classification" if is_multi_label else "single_label_classification"
    names = {"0": "bug", "1": "praise", "2": "question"}
    directory = scoring_model(tmp_path / "labels", labels=3, problem_type=problem, id2label=names)
    config = read_config(directory)
    assert config.tasks == {Task.CLASSIFY}
    assert config.labels == ("bug", "praise", "question")
    model = reference(directory, "AutoModelForSequenceClassification")
    for ids, probs in zip(prompts(), pooled(a_core(directory), prompts()), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        assert close(probs, torch.sigmoid(logits) if is_multi_label else torch.softmax(logits, 0))


def test_labels_without_names_have_those_of_transformers(tmp_path: Path) -> None:
    assert read_config(scoring_model(tmp_path / "two", labels=2)).labels == ("LABEL_0", "LABEL_1")


def test_a_head_that_does_not_fit_its_labels_is_refused(tmp_path: Path) -> None:
    directory = scoring_model(tmp_path / "labels", labels=2, id2label={"0": "a", "1": "b", "2": "c"})
    with pytest.raises(UnsupportedModel, match="2 rows for 3 labels"):
        a_core(directory)


@pytest.mark.parametrize(("name", "make"), [("regression", "labels"), ("cls_token", "pooling")])
def test_other_heads_and_poolings_are_refused_by_name(tmp_path: Path, name: str, make: str) -> None:
    if make == "labels":
        directory = scoring_model(tmp_path / "model", labels=2, problem_type="regression")
    else:
        directory = embedding_model(tmp_path / "model", pooling="cls_token")
    with pytest.raises(UnsupportedModel, match=name):
        read_config(directory)


def test_a_model_with_matryoshka_dimensions_says_so(tmp_path: Path) -> None:
    directory = embedding_model(tmp_path / "model")
    assert not read_config(directory).has_dimensions
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"matryoshka_dimensions": [64, 128]}))
    assert read_config(directory).has_dimensions


def test_an_input_may_fill_the_context_and_not_exceed_it(tiny_dir: Path) -> None:
    core = a_core(tiny_dir, context_tokens=32)
    rejected = core.add(Request(0, [9] * 33, Sampling(), Lane.P1, pooled=True))
    assert rejected is not None
    assert rejected.too_long
    assert core.add(Request(1, [9] * 32, Sampling(), Lane.P1, pooled=True)) is None
    assert not drain(core)
