"""What a device achieves: a large copy and a large product, measured on the device itself."""

import platform
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from inferry.engine.profiling.roofline import DevicePeak

_COPIED_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 7


def measure_peak(device: str, dtype: torch.dtype) -> DevicePeak:
    """The best of several repeats. Needs about 2.5 GiB of a GPU's memory, which is free again afterwards."""
    peak = DevicePeak(_copy_rate(device), _product_rate(device, dtype))
    if device == "cuda":
        torch.cuda.empty_cache()
    return peak


def _copy_rate(device: str) -> float:
    """Bytes per second, read and written."""
    source = torch.zeros(_COPIED_BYTES[device], dtype=torch.uint8, device=device)
    copied = torch.empty_like(source)
    return 2 * len(source) / _best(lambda: copied.copy_(source), device)


def _product_rate(device: str, dtype: torch.dtype) -> float:
    """Operations per second."""
    size = _SIZE[device]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * size**3 / _best(lambda: torch.mm(left, right, out=product), device)


def _best(work: Callable[[], object], device: str) -> float:
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def device_name(device: str) -> str:
    """The name of the GPU, or of this machine's CPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    listed = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", listed.read_text(), re.MULTILINE) if listed.is_file() else None
    return named[1] if named else platform.processor() or platform.machine()
