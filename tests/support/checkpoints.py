"""Small random checkpoints of every supported family, written by transformers' own classes."""

import warnings
from pathlib import Path
from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_SLIDING = {"use_sliding_window": True, "sliding_window": 20}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-head-dim": ("Llama", {"num_key_value_heads": 4, "head_dim": 24}),
    "llama-mqa-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-attention-bias": ("Llama", {"attention_bias": True, "num_key_value_heads": 4}),
    "llama3-rope": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
    "llama-dynamic-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-yarn-tied": (
        "Qwen2",
        {"rope_parameters": _YARN, "max_position_embeddings": 64, "tie_word_embeddings": True},
    ),
    "qwen2-window-in-upper-layers": ("Qwen2", {**_SLIDING, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-yarn-bias": (
        "Qwen3",
        {"head_dim": 32, "attention_bias": True, "rope_parameters": {**_YARN, "beta_fast": 16, "beta_slow": 2}},
    ),
    "qwen3-window-by-layer-types": (
        "Qwen3",
        {**_SLIDING, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 20, "head_dim": 24}),
}
"""Checkpoints by name: the prefix of transformers' class names, and what differs from SHAPE."""


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    shape: dict[str, Any] | None = None,
    **saving: Any,
) -> Path:
    """Write the checkpoint, with random norms and biases: a fresh model has ones and zeros there."""
    kind, extra = FAMILIES[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(7)
        config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **extra, **(shape or {})})
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.to(dtype).save_pretrained(directory, **saving)
    return directory


def reference_model(directory: Path) -> Any:
    """transformers' model of the checkpoint, in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
