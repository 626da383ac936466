"""The memory estimate against what is really allocated, and what follows from it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from inferry.engine.checkpoint import read_config
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.device_memory import DeviceMemory, cpu_memory
from inferry.engine.loader import load_model
from inferry.engine.memory import MAX_COPIED_BLOCKS, MemoryModel, OutOfMemory, fitted
from inferry.engine.messages import Request
from inferry.engine.model import Decoder
from inferry.engine.runner import TorchRunner
from support.checkpoints import FAMILIES, make_checkpoint
from support.engine_fixtures import drain, greedy
from support.memory_probe import tensor_bytes
from support.pooling_models import embedding_model, scoring_model

MIB = 1 << 20


def a_memory_model(directory: Path, dtype: str = "float32") -> MemoryModel:
    return MemoryModel(read_config(directory), dtype)


def assert_exact(directory: Path, dtype: str) -> None:
    config, weights = load_model(directory, dtype=getattr(torch, dtype))
    engine = EngineConfig(kv_tokens=100, block_tokens=16)
    cache = Decoder(config, weights, blocks=engine.blocks, block_tokens=16)._cache
    estimate = a_memory_model(directory, dtype).estimate(engine)
    assert (estimate.weights, estimate.kv_cache) == (tensor_bytes(weights), tensor_bytes(cache))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_cache_of_every_family_are_exact(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    for dtype in ("float32", "bfloat16"):
        assert_exact(tmp_path, dtype)


def test_weights_of_models_without_a_head_are_exact(tmp_path: Path) -> None:
    heads = scoring_model(tmp_path / "score"), scoring_model(tmp_path / "labels", labels=3)
    for directory in (embedding_model(tmp_path / "embed"), *heads):
        assert_exact(directory, "float32")


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> MemoryModel:
    return a_memory_model(make_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


def test_kv_tokens_that_do_not_fit_are_refused_with_the_difference(memory: MemoryModel) -> None:
    config = EngineConfig(kv_tokens=65_536, max_sequences=8)
    need = memory.estimate(config)
    assert fitted(memory, config, need.total, need.total) is config
    available = need.total - 16 * MIB
    with pytest.raises(OutOfMemory, match=r"^kv_tokens 65,536 need .*, 0\.02 GiB more than") as caught:
        fitted(memory, config, need.total, available)
    fits = int(str(caught.value).split("kv_tokens of ")[1].split(" ")[0].replace(",", ""))
    assert 0 < fits < 65_536
    assert memory.estimate(EngineConfig(kv_tokens=fits, max_sequences=8)).total <= available
    with pytest.raises(OutOfMemory, match="no KV cache fits beside the weights"):
        fitted(memory, config, need.total, need.weights)


def test_automatic_kv_tokens_fill_the_share_of_the_memory(memory: MemoryModel) -> None:
    config = EngineConfig(kv_tokens="auto", max_sequences=4_096, memory_share=0.5)
    total = 2 * (memory.estimate(EngineConfig(kv_tokens=32, max_sequences=4_096)).total + 40 * MIB)
    chosen = fitted(memory, config, total, total)
    assert isinstance(chosen.kv_tokens, int)
    assert chosen.kv_tokens % config.block_tokens == 0
    used = [
        memory.estimate(msgspec.structs.replace(chosen, kv_tokens=chosen.kv_tokens + more)).total for more in (0, 32)
    ]
    assert used[0] <= total / 2 < used[1]


def test_automatic_kv_tokens_stay_within_what_is_available_and_what_sequences_can_use(memory: MemoryModel) -> None:
    config = EngineConfig(kv_tokens="auto", max_sequences=4_096)
    available = memory.estimate(EngineConfig(kv_tokens=32, max_sequences=4_096)).total + 40 * MIB
    scarce = fitted(memory, config, 1 << 40, available)
    assert memory.estimate(scarce).total <= available
    assert fitted(memory, EngineConfig(kv_tokens="auto", max_sequences=3), 1 << 40, 1 << 40).kv_tokens == 3 * 256
    with pytest.raises(OutOfMemory, match=r"more than the 0\.00 GiB available"):
        fitted(memory, config, 1 << 40, 0)


def test_the_batch_grows_with_the_budget_and_shrinks_with_the_calls(memory: MemoryModel) -> None:
    config = EngineConfig()
    base = memory.estimate(EngineConfig(kv_tokens=32, max_sequences=1)).total
    sizes = [memory.size(config, base + more * MIB, 200) for more in (0, 4, 16, 1_000)]
    assert sizes[0] is not None
    assert (sizes[0].max_sequences, sizes[0].kv_tokens, sizes[0].context_tokens) == (1, 32, 32)
    sequences = [size.max_sequences for size in sizes if size is not None]
    assert sequences == sorted(sequences)
    assert sequences[-1] == 256
    for size, more in zip(sizes, (0, 4, 16, 1_000), strict=True):
        assert size is not None
        assert size.estimate.total <= base + more * MIB
        assert size.context_tokens <= 256
    longer = memory.size(config, base + 16 * MIB, 50)
    assert longer is not None
    assert longer.max_sequences > sequences[2]
    assert memory.size(config, base - 1, 200) is None


def test_captured_graphs_take_room_from_the_kv_cache(memory: MemoryModel, tmp_path: Path) -> None:
    with_graphs = MemoryModel(memory._model, "float32", graph_bytes=10 * MIB)
    config = EngineConfig(max_sequences=4_096)
    budget = memory.estimate(config).total
    lost = memory.kv_tokens(config, budget) - with_graphs.kv_tokens(config, budget)
    assert lost * memory.kv_token_bytes == pytest.approx(10 * MIB, rel=0.5)


def test_padded_decodes_copy_a_bounded_part_of_the_cache(tmp_path: Path) -> None:
    """Eight calls of 50 blocks each; every row of a padded step reads as many as the longest."""
    make_checkpoint(tmp_path, "llama")
    config = EngineConfig(mode="static", block_tokens=4, kv_tokens=2_000, max_sequences=8, chunk_tokens=1_600)
    runner = TorchRunner.load(tmp_path, config)
    decoder = runner._decoder
    core = EngineCore(runner, config)
    for key in range(8):
        assert core.add(Request(key, [key + 3] * 196, greedy(4), 0)) is None
    assert all(len(output) == 4 for output in drain(core).values())
    at_once = MAX_COPIED_BLOCKS // 50 * 50
    assert len(decoder._copied) == 2 * at_once * decoder.config.tiles  # twice: room to grow
    copied = at_once * config.block_tokens * MemoryModel(decoder.config, "float32").kv_token_bytes
    assert MemoryModel(decoder.config, "float32").estimate(config).workspace > copied // decoder.config.layers


MEMINFO = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n"


def test_the_memory_of_the_machine_is_limited_by_its_control_group() -> None:
    files = {"/proc/meminfo": MEMINFO}
    assert cpu_memory(files.get) == DeviceMemory(1_000 << 10, 600 << 10)
    files |= {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "1\n"}
    assert cpu_memory(files.get) == DeviceMemory(1_000 << 10, 600 << 10)
    files |= {"/sys/fs/cgroup/memory.max": "500000\n", "/sys/fs/cgroup/memory.current": "300000\n"}
    assert cpu_memory(files.get) == DeviceMemory(500_000, 200_000)
    files["/sys/fs/cgroup/memory.stat"] = "anon 1\ninactive_file 1000\nactive_file 500\n"
    assert cpu_memory(files.get) == DeviceMemory(500_000, 201_500)
    with pytest.raises(OSError, match="meminfo"):
        cpu_memory(lambda path: None)


def test_this_machine_has_memory() -> None:
    total, available = cpu_memory()
    assert 0 < available <= total


PUBLIC: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        8_030_261_248,
        {"architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "hidden_size": 4_096}
        | {"intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
    "Qwen2.5-7B": (
        7_615_616_512,
        {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 152_064, "hidden_size": 3_584}
        | {"intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    ),
    "Qwen3-0.6B": (
        596_049_920,
        {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": 1_024, "head_dim": 128}
        | {"intermediate_size": 3_072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"tie_word_embeddings": True},
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {"architectures": ["MistralForCausalLM"], "vocab_size": 32_000, "hidden_size": 4_096}
        | {"intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
}
"""Published numbers of parameters, and what `config.json` says."""


@pytest.mark.parametrize("name", PUBLIC)
def test_weights_on_a_gpu_are_the_published_parameters(name: str, tmp_path: Path) -> None:
    parameters, raw = PUBLIC[name]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 4_096, "dtype": "bfloat16"}))
    assert MemoryModel(read_config(tmp_path), "bfloat16", "cuda").weight_bytes == 2 * parameters
