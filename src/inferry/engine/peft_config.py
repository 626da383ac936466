"""Reads the `adapter_config.json` of a PEFT directory, and names what the engine does not support in it.

Independent of torch: the gateway checks configured adapters before it starts an engine.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHTS_FILE = "adapter_model.safetensors"
MODULES = {
    **dict.fromkeys(("q", "k", "v", "o"), "self_attn"),
    **dict.fromkeys(("gate", "up", "down"), "mlp"),
}
"""The projections that an adapter may change, each with the part of a layer that has it."""
_OUTSIDE = ("model.embed_tokens", "lm_head")
_UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "use_qalora",
    "alora_invocation_tokens",
    "arrow_config",
)
# These change the weights of the base model too.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")


class UnsupportedAdapter(ValueError):
    """The engine cannot compute this adapter exactly. The message names every reason."""


@dataclass(frozen=True)
class PeftConfig:
    """Rank and scale of the modules that an adapter changes."""

    raw: dict[str, Any]

    def targets(self, layer: int, module: str) -> bool:
        """Whether the adapter changes this projection of this layer."""
        layers = self.raw.get("layers_to_transform")
        if layers is not None and layer not in ([layers] if isinstance(layers, int) else layers):
            return False
        name = module_name(layer, module)
        excluded = self.raw.get("exclude_modules")
        return _selects(self.raw["target_modules"], name) and not (excluded and _selects(excluded, name))

    def rank(self, layer: int, module: str) -> int:
        return int(self._by_pattern("rank_pattern", "r", layer, module))

    def scale(self, layer: int, module: str) -> float:
        """What the product of both matrices is multiplied by."""
        alpha = float(self._by_pattern("alpha_pattern", "lora_alpha", layer, module))
        rank = self.rank(layer, module)
        return float(alpha / rank**0.5 if self.raw.get("use_rslora") else alpha / rank)

    def _by_pattern(self, patterns: str, default: str, layer: int, module: str) -> Any:
        name = module_name(layer, module)
        for pattern, value in (self.raw.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        return self.raw.get(default, 8)  # PEFT's default of both


def module_name(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{MODULES[module]}.{module}_proj"


def read_peft_config(directory: Path) -> PeftConfig:
    """The adapter's config. Raises UnsupportedAdapter with every reason."""
    path = directory / "adapter_config.json"
    if not path.is_file():
        raise UnsupportedAdapter(f"{directory} is no PEFT directory: it has no adapter_config.json")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise UnsupportedAdapter(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UnsupportedAdapter(f"{path} is not a JSON object")
    reasons = list(_unsupported(raw))
    if not (directory / WEIGHTS_FILE).is_file():
        reasons.append(f"{directory} has no {WEIGHTS_FILE}")
    if reasons:
        raise UnsupportedAdapter("; ".join(reasons))
    return PeftConfig(raw)


def _malformed(raw: dict[str, Any]) -> Iterator[str]:
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = raw.get(name) or {}
        if not isinstance(patterns, dict):
            yield f"{name} is not a JSON object"
            continue
        for pattern in patterns:
            try:
                re.compile(f"({pattern})")
            except re.error as error:
                yield f"{name} has a key that is no regular expression: {error}"
    alpha_pattern = raw.get("alpha_pattern")
    alphas = [raw.get("lora_alpha", 8), *(alpha_pattern.values() if isinstance(alpha_pattern, dict) else ())]
    if not all(isinstance(alpha, int | float) for alpha in alphas):
        yield f"lora_alpha and alpha_pattern must be numbers: {alphas}"
    layers = raw.get("layers_to_transform")
    if not (layers is None or isinstance(layers, int | list)):
        yield "layers_to_transform must be a number or a list of numbers"


def _unsupported(raw: dict[str, Any]) -> Iterator[str]:
    yield from _malformed(raw)
    if raw.get("peft_type") != "LORA":
        yield f"peft_type {raw.get('peft_type')} (supported: LORA)"
    yield from (f"{name}: not supported" for name in _UNSUPPORTED if raw.get(name))
    if raw.get("bias", "none") != "none":
        yield f"bias {raw['bias']} (supported: none)"
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGED_BASE):
        yield f"init_lora_weights {start}: the weights of the base model are changed"
    rank_pattern = raw.get("rank_pattern")
    ranks = [raw.get("r", 8), *(rank_pattern.values() if isinstance(rank_pattern, dict) else ())]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        yield f"ranks must be numbers above 0: {ranks}"
    yield from _unsupported_targets(raw.get("target_modules"))


def _unsupported_targets(targets: Any) -> Iterator[str]:
    if isinstance(targets, str):
        try:
            outside = [name for name in _OUTSIDE if _selects(targets, name)]
        except re.error as error:
            yield f"target_modules is no regular expression: {error}"
            return
    elif isinstance(targets, list) and targets:
        supported = {f"{module}_proj" for module in MODULES}
        outside = [str(name) for name in targets if str(name).rpartition(".")[2] not in supported]
    else:
        yield "target_modules names no module"
        return
    if outside:
        yield f"target_modules {', '.join(outside)} (supported: {', '.join(f'{name}_proj' for name in MODULES)})"


def _selects(targets: str | list[str], name: str) -> bool:
    """PEFT's rule: a list has names or their ends, a string is `all-linear` or a regular expression of whole names.

    The names of a base model without a head have no prefix `model.`.
    """
    names = (name, name.removeprefix("model."))
    if targets == "all-linear":
        return name not in _OUTSIDE
    if isinstance(targets, str):
        return any(re.fullmatch(targets, one) for one in names)
    return any(one == target or one.endswith(f".{target}") for one in names for target in targets)
