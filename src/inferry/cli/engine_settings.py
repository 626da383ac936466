"""The limits of an embedded engine from its configuration and its device."""

import importlib.util
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from inferry.cli.config.workers import EmbeddedWorkerConfig
from inferry.engine.config import DEVICE_DEFAULTS, Device, EngineConfig

_SETTINGS = (
    "max_sequences",
    "kv_tokens",
    "memory_share",
    "chunk_tokens",
    "context_tokens",
    "threads",
    "dtype",
    "prefix_cache",
    "kv_pause_s",
)


def engine_config(worker: EmbeddedWorkerConfig, device: Device) -> EngineConfig:
    """Configured limits, and the device's defaults for others."""
    configured = {name: value for name in _SETTINGS if (value := getattr(worker, name)) is not None}
    return replace(DEVICE_DEFAULTS[device], **configured)


def resolve_device(configured: Literal["auto", "cpu", "cuda"]) -> Device:
    """`auto` is the GPU where a driver and triton are installed. torch is not imported: it takes a second."""
    if configured != "auto":
        return configured
    has_gpu = Path("/dev/nvidiactl").exists() and importlib.util.find_spec("triton") is not None
    return "cuda" if has_gpu else "cpu"
