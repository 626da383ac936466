"""The memory estimate against a GPU: `python -m benchmarks.engine_gpu_memory` on a host with CUDA.

Three shapes with random weights. For each: the KV cache that fills 25 % and 80 % of the device by the estimate, and
then what the device has allocated once graphs are captured and sequences have been sampled. Exits with 1 if an estimate
is off by more than 10 %.
"""

import gc
import importlib
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from inferry.domain.sampling import Sampling
from inferry.engine.checkpoint import read_config
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.memory import MemoryModel, fitted
from inferry.engine.messages import Request
from inferry.engine.model import ModelConfig

_LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131_072, "dtype": "bfloat16"}
SHAPES = {
    "8B": {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8},
    "1B": {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_attention_heads": 32, "num_key_value_heads": 8},
    "3B": {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36}
    | {"num_attention_heads": 16, "num_key_value_heads": 2},
}
SHARES = (0.25, 0.8)
_TOLERANCE = 0.1


def used_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def run(model: ModelConfig, config: EngineConfig, gpu: Any, weights: Any) -> tuple[int, int]:
    """Bytes that the device has allocated after steps at the engine's limits, and those of captured graphs."""
    runner = gpu.build_runner(model, weights, config, torch.device("cuda"))
    core = EngineCore(runner, config)
    for key in range(config.max_sequences):
        prompt = [(7 * key + at) % model.vocab_size for at in range(512)]
        core.add(Request(key, prompt, Sampling(temperature=1.0, top_p=0.9, max_tokens=16, ignore_eos=True), 0))
    while core.has_work:
        core.step()
    return used_bytes(), int(runner.graph_bytes)


def check(name: str, shape: dict[str, int], share: float) -> bool:
    gpu = importlib.import_module("inferry.engine.gpu.loading")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_LLAMA | shape))
        model = read_config(Path(folder), context_tokens=32_768)
    memory = MemoryModel(model, "bfloat16", "cuda")
    runtime = used_bytes()
    _, total = torch.cuda.mem_get_info()
    limits = EngineConfig(kv_tokens="auto", max_sequences=256, chunk_tokens=2_048, memory_share=share)
    config = fitted(memory, limits, total, total - runtime)
    make = importlib.import_module("inferry.engine.gpu.weights").random_weights
    used, graphs = run(model, config, gpu, make(model, torch.bfloat16, torch.device("cuda")))
    estimate = memory.estimate(config)
    error = estimate.total / used - 1
    figures = {"kv_tokens": config.kv_tokens, "used": used, "runtime": runtime, "graphs": graphs, "error": error}
    parts = {
        part: getattr(estimate, part) for part in ("weights", "kv_cache", "workspace", "graphs", "runtime", "total")
    }
    print(json.dumps({"shape": name, "share": share, **figures, "estimate": parts}), flush=True)
    return abs(error) <= _TOLERANCE


def main() -> int:
    torch.zeros(1, device="cuda")
    outcomes = []
    for name, share in itertools.product(SHAPES, SHARES):
        outcomes.append(check(name, SHAPES[name], share))
        gc.collect()
        torch.cuda.empty_cache()
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
