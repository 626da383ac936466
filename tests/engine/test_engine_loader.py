"""Checkpoints that the engine cannot run exactly are refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from inferry.engine.loader import UnsupportedModel, load_model, read_config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "architecture"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"sliding_window": 1024}, "sliding_window"),
        ({"sliding_window": 1024, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_unsupported_model_settings_are_named(
    tiny_dir: Path, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    config = json.loads((tiny_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModel, match=named):
        read_config(tmp_path)


def test_a_sliding_window_beyond_the_context_is_accepted(tiny_dir: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 1024}))
    assert read_config(tmp_path, context_tokens=1024).context_tokens == 1024
    unused = {"sliding_window": 1024, "use_sliding_window": False}
    (tmp_path / "config.json").write_text(json.dumps(config | unused))
    assert read_config(tmp_path).context_tokens == 16_384


def test_several_eos_ids_come_from_the_generation_config(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_dir / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 6]}')
    assert read_config(tmp_path).eos_ids == {2, 6}


def test_missing_files_and_tensors_are_named(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        load_model(tmp_path)
    shutil.copy(tiny_dir / "config.json", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors"):
        load_model(tmp_path)
    config = json.loads((tiny_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    shutil.copy(tiny_dir / "model.safetensors", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.4"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.3"):
        load_model(tmp_path)
