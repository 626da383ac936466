"""Loads a Hugging Face model directory, or raises an error that names the unsupported feature."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from inferry.domain.routes import ALL_TASKS, Task
from inferry.engine.model import LayerWeights, ModelConfig, Weights

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_POOLED = frozenset({Task.EMBED, Task.SCORE})
_TASKS = {
    "ForCausalLM": ALL_TASKS,
    "Model": _POOLED,
    "ForSequenceClassification": frozenset({Task.SCORE}),
}
"""What a model does, by the end of its architecture's name. Embeddings are scored by their cosine."""
ARCHITECTURES = tuple(family + kind for kind in _TASKS for family in FAMILIES)


class UnsupportedModel(ValueError):
    """The engine cannot run this model exactly. The message names the reason."""


def load_model(directory: Path, *, context_tokens: int | None = None) -> tuple[ModelConfig, Weights]:
    """Load config and weights. `context_tokens` lowers the model's context. Weights are converted to float32."""
    config = read_config(directory, context_tokens=context_tokens)
    return config, _build(config, _read_tensors(directory))


def read_config(directory: Path, *, context_tokens: int | None = None) -> ModelConfig:
    path = directory / "config.json"
    if not path.is_file():
        raise UnsupportedModel(f"{directory} has no config.json")
    raw: dict[str, Any] = json.loads(path.read_text())
    model_context = int(raw["max_position_embeddings"])
    context = min(model_context, context_tokens or model_context)
    _refuse_unsupported(raw, context)
    heads = int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim") or raw["hidden_size"] // heads)
    return ModelConfig(
        vocab_size=int(raw["vocab_size"]),
        hidden=int(raw["hidden_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=int(raw["intermediate_size"]),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        context_tokens=context,
        rope_inverse_frequencies=_inverse_frequencies(raw, head_dim),
        eos_ids=_eos_ids(directory, raw),
        tasks=_tasks(raw),
        pooling=_pooling(directory, raw),
        has_dimensions=bool(raw.get("is_matryoshka") or raw.get("matryoshka_dimensions")),
    )


def _tasks(raw: dict[str, Any]) -> frozenset[Task]:
    architecture: str = raw["architectures"][0]
    return next(tasks for kind, tasks in _TASKS.items() if architecture in [family + kind for family in FAMILIES])


def _pooling(directory: Path, raw: dict[str, Any]) -> Literal["mean", "last"]:
    """How hidden states become a result: the last one for a classification head, else as Sentence Transformers' files
    say, else their mean.
    """
    if Task.EMBED not in _tasks(raw):
        return "last"
    path = directory / "1_Pooling" / "config.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"pooling_mode_mean_tokens": True}
    modes = [name for name, is_on in stored.items() if name.startswith("pooling_mode_") and is_on is True]
    if modes == ["pooling_mode_mean_tokens"]:
        return "mean"
    if modes == ["pooling_mode_lasttoken"]:
        return "last"
    raise UnsupportedModel(f"1_Pooling: {', '.join(modes) or 'no pooling mode'}")


def _refuse_unsupported(raw: dict[str, Any], context: int) -> None:
    architectures = raw.get("architectures") or ["(none named)"]
    if architectures[0] not in ARCHITECTURES:
        raise UnsupportedModel(f"architecture {architectures[0]} (supported: {', '.join(ARCHITECTURES)})")
    labels = raw.get("num_labels") or len(raw.get("id2label") or ()) or 2
    if architectures[0].endswith("ForSequenceClassification") and labels != 1:
        raise UnsupportedModel(f"{labels} labels: a score needs a classification head with one")
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantization_config: quantized weights")
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if raw.get(key)]
    if experts:
        raise UnsupportedModel(f"{experts[0]}: mixture of experts")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']}")
    if raw.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias")
    window = raw.get("sliding_window")
    slides = raw.get("use_sliding_window", window is not None)
    if raw.get("layer_types"):
        slides = "sliding_attention" in raw["layer_types"]
    if slides and window is not None and window < context:
        raise UnsupportedModel(
            f"sliding_window {window} below the context of {context} tokens; context_tokens: {window} avoids it"
        )


def _inverse_frequencies(raw: dict[str, Any], head_dim: int) -> Tensor:
    """RoPE frequencies with the checkpoint's scaling, from either format of its config."""
    rope: dict[str, Any] = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if float(rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor: RoPE on a part of each head")
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return inverse
    factor = float(rope.get("factor", 1.0))
    if kind == "linear":
        return inverse / factor
    if kind != "llama3":
        raise UnsupportedModel(f"rope type {kind}")
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    trained = float(rope["original_max_position_embeddings"])
    # Long wavelengths are scaled by the factor, short ones kept, and those between are interpolated.
    turns = trained * inverse / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * inverse + (1 - keep) * inverse / factor


def _eos_ids(directory: Path, raw: dict[str, Any]) -> frozenset[int]:
    path = directory / "generation_config.json"
    generation: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (directory / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        raise UnsupportedModel(f"{directory} has neither model.safetensors nor model.safetensors.index.json")
    tensors: dict[str, Tensor] = {}
    for name in files:
        with safe_open(str(directory / name), framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118 (not a dict)
                tensors[key] = stored.get_tensor(key).to(torch.float32)
    return tensors


def _build(config: ModelConfig, tensors: dict[str, Tensor]) -> Weights:
    def take(name: str) -> Tensor:
        if name not in tensors:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}")
        return tensors.pop(name)

    def maybe(name: str) -> Tensor | None:
        return tensors.pop(name, None)

    # A checkpoint of the base model alone may omit the prefix.
    prefix = "model." if "model.embed_tokens.weight" in tensors or Task.EMBED not in config.tasks else ""
    embedding = take(f"{prefix}embed_tokens.weight")
    layers = tuple(_layer(config, f"{prefix}layers.{index}.", take, maybe) for index in range(config.layers))
    final_norm = take(f"{prefix}norm.weight") * config.hidden**0.5
    head = maybe("lm_head.weight")
    score = None if Task.EMBED in config.tasks else take("score.weight").t().contiguous()
    unused = [name for name in tensors if not name.endswith("rotary_emb.inv_freq")]
    if unused:
        raise UnsupportedModel(f"unknown tensors, for example {unused[0]}")
    if Task.GENERATE in config.tasks:
        head = _transposed((embedding if head is None else head) * final_norm)
    return Weights(embedding=embedding, layers=layers, final_norm=final_norm, head=head, score=score)


def _layer(
    config: ModelConfig, prefix: str, take: Callable[[str], Tensor], maybe: Callable[[str], Tensor | None]
) -> LayerWeights:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    input_norm = take(prefix + "input_layernorm.weight") * config.hidden**0.5
    post_norm = take(prefix + "post_attention_layernorm.weight") * config.hidden**0.5
    q, k = (_paired(take(f"{attention}{name}_proj.weight"), config.head_dim) for name in "qk")
    biases = _qkv_bias(config, attention, maybe)
    qk_norm = _qk_norm(config, attention, maybe)
    scale = config.head_dim**-0.5
    if qk_norm is None:
        q = q * scale
        if biases is not None:
            biases[: config.heads * config.head_dim] *= scale
    else:
        qk_norm[: config.heads] *= scale
    qkv = torch.cat([q, k, take(attention + "v_proj.weight")])
    gate_up = torch.cat([take(mlp + "gate_proj.weight"), take(mlp + "up_proj.weight")])
    return LayerWeights(
        qkv=_transposed(qkv * input_norm),
        qkv_bias=biases,
        qk_norm=qk_norm,
        out=_transposed(take(attention + "o_proj.weight")),
        out_bias=maybe(attention + "o_proj.bias"),
        gate_up=_transposed(gate_up * post_norm),
        down=_transposed(take(mlp + "down_proj.weight")),
    )


def _qkv_bias(config: ModelConfig, attention: str, maybe: Callable[[str], Tensor | None]) -> Tensor | None:
    q, k, v = (maybe(f"{attention}{name}_proj.bias") for name in "qkv")
    if q is None or k is None or v is None:
        return None
    return torch.cat([_paired(q, config.head_dim), _paired(k, config.head_dim), v])


def _qk_norm(config: ModelConfig, attention: str, maybe: Callable[[str], Tensor | None]) -> Tensor | None:
    q, k = maybe(attention + "q_norm.weight"), maybe(attention + "k_norm.weight")
    if q is None or k is None:
        return None
    q, k = _paired(q, config.head_dim), _paired(k, config.head_dim)
    return torch.cat([q.expand(config.heads, -1), k.expand(config.kv_heads, -1)])


def _paired(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head from (first halves, second halves) to the pairs that RoPE rotates."""
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous()
