"""Limits of an embedded engine by device."""

import importlib.util
from pathlib import Path

import pytest

from inferry.cli.config.workers import EmbeddedWorkerConfig
from inferry.cli.engine_settings import engine_config, resolve_device
from inferry.engine.config import Device, EngineConfig


def test_a_cpu_has_the_engine_s_defaults() -> None:
    assert engine_config(EmbeddedWorkerConfig(), "cpu") == EngineConfig()


def test_a_gpu_runs_more_sequences_and_fills_its_memory() -> None:
    config = engine_config(EmbeddedWorkerConfig(), "cuda")
    assert (config.device, config.max_sequences, config.chunk_tokens) == ("cuda", 256, 2_048)
    assert (config.kv_tokens, config.memory_share) == ("auto", 0.8)


def test_configured_limits_hold_on_every_device() -> None:
    worker = EmbeddedWorkerConfig(max_sequences=5, kv_tokens=4_096, chunk_tokens=77, memory_share=0.5, dtype="float16")
    devices: tuple[Device, ...] = ("cpu", "cuda")
    for device in devices:
        config = engine_config(worker, device)
        assert (config.max_sequences, config.kv_tokens, config.chunk_tokens) == (5, 4_096, 77)
        assert (config.memory_share, config.dtype) == (0.5, "float16")


@pytest.mark.parametrize(
    ("has_driver", "has_triton", "device"),
    [(True, True, "cuda"), (False, True, "cpu"), (True, False, "cpu")],
)
def test_auto_is_a_gpu_where_driver_and_triton_are_installed(
    monkeypatch: pytest.MonkeyPatch, has_driver: bool, has_triton: bool, device: str
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: has_driver)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_triton else None)
    assert resolve_device("auto") == device
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("cuda") == "cuda"
