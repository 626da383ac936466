"""PEFT directories: what is read, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferry.engine.adapter_weights import read_adapter
from inferry.engine.checkpoint import read_config
from inferry.engine.peft_config import PeftConfig, UnsupportedAdapter, read_peft_config
from support.adapters import ALL, make_adapter
from support.checkpoints import make_checkpoint

BASE = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
MODULES = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias all"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules embed_tokens"),
        ({"target_modules": ["lm_head"]}, "target_modules lm_head"),
        ({"target_modules": r".*(q_proj|lm_head)"}, "target_modules lm_head"),
        ({"target_modules": "(q_proj"}, "target_modules is no regular expression"),
        ({"target_modules": []}, "target_modules names no module"),
        ({"target_modules": None}, "target_modules names no module"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4"),
        ({"r": 0}, "ranks must be numbers above 0"),
        ({"rank_pattern": {"q_proj": "8"}}, "ranks must be numbers above 0"),
        ({"rank_pattern": [8]}, "rank_pattern is not a JSON object"),
        ({"rank_pattern": {"[": 8}}, "rank_pattern has a key that is no regular expression"),
        ({"lora_alpha": None}, "lora_alpha and alpha_pattern must be numbers"),
        ({"layers_to_transform": "x"}, "layers_to_transform must be a number"),
    ],
)
def test_what_is_unsupported_is_refused_by_name(
    base: Path, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    directory = make_adapter(tmp_path / "adapter", base)
    (directory / "adapter_config.json").write_text(json.dumps(BASE | settings))
    with pytest.raises(UnsupportedAdapter) as refused:
        read_peft_config(directory)
    assert reason in str(refused.value)


def test_every_reason_is_named_at_once(base: Path, tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "adapter", base, use_dora=True, bias="lora_only")
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(UnsupportedAdapter, match=r"use_dora.*; bias lora_only.*; .*no adapter_model.safetensors"):
        read_peft_config(directory)


@pytest.mark.parametrize(("text", "reason"), [("{", "is not JSON"), ("[]", "is not a JSON object")])
def test_a_broken_config_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(UnsupportedAdapter, match="no adapter_config"):
        read_peft_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(UnsupportedAdapter, match=reason):
        read_peft_config(tmp_path)


def targets(layers: int = 3, **settings: Any) -> list[str]:
    config = PeftConfig(BASE | settings)
    return [f"{layer}.{module}" for layer in range(layers) for module in MODULES if config.targets(layer, module)]


def test_modules_are_chosen_by_peft_s_rules() -> None:
    assert targets(1, target_modules=["q_proj", "mlp.down_proj"]) == ["0.q", "0.down"]
    assert targets(1, target_modules="all-linear") == [f"0.{module}" for module in MODULES]
    assert targets(target_modules=r"model\.layers\.[02]\..*up_proj") == ["0.up", "2.up"]
    assert targets(target_modules=r"layers\.1\.self_attn\.k_proj") == ["1.k"]  # the names of a base model
    assert targets(target_modules="q_proj") == []  # a regular expression of the whole name
    assert targets(layers_to_transform=[0, 2]) == ["0.q", "0.v", "2.q", "2.v"]
    assert targets(layers_to_transform=1) == ["1.q", "1.v"]
    assert targets(1, exclude_modules=["v_proj"]) == ["0.q"]


def test_ranks_and_scales() -> None:
    config = PeftConfig(
        BASE | {"rank_pattern": {"v_proj": 16, r"layers\.1\.mlp\.up_proj": 2}, "alpha_pattern": {"self_attn.k_proj": 1}}
    )
    assert [config.rank(0, module) for module in ("q", "v", "up")] == [4, 16, 4]
    assert config.rank(1, "up") == 2
    assert [config.scale(0, module) for module in ("q", "v", "k")] == [2.0, 0.5, 0.25]
    assert PeftConfig(BASE | {"use_rslora": True}).scale(0, "q") == 4.0


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or remove tensors, by names with `_` for `.`."""
    path = directory / "adapter_model.safetensors"
    stored = load_file(path)
    for name, tensor in tensors.items():
        full = f"base_model.model.model.layers.0.{name.replace('__', '.')}.weight"
        stored.pop(full, None)
        if tensor is not None:
            stored[full] = tensor
    save_file(stored, path)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"self_attn__q_proj__lora_A": None}, "no tensor model.layers.0.self_attn.q_proj.lora_A"),
        (
            {"self_attn__k_proj__lora_B": torch.ones(64, 4)},
            r"model.layers.0.self_attn.k_proj.lora_B is \[64, 4\]; .* need \[32, 4\]",
        ),
        ({"self_attn__q_proj__lora_A": torch.ones(8, 64)}, r"q_proj.lora_A is \[8, 64\]; .* need \[4, 64\]"),
        ({"self_attn__q_proj__lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector.weight is not supported"),
        ({"self_attn__q_proj__lora_A": torch.ones(4, 64, dtype=torch.int8)}, "stored as torch.int8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    base: Path, tmp_path: Path, tensors: dict[str, torch.Tensor | None], reason: str
) -> None:
    directory = make_adapter(tmp_path / "adapter", base)
    change(directory, **tensors)
    with pytest.raises(UnsupportedAdapter, match=reason):
        read_adapter(directory, read_config(base), 16)


def test_tensors_of_other_modules_or_layers_are_refused(base: Path, tmp_path: Path) -> None:
    model = read_config(base)
    directory = make_adapter(tmp_path / "adapter", base, layers_to_transform=[0])
    with pytest.raises(UnsupportedAdapter, match=r"layers.1.mlp.down_proj.lora_A: no module of the model"):
        read_adapter(directory, model, 16)
    directory = make_adapter(tmp_path / "none", base, modules=["q_proj"], layers_to_transform=[7])
    with pytest.raises(UnsupportedAdapter, match=r"layers.0.self_attn.q_proj.lora_A: no module of the model"):
        read_adapter(directory, model, 16)


def test_a_rank_beyond_the_limit_is_refused(base: Path, tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "adapter", base, rank=8)
    with pytest.raises(UnsupportedAdapter, match="rank 8 exceeds max_adapter_rank 4"):
        read_adapter(directory, read_config(base), 4)
    layers = read_adapter(directory, read_config(base), 8)
    assert [sorted(layer) for layer in layers] == [sorted(name.removesuffix("_proj") for name in ALL)] * 2


def test_a_file_that_is_no_safetensors_is_refused(base: Path, tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "adapter", base)
    (directory / "adapter_model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(UnsupportedAdapter, match="cannot be read"):
        read_adapter(directory, read_config(base), 16)
