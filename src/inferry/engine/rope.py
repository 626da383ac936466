"""RoPE frequencies of a checkpoint's `config.json`, from either format of it (`rope_scaling` or `rope_parameters`)."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
"""Supported kinds with the values each needs. `dynamic` scales only beyond `max_position_embeddings`: within it, it is
`default`."""


def rope_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """All RoPE values in one dict, with `rope_type`, `rope_theta` and `original_max_position_embeddings` set."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    trained = rope.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
    rope["original_max_position_embeddings"] = trained
    return rope


def unsupported_rope(raw: dict[str, Any]) -> Iterator[str]:
    rope = rope_settings(raw)
    if any(isinstance(value, dict) for value in rope.values()):
        yield "rope_parameters by layer type"
        return
    if float(rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        yield "partial_rotary_factor: RoPE on a part of each head"
    kind = rope["rope_type"]
    if kind not in _REQUIRED:
        yield f"rope type {kind} (supported: {', '.join(_REQUIRED)})"
        return
    for name in _REQUIRED[kind]:
        if rope.get(name) is None:
            yield f"rope type {kind} without {name}"


def rope_context(raw: dict[str, Any]) -> int:
    """Positions that the frequencies are made for. The config of a YaRN checkpoint may name the trained ones only."""
    rope, positions = rope_settings(raw), int(raw["max_position_embeddings"])
    if rope["rope_type"] != "yarn":
        return positions
    return max(positions, int(_yarn_factor(raw, rope) * rope["original_max_position_embeddings"]))


def inverse_frequencies(raw: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """The frequencies of each pair of a head, and the factor on rotated queries and keys (1.0 except for YaRN)."""
    rope = rope_settings(raw)
    kind, theta = rope["rope_type"], rope["rope_theta"]
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "linear":
        return inverse / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if kind == "yarn":
        factor = _yarn_factor(raw, rope)
        return _yarn(rope, factor, inverse, head_dim), _yarn_attention_factor(rope, factor)
    return inverse, 1.0


def _llama3(rope: dict[str, Any], inverse: Tensor) -> Tensor:
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    # Long wavelengths are scaled by the factor, short ones kept, and those between are interpolated.
    turns = float(rope["original_max_position_embeddings"]) * inverse / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * inverse + (1 - keep) * inverse / float(rope["factor"])


def _yarn_factor(raw: dict[str, Any], rope: dict[str, Any]) -> float:
    return float(rope.get("factor") or raw["max_position_embeddings"] / rope["original_max_position_embeddings"])


def _yarn(rope: dict[str, Any], factor: float, inverse: Tensor, head_dim: int) -> Tensor:
    """Pairs that turn often within the trained context are kept, those that turn rarely scaled, others interpolated."""
    trained, theta = float(rope["original_max_position_embeddings"]), rope["rope_theta"]

    def pair_with_turns(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_turns(rope.get("beta_fast") or 32), pair_with_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (max(high - low, 0.001))
    keep = 1 - ramp.clamp(0, 1)
    return inverse / factor * (1 - keep) + inverse * keep


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(float(rope["mscale"])) / magnitude(float(rope["mscale_all_dim"]))
    return magnitude(1.0)
