"""The dtype that an engine computes in."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Literal

from inferry.engine.config import Dtype

_PROBE = """
import torch
one = torch.ones(1, 64, 64, dtype=torch.{dtype})
torch.nn.functional.linear(one, one[0])
torch.bmm(one, one)
torch.nn.functional.scaled_dot_product_attention(one, one, one)
"""


class UnsupportedDtype(ValueError):
    """The device cannot compute in this dtype."""


def resolve_dtype(configured: Dtype, stored: str, device: Literal["cpu", "cuda"]) -> str:
    """`auto` is float32 on a CPU and the checkpoint's own dtype on a GPU."""
    if configured != "auto":
        return configured
    return "float32" if device == "cpu" else stored


def check_cpu_dtype(dtype: str, probe: Callable[[str], int] | None = None) -> None:
    """Raise UnsupportedDtype if this CPU cannot compute in the dtype.

    Some CPUs advertise instructions for bfloat16 that end the process, so a child process tries first.
    """
    if dtype == "float32":
        return
    status = (probe or _probe)(dtype)
    if status != 0:
        raise UnsupportedDtype(
            f"dtype {dtype}: this CPU cannot compute in it (a test ended with status {status}). Use float32, or set "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment"
        )


@cache
def _probe(dtype: str) -> int:
    """The status of the child process. It takes seconds, and the CPU stays the same."""
    command = [sys.executable, "-c", _PROBE.format(dtype=dtype)]
    return subprocess.run(command, capture_output=True, timeout=300, check=False).returncode  # noqa: S603
