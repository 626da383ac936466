"""Small random LoRA adapters, written as PEFT writes them, and models with an adapter merged into their weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import reference_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(
    directory: Path,
    base: Path,
    *,
    modules: list[str] | str = ALL,
    rank: int = 4,
    ranks: dict[str, int] | None = None,
    seed: int = 1,
    spread: float = 0.15,
    **settings: Any,
) -> Path:
    """An adapter of every layer of the base model. `ranks`: by module, others than `rank`."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    stored = load_file(base / "model.safetensors")
    for name, weight in sorted(stored.items()):
        module = name.removesuffix(".weight")
        leaf = module.rpartition(".")[2]
        if leaf not in ALL or (isinstance(modules, list) and leaf not in modules) or not name.endswith(".weight"):
            continue
        own = (ranks or {}).get(leaf, rank)
        outputs, inputs = weight.shape
        for kind, shape in (("A", (own, inputs)), ("B", (outputs, own))):
            values = torch.randn(shape, generator=generator) * spread
            tensors[f"base_model.model.{module}.lora_{kind}.weight"] = values
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config | settings))
    return directory


def merged_model(base: Path, adapter: Path) -> Any:
    """transformers' model of the checkpoint with the adapter in its weights, as PEFT merges it."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    model = reference_model(base)
    parameters = dict(model.named_parameters())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if ".lora_A." in name]:
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        leaf, rank = module.rpartition(".")[2], len(a)
        alpha = config.get("alpha_pattern", {}).get(leaf, config["lora_alpha"])
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        with torch.no_grad():
            parameters[f"{module}.weight"] += scale * (b @ a)
    return model
