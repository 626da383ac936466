"""The memory estimate against processes that run an engine at its limits."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferry.engine.checkpoint import read_config
from inferry.engine.config import EngineConfig
from inferry.engine.memory import MemoryModel
from support.checkpoints import make_checkpoint
from support.children import TESTS, environment

SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mostly-weights": (
        "llama",
        {"vocab_size": 8_192, "hidden_size": 640, "intermediate_size": 2_048, "num_hidden_layers": 8},
        {"max_sequences": 8, "kv_tokens": 2_048},
    ),
    "mostly-kv-cache": (
        "qwen3",
        {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 16}
        | {"head_dim": 128, "intermediate_size": 256, "vocab_size": 2_048},
        {"max_sequences": 16, "kv_tokens": 2_048},
    ),
    "mostly-vocabulary": (
        "qwen2",
        {"vocab_size": 98_304, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4},
        {"max_sequences": 24, "kv_tokens": 4_096, "chunk_tokens": 512},
    ),
    "static": (
        "llama",
        {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16}
        | {"head_dim": 128, "intermediate_size": 256, "vocab_size": 2_048},
        {"mode": "static", "max_sequences": 32, "kv_tokens": 4_096},
    ),
}
"""Family, shape and engine of checkpoints of about 200 MB."""


@pytest.mark.parametrize("name", SHAPES)
def test_the_estimate_is_within_a_tenth_of_what_a_process_uses(name: str, tmp_path: Path) -> None:
    family, shape, options = SHAPES[name]
    make_checkpoint(tmp_path, family, shape={"max_position_embeddings": 1_024, "initializer_range": 0.02, **shape})
    config = EngineConfig(**options)
    command = [sys.executable, "-m", "support.memory_probe", str(tmp_path), msgspec.json.encode(config).decode()]
    done = subprocess.run(command, cwd=TESTS, env=environment(), capture_output=True, timeout=600, check=True)
    found: dict[str, int] = msgspec.json.decode(done.stdout)
    estimate = MemoryModel(read_config(tmp_path), "float32").estimate(config)
    padding = config.block_tokens * config.pads * MemoryModel(read_config(tmp_path), "float32").kv_token_bytes
    assert (estimate.weights, estimate.kv_cache + padding) == (found["weights"], found["kv_cache"])
    assert estimate.total == pytest.approx(found["peak"], rel=0.1)
    assert estimate.total - estimate.runtime == pytest.approx(found["peak"] - found["runtime"], rel=0.1)
    # Loading holds the loaded weights and little else.
    assert found["load_peak"] - found["runtime"] < 1.3 * found["weights"]
