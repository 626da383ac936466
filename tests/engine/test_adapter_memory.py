"""The memory that is reserved for adapters is what they take."""

from pathlib import Path

import pytest
import torch

from inferry.engine.checkpoint import read_config
from inferry.engine.config import EngineConfig
from inferry.engine.cpu_adapters import CpuAdapters
from inferry.engine.gpu.adapters import GpuAdapters
from inferry.engine.memory import MemoryModel, OutOfMemory, fitted
from support.adapters import make_adapter
from support.checkpoints import make_checkpoint


@pytest.mark.parametrize("family", ["llama", "qwen3", "llama-mha-head-dim"])
@pytest.mark.parametrize("rank", [8, 16, 20])
def test_reserved_bytes_are_those_of_the_tensors(family: str, rank: int, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", family)
    model = read_config(base)
    config = EngineConfig(max_adapters=3, max_adapter_rank=rank)
    on_cpu = CpuAdapters(base, model, config, torch.float32)
    on_cpu.load(1, make_adapter(tmp_path / "adapter", base, rank=rank))
    found = sum(
        one.nbytes for layer in on_cpu._loaded[1] for matrices in layer.values() for one in vars(matrices).values()
    )
    assert MemoryModel(model, "float32").adapter_bytes(rank) == found
    on_gpu = GpuAdapters(model, config, 64, torch.bfloat16, torch.device("cpu"))
    found = sum(stack.a.nbytes + stack.b.nbytes for layer in on_gpu._layers for stack in layer.values())
    memory = MemoryModel(model, "bfloat16", "cuda")
    assert 3 * memory.adapter_bytes(rank) == found
    estimates = [memory.estimate(EngineConfig(max_adapters=count, max_adapter_rank=rank)) for count in (0, 3)]
    assert estimates[1].adapters == estimates[1].total - estimates[0].total == found


def test_the_kv_cache_gets_what_adapters_leave(tmp_path: Path) -> None:
    model = read_config(make_checkpoint(tmp_path, "llama"))
    memory = MemoryModel(model, "float32")
    config = EngineConfig(kv_tokens="auto", max_sequences=1_000)
    budget = memory.estimate(EngineConfig(kv_tokens=4_096, max_sequences=1_000)).total
    plain = fitted(memory, config, 2 * budget, budget)
    slots = EngineConfig(kv_tokens="auto", max_sequences=1_000, max_adapters=2)
    assert fitted(memory, slots, 2 * budget, budget).blocks < plain.blocks
    with pytest.raises(OutOfMemory):
        fitted(memory, EngineConfig(kv_tokens=4_096, max_sequences=1_000, max_adapters=2), budget, budget)
