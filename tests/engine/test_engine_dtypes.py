"""Engines in bfloat16 and float16, where the CPU can compute in them."""

import random
from pathlib import Path

import pytest
import torch

from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.dtypes import UnsupportedDtype, check_cpu_dtype, resolve_dtype
from inferry.engine.messages import Request
from inferry.engine.runner import TorchRunner
from support.checkpoints import make_checkpoint, reference_model
from support.engine_fixtures import drain, greedy, shortfall

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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen2-window-in-upper-layers", "qwen3"])
def test_half_precision_agrees_with_transformers_up_to_rounding(dtype: str, family: str, tmp_path: Path) -> None:
    try:
        check_cpu_dtype(dtype)
    except UnsupportedDtype as refused:
        pytest.skip(str(refused))
    make_checkpoint(tmp_path, family)
    config = EngineConfig(dtype=dtype, chunk_tokens=24, block_tokens=4, kv_tokens=2_048)  # type: ignore[arg-type]
    runner = TorchRunner.load(tmp_path, config)
    assert {cache.dtype for cache in runner._decoder._cache} == {getattr(torch, dtype)}
    core = EngineCore(runner, config)
    rng = random.Random(2)
    prompts = {key: [rng.randrange(3, 200) for _ in range(length)] for key, length in enumerate((1, 9, 30, 70, 80))}
    for key, prompt in prompts.items():
        assert core.add(Request(key, prompt, greedy(8), 0)) is None
    model = reference_model(tmp_path)
    for key, output in drain(core).items():
        with torch.inference_mode():
            logits = model(torch.tensor([prompts[key] + output])).logits[0]
        assert shortfall(logits, prompts[key], output) <= ROUNDING[dtype]
