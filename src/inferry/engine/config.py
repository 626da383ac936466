"""Mode and limits of the embedded engine. None means that the engine decides."""

from math import inf
from typing import Literal

from msgspec import Struct

from inferry.domain.workers import EngineMode, ToolFormatName

Device = Literal["cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

MEMORY_SHARE = 0.8
"""Share of a device's memory that an engine uses."""


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Limits of one engine process.

    `chunk_tokens` limits the prompt tokens of one step, and so the delay that a long prompt adds to other sequences.
    `context_tokens` lowers the model's context; None keeps it. `threads` are the threads of torch. `dtype` is that of
    weights and KV cache: `auto` is float32 on a CPU and the checkpoint's own on a GPU. `kv_tokens` of `auto` fill what
    the weights leave of `memory_share` of the device's memory. `prefix_cache`: full KV blocks stay after their
    sequence, and later sequences of the same salt with the same prefix use them. `kv_pause_s`: after a call of a run
    its blocks are kept for its next call for this long, 0 for not at all. `max_adapters`: LoRA adapters that may be
    loaded at the same time, each with ranks of at most `max_adapter_rank`. `tool_format`: how the model
    writes tool calls, None if it is not known.
    In the mode `hybrid` streams wait at most about `decode_wait_ms` for the prompts between two of their tokens.
    """

    mode: EngineMode = "continuous"
    decode_wait_ms: int = 500
    max_sequences: int = 64
    kv_tokens: int | Literal["auto"] = 65_536
    chunk_tokens: int = 256
    block_tokens: int = 32
    context_tokens: int | None = None
    threads: int | None = None
    dtype: Dtype = "auto"
    memory_share: float = MEMORY_SHARE
    device: Device = "cpu"
    prefix_cache: bool = True
    kv_pause_s: float = 60.0
    tool_format: ToolFormatName | None = None
    max_adapters: int = 0
    max_adapter_rank: int = 16

    def __post_init__(self) -> None:
        counts = ("decode_wait_ms", "max_sequences", "kv_tokens", "chunk_tokens", "block_tokens", "max_adapter_rank")
        for name in counts:
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.kv_tokens != "auto" and self.kv_tokens < self.block_tokens:
            raise ValueError("kv_tokens must hold at least one block of block_tokens")
        if not 0 < self.memory_share <= 1:
            raise ValueError("memory_share must be above 0 and at most 1")
        if self.max_adapters < 0:
            raise ValueError("max_adapters must be at least 0")
        if not 0 <= self.kv_pause_s < inf:
            raise ValueError("kv_pause_s must be at least 0")
        for name in ("context_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or absent")

    @property
    def blocks(self) -> int:
        if self.kv_tokens == "auto":
            raise ValueError("kv_tokens of auto have no size before the engine has measured the memory")
        return self.kv_tokens // self.block_tokens

    @property
    def pads(self) -> bool:
        """Whether sequences are computed in padded passes."""
        return self.mode in ("static", "dynamic")

    @property
    def cache_blocks(self) -> int:
        """Blocks that a runner allocates: padding is written to one more, which holds no sequence."""
        return self.blocks + self.pads

    @property
    def max_pieces(self) -> int:
        """Most pieces of work in one step. Apart from decodes there may be prompts of two groups, or their padding."""
        return self.max_sequences * (1 if self.mode == "continuous" else 2)


DEVICE_DEFAULTS: dict[Device, EngineConfig] = {
    "cpu": EngineConfig(),
    "cuda": EngineConfig(device="cuda", max_sequences=256, chunk_tokens=2_048, kv_tokens="auto"),
}
"""Limits that suit a device: a GPU computes 2,048 prompt tokens in less time than a CPU computes 256."""
