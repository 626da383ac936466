"""The limits of an embedded engine from its configuration and its device."""

import importlib.util
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from inferry.cli.config.workers import EmbeddedWorkerConfig
from inferry.engine.config import DEVICE_DEFAULTS, Device, EngineConfig

_SETTINGS = (
    "mode",
    "decode_wait_ms",
    "max_sequences",
    "kv_tokens",
    "memory_share",
    "chunk_tokens",
    "context_tokens",
    "threads",
    "dtype",
    "prefix_cache",
    "kv_pause_s",
    "max_adapter_rank",
)
_LOADED_LATER = 8
"""Adapters that may be loaded at runtime, beside those of the configuration."""


def engine_config(worker: EmbeddedWorkerConfig, device: Device) -> EngineConfig:
    """Configured limits, and the device's defaults for others."""
    configured = {name: value for name in _SETTINGS if (value := getattr(worker, name)) is not None}
    max_adapters = worker.max_adapters
    if max_adapters is None:
        max_adapters = len(worker.adapters) + (_LOADED_LATER if worker.adapter_dirs else 0)
    return replace(DEVICE_DEFAULTS[device], **configured, max_adapters=max_adapters)


def resolve_device(configured: Literal["auto", "cpu", "cuda"]) -> Device:
    """`auto` is the GPU where a driver and triton are installed. torch is not imported: it takes a second."""
    if configured != "auto":
        return configured
    has_gpu = Path("/dev/nvidiactl").exists() and importlib.util.find_spec("triton") is not None
    return "cuda" if has_gpu else "cpu"
