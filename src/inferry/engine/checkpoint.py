"""Reads the `config.json` of a Hugging Face model directory, and names what the engine does not support in it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from inferry.domain.routes import GENERATES, Task
from inferry.engine.model import ModelConfig
from inferry.engine.rope import inverse_frequencies, rope_context, unsupported_rope

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_POOLED = frozenset({Task.EMBED, Task.SCORE})
_HEAD = "ForSequenceClassification"
_TASKS = {"ForCausalLM": GENERATES | _POOLED, "Model": _POOLED, _HEAD: frozenset({Task.SCORE})}
"""What a model does, by the end of its architecture's name. Embeddings are scored by their cosine. A head with several
labels classifies instead."""
ARCHITECTURES = tuple(family + kind for kind in _TASKS for family in FAMILIES)
DTYPES = ("float32", "bfloat16", "float16")
_DIMENSIONS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
# transformers' defaults for what an older config.json may leave out.
_QWEN3_HEAD_DIM = 128
_QWEN_MAX_WINDOW_LAYERS = 28


class UnsupportedModel(ValueError):
    """The engine cannot run this model exactly. The message names every reason."""


def read_config(directory: Path, *, context_tokens: int | None = None) -> ModelConfig:
    """The model's dimensions. `context_tokens` lowers its context. Raises UnsupportedModel with every reason."""
    raw = read_raw(directory)
    reasons = list(unsupported(directory, raw))
    if reasons:
        raise UnsupportedModel("; ".join(reasons))
    heads = int(raw["num_attention_heads"])
    family = family_of(raw)
    head_dim = _head_dim(raw)
    model_context = rope_context(raw)
    context = min(model_context, context_tokens or model_context)
    frequencies, rope_factor = inverse_frequencies(raw, head_dim)
    window, sliding_layers = _sliding(raw, context)
    has_attention_bias = bool(raw.get("attention_bias")) and family in ("Llama", "Qwen3")
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
        rope_inverse_frequencies=frequencies,
        rope_factor=rope_factor,
        eos_ids=_eos_ids(directory, raw),
        tasks=_tasks(raw),
        pooling=_pooling(directory, raw),
        labels=labels_of(raw),
        is_multi_label=raw.get("problem_type") == "multi_label_classification",
        has_dimensions=bool(raw.get("is_matryoshka") or raw.get("matryoshka_dimensions")),
        window=window,
        sliding_layers=sliding_layers,
        has_qkv_bias=has_attention_bias or family == "Qwen2",
        has_out_bias=has_attention_bias,
        has_qk_norm=family == "Qwen3",
        is_tied=bool(raw.get("tie_word_embeddings")),
        dtype=stored_dtype(raw),
    )


def read_raw(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise UnsupportedModel(f"{directory} has no config.json")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{path} is not a JSON object")
    return raw


def family_of(raw: dict[str, Any]) -> str | None:
    """One of FAMILIES, by the first architecture; None for others."""
    architecture = _architecture(raw)
    return next((family for family in FAMILIES for kind in _TASKS if architecture == family + kind), None)


def stored_dtype(raw: dict[str, Any]) -> str:
    """The checkpoint's own dtype, as its config says; tensors may be stored in others."""
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32")


def unsupported(directory: Path, raw: dict[str, Any]) -> Iterator[str]:
    """Every reason why the engine refuses the model, by the name of its setting."""
    architecture = _architecture(raw)
    if family_of(raw) is None:
        yield f"architecture {architecture} (supported: {', '.join(ARCHITECTURES)})"
    missing = [name for name in _DIMENSIONS if not isinstance(raw.get(name), int)]
    if missing:
        yield f"config.json has no number for {', '.join(missing)}"
    if len(labels_of(raw)) > 1 and raw.get("problem_type") == "regression":
        yield "problem_type regression with several labels"
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown method")
        yield f"quantization_config: quantized weights ({method})"
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            yield f"{key}: mixture of experts"
    if raw.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {raw['hidden_act']}"
    if raw.get("mlp_bias"):
        yield "mlp_bias"
    if stored_dtype(raw) not in DTYPES:
        yield f"dtype {stored_dtype(raw)} (supported: {', '.join(DTYPES)})"
    yield from _unsupported_layers(raw)
    if "max_position_embeddings" not in missing:
        yield from unsupported_rope(raw)
    if family_of(raw) is not None and Task.EMBED in _tasks(raw):
        modes = _pooling_modes(directory)
        if modes not in (["pooling_mode_mean_tokens"], ["pooling_mode_lasttoken"]):
            yield f"1_Pooling: {', '.join(modes) or 'no pooling mode'}"


def _architecture(raw: dict[str, Any]) -> str:
    return str((raw.get("architectures") or ["(none named)"])[0])


def _tasks(raw: dict[str, Any]) -> frozenset[Task]:
    if len(labels_of(raw)) > 1:
        return frozenset({Task.CLASSIFY})
    architecture = _architecture(raw)
    return next(tasks for kind, tasks in _TASKS.items() if architecture in [family + kind for family in FAMILIES])


def labels_of(raw: dict[str, Any]) -> tuple[str, ...]:
    """The names of a classification head's labels, by default those of transformers; empty for other models."""
    if not _architecture(raw).endswith(_HEAD):
        return ()
    names: dict[str, str] = raw.get("id2label") or {}
    count = len(names) or int(raw.get("num_labels") or 2)
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count))


def check_head(config: ModelConfig, rows: int) -> None:
    """Raises UnsupportedModel where the classification head does not have a row for every label."""
    if rows != len(config.labels):
        raise UnsupportedModel(f"score.weight has {rows} rows for {len(config.labels)} labels")


def _head_dim(raw: dict[str, Any]) -> int:
    if raw.get("head_dim"):
        return int(raw["head_dim"])
    return _QWEN3_HEAD_DIM if family_of(raw) == "Qwen3" else int(raw["hidden_size"]) // int(raw["num_attention_heads"])


def _unsupported_layers(raw: dict[str, Any]) -> Iterator[str]:
    kinds = sorted(set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if kinds:
        yield f"layer_types {', '.join(kinds)}"
    elif raw.get("layer_types") and len(raw["layer_types"]) != raw.get("num_hidden_layers"):
        yield f"{len(raw['layer_types'])} layer_types for {raw.get('num_hidden_layers')} layers"


def _sliding(raw: dict[str, Any], context: int) -> tuple[int | None, frozenset[int]]:
    """The window and the layers that it limits, or None where no layer is limited within the context.

    `layer_types` names the layers. Without it they are all of Mistral, and of Qwen those from `max_window_layers` on.
    Qwen has windows only with `use_sliding_window`, Llama has none, as in transformers.
    """
    family, window = family_of(raw), raw.get("sliding_window")
    is_used = family == "Mistral" or (family in ("Qwen2", "Qwen3") and raw.get("use_sliding_window"))
    if window is None or window >= context or not is_used:
        return None, frozenset()
    first = 0 if family == "Mistral" else int(raw.get("max_window_layers", _QWEN_MAX_WINDOW_LAYERS))
    layers = range(int(raw["num_hidden_layers"]))
    kinds = raw.get("layer_types") or ["sliding_attention" if layer >= first else "" for layer in layers]
    sliding = frozenset(layer for layer in layers if kinds[layer] == "sliding_attention")
    return (int(window) if sliding else None), sliding


def _pooling(directory: Path, raw: dict[str, Any]) -> Literal["mean", "last"]:
    """How hidden states become a result: the last one for a classification head, else as Sentence Transformers' files
    say, else their mean.
    """
    is_mean = Task.EMBED in _tasks(raw) and _pooling_modes(directory) == ["pooling_mode_mean_tokens"]
    return "mean" if is_mean else "last"


def _pooling_modes(directory: Path) -> list[str]:
    path = directory / "1_Pooling" / "config.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"pooling_mode_mean_tokens": True}
    return [name for name, is_on in stored.items() if name.startswith("pooling_mode_") and is_on is True]


def _eos_ids(directory: Path, raw: dict[str, Any]) -> frozenset[int]:
    path = directory / "generation_config.json"
    generation: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def weight_files(directory: Path) -> list[Path]:
    """The files of safetensors that hold the weights."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (directory / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        raise UnsupportedModel(f"{directory} has neither model.safetensors nor model.safetensors.index.json")
    for name in names:
        if not (directory / name).is_file():
            raise UnsupportedModel(f"{directory} has no {name}, which model.safetensors.index.json names")
    return [directory / name for name in names]
