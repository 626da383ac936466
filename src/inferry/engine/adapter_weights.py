"""Reads the weights of LoRA adapters from PEFT directories."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inferry.engine.model import ModelConfig
from inferry.engine.peft_config import (
    MODULES,
    WEIGHTS_FILE,
    PeftConfig,
    UnsupportedAdapter,
    module_name,
    read_peft_config,
)

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj\.lora_([AB])\.weight"
)
PROJECTIONS = {"qkv": ("q", "k", "v"), "out": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""The matrices of a layer, as the engine joins them, and the modules that each consists of."""


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one module: `b` [out, rank] times `a` [rank, in]. `b` includes the scale; float32."""

    a: Tensor
    b: Tensor


Adapter = tuple[Mapping[str, LowRank], ...]
"""By layer, the changed modules."""


def module_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each module."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "q": (model.hidden, queries),
        "k": (model.hidden, keys),
        "v": (model.hidden, keys),
        "o": (queries, model.hidden),
        "gate": (model.hidden, model.intermediate),
        "up": (model.hidden, model.intermediate),
        "down": (model.intermediate, model.hidden),
    }


def read_adapter(directory: Path, model: ModelConfig, max_rank: int) -> Adapter:
    """Raises UnsupportedAdapter if it does not fit the model, or its rank exceeds `max_rank`."""
    config = read_peft_config(directory)
    tensors = _tensors(directory / WEIGHTS_FILE)
    shapes = module_shapes(model)
    layers: list[dict[str, LowRank]] = []
    for layer in range(model.layers):
        targets = [module for module in MODULES if config.targets(layer, module)]
        layers.append({module: _module(config, tensors, layer, module, shapes[module]) for module in targets})
        ranks = [len(one.a) for one in layers[-1].values()]
        if ranks and max(ranks) > max_rank:
            raise UnsupportedAdapter(f"rank {max(ranks)} exceeds max_adapter_rank {max_rank}")
    if tensors:
        layer, module, kind = min(tensors)
        raise UnsupportedAdapter(
            f"{module_name(layer, module)}.lora_{kind}: no module of the model that target_modules names"
        )
    if not any(layers):
        raise UnsupportedAdapter("target_modules names no module of the model")
    return tuple(layers)


def _tensors(path: Path) -> dict[tuple[int, str, str], Tensor]:
    """Tensors by layer, module and kind (`A` or `B`)."""
    found: dict[tuple[int, str, str], Tensor] = {}
    try:
        with safe_open(str(path), framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a dict)
                match = _TENSOR.fullmatch(name)
                if match is None or match[2] not in MODULES:
                    raise UnsupportedAdapter(f"tensor {name} is not supported")
                tensor = stored.get_tensor(name)
                if not tensor.is_floating_point():
                    raise UnsupportedAdapter(f"tensor {name} is stored as {tensor.dtype}")
                found[int(match[1]), match[2], match[3]] = tensor.to(torch.float32)
    except SafetensorError as error:
        raise UnsupportedAdapter(f"{path} cannot be read: {error}") from None
    return found


def _module(
    config: PeftConfig, tensors: dict[tuple[int, str, str], Tensor], layer: int, module: str, shape: tuple[int, int]
) -> LowRank:
    rank, (inputs, outputs) = config.rank(layer, module), shape
    read: list[Tensor] = []
    for kind, expected in (("A", (rank, inputs)), ("B", (outputs, rank))):
        name = f"{module_name(layer, module)}.lora_{kind}"
        tensor = tensors.pop((layer, module, kind), None)
        if tensor is None:
            raise UnsupportedAdapter(f"the adapter has no tensor {name}, which target_modules names")
        if tensor.shape != expected:
            raise UnsupportedAdapter(
                f"{name} is {list(tensor.shape)}; the model and adapter_config.json need {list(expected)}"
            )
        read.append(tensor)
    return LowRank(read[0], read[1] * config.scale(layer, module))
