"""Engines in bfloat16 and float16, where the CPU can compute in them."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from inferry.domain.workers import EngineMode
from inferry.engine.config import Dtype, EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.dtypes import UnsupportedDtype, check_cpu_dtype, resolve_dtype
from inferry.engine.messages import Request
from inferry.engine.runner import TorchRunner
from support.adapters import make_adapter, merged_model
from support.checkpoints import FAMILIES, make_checkpoint, reference_model
from support.engine_fixtures import drain, greedy, shortfall

MODES: tuple[EngineMode, ...] = ("continuous", "hybrid", "dynamic", "static")
PREEMPTED = ("qwen2-window-in-upper-layers", "llama-mqa-tied")
ROUNDING = {"bfloat16": 0.25, "float16": 0.05}
"""How far below the best logit a chosen token may be: the logits of these checkpoints are of the size of 10."""


def test_auto_is_float32_on_a_cpu_and_the_checkpoints_own_on_a_gpu() -> None:
    assert resolve_dtype("auto", "bfloat16", "cpu") == "float32"
    assert resolve_dtype("auto", "bfloat16", "cuda") == "bfloat16"
    assert resolve_dtype("float16", "bfloat16", "cuda") == "float16"


def test_a_dtype_that_ends_the_probe_is_refused_by_name() -> None:
    check_cpu_dtype("float32", lambda dtype: -4)
    check_cpu_dtype("float16", lambda dtype: 0)
    with pytest.raises(UnsupportedDtype, match=r"bfloat16: this CPU cannot .* status -4"):
        check_cpu_dtype("bfloat16", lambda dtype: -4)


def refusal(dtype: str) -> str | None:
    """Why this CPU cannot compute in the dtype."""
    try:
        check_cpu_dtype(dtype)
    except UnsupportedDtype as refused:
        return str(refused)
    return None


@pytest.fixture(params=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> Dtype:
    chosen: Dtype = request.param
    if refused := refusal(chosen):
        pytest.skip(refused)
    return chosen


class Reference(NamedTuple):
    directory: Path
    model: Any


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return Reference(directory, reference_model(directory))


def requests_of(lengths: tuple[int, ...], new_tokens: int) -> dict[int, Request]:
    rng = random.Random(2)
    return {
        key: Request(key, [rng.randrange(3, 200) for _ in range(length)], greedy(new_tokens), 0)
        for key, length in enumerate(lengths)
    }


def assert_best_up_to_rounding(model: Any, dtype: str, prompt: list[int], output: list[int]) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0]
    assert shortfall(logits, prompt, output) <= ROUNDING[dtype]


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_agrees_with_transformers_up_to_rounding(
    reference: Reference, dtype: Dtype, mode: EngineMode
) -> None:
    config = EngineConfig(mode=mode, dtype=dtype, chunk_tokens=24, block_tokens=4, kv_tokens=2_048)
    runner = TorchRunner.load(reference.directory, config)
    assert {cache.dtype for cache in runner._decoder._cache} == {getattr(torch, dtype)}
    core = EngineCore(runner, config)
    requests = requests_of((1, 9, 30, 52), 6)
    for request in requests.values():
        assert core.add(request) is None
    for key, output in drain(core).items():
        assert len(output) == 6
        assert_best_up_to_rounding(reference.model, dtype, requests[key].prompt_ids, output)


@pytest.mark.parametrize("reference", PREEMPTED, indirect=True)
@pytest.mark.parametrize("mode", MODES)
def test_half_precision_after_a_preemption(reference: Reference, dtype: Dtype, mode: EngineMode) -> None:
    config = EngineConfig(mode=mode, dtype=dtype, chunk_tokens=24, block_tokens=4, kv_tokens=64)
    core = EngineCore(TorchRunner.load(reference.directory, config), config)
    requests = requests_of((1, 9, 30), 20)
    for request in requests.values():
        assert core.add(request) is None
    outputs = drain(core)
    assert core.stats().preemptions > 0
    for key, output in outputs.items():
        assert len(output) == 20
        assert_best_up_to_rounding(reference.model, dtype, requests[key].prompt_ids, output)


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_with_adapters(tmp_path: Path, dtype: Dtype, mode: EngineMode) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3")
    adapter = make_adapter(tmp_path / "adapter", base)
    config = EngineConfig(mode=mode, dtype=dtype, chunk_tokens=24, block_tokens=4, kv_tokens=2_048, max_adapters=1)
    runner = TorchRunner.load(base, config)
    assert runner.adapters is not None
    runner.adapters.load(1, adapter)
    core = EngineCore(runner, config)
    requests = requests_of((1, 9, 30, 52), 6)
    for key, request in requests.items():
        assert core.add(replace(request, adapter=key % 2, batch=key % 2)) is None
    models = reference_model(base), merged_model(base, adapter)
    for key, output in drain(core).items():
        assert_best_up_to_rounding(models[key % 2], dtype, requests[key].prompt_ids, output)
