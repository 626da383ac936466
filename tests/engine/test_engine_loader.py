"""Checkpoints that the engine cannot run exactly are refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferry.engine import loader
from inferry.engine.checkpoint import UnsupportedModel, read_config
from inferry.engine.loader import load_model
from support.checkpoints import make_checkpoint


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "architecture"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "layer_types chunked_attention"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 4 layers"),
        ({"rope_scaling": {"type": "linear"}}, "rope type linear without factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "without high_freq_factor"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters by layer type"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
        ({"hidden_size": None}, "no number for hidden_size"),
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


def test_every_unsupported_setting_is_named(tiny_dir: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_bias": True, "hidden_act": "gelu"}))
    with pytest.raises(UnsupportedModel, match="hidden_act gelu; mlp_bias"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json is not"):
        read_config(tmp_path)


SLIDING = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "change", "layers"),
    [
        ("Mistral", {}, {0, 1, 2, 3}),
        ("Mistral", {"layer_types": SLIDING}, {1, 3}),
        ("Mistral", {"sliding_window": 16_384}, set()),
        ("Mistral", {"sliding_window": None}, set()),
        ("Qwen2", {"use_sliding_window": False, "max_window_layers": 0}, set()),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 3}, {3}),
        ("Qwen2", {"use_sliding_window": True}, set()),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": 0, "layer_types": SLIDING}, {1, 3}),
        ("Llama", {}, set()),
    ],
)
def test_a_window_limits_the_layers_that_it_limits_in_transformers(
    tiny_dir: Path, tmp_path: Path, family: str, change: dict[str, Any], layers: set[int]
) -> None:
    config = json.loads((tiny_dir / "config.json").read_text())
    stored = config | {"architectures": [f"{family}ForCausalLM"], "sliding_window": 1024} | change
    (tmp_path / "config.json").write_text(json.dumps(stored))
    read = read_config(tmp_path)
    assert read.sliding_layers == layers
    assert read.window == (1024 if layers else None)
    assert read_config(tmp_path, context_tokens=1024).window is None


def test_yarn_extends_a_context_that_names_only_the_trained_positions(tiny_dir: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_dir / "config.json").read_text()) | {"max_position_embeddings": 32_768}
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": rope}))
    assert read_config(tmp_path).context_tokens == 131_072
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}))
    assert read_config(tmp_path).context_tokens == 32_768


def test_a_tensor_that_holds_no_floats_is_named(tiny_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_dir / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(768, 256, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(tiny_dir / "config.json", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.2\.mlp\.up_proj\.weight is stored as I8"):
        load_model(tmp_path)


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


@pytest.mark.parametrize("family", ["llama-attention-bias", "qwen3"])
def test_slices_of_any_size_load_the_same_weights(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, family)
    _, whole = load_model(tmp_path)
    monkeypatch.setattr(loader, "_MAPPED_VALUES", 5_000)
    monkeypatch.setattr(loader, "_SLICE_VALUES", 1_500)
    _, sliced = load_model(tmp_path)
    for one, other in zip(tensors_of(whole), tensors_of(sliced), strict=True):
        assert torch.equal(one, other)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value if isinstance(value, tuple) else vars(value).values() if value is not None else ()
    return [tensor for part in parts for tensor in tensors_of(part)]
