"""GPU utilisation during a load test: from the gateway's metrics, else from nvidia-smi on this machine."""

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

from msgspec import Struct

from inferry.loadgen.server import ProbeError, Server

METRIC = "inferry_worker_gpu_utilization_ratio"
METRIC_SPAN_S = 10.0
"""The gateway's figure is of 5 seconds and up to 5 seconds old."""
INTERVAL_S = 1.0
_SAMPLE = re.compile(rf"^{METRIC}(?:\{{[^}}]*\}})? ([0-9.eE+-]+)", re.MULTILINE)
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
_COMMAND = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")

Read = Callable[[], Awaitable[float | None]]


class GpuSource(Struct, frozen=True):
    """Where utilisation is read. A reading may cover `span_s` seconds before it; None: no figure at this time."""

    name: str
    read: Read
    span_s: float


async def find_source(url: str, server: Server) -> GpuSource | None:
    """The gateway's metrics if it has them, nvidia-smi if the server is on this machine, or None."""

    async def from_gateway() -> float | None:
        with suppress(ProbeError):
            status, body = await server.get("/metrics")
            return mean_utilisation(body.decode(errors="replace")) if status == 200 else None
        return None

    with suppress(ProbeError):
        status, body = await server.get("/metrics")
        if status == 200 and METRIC.encode() in body:
            return GpuSource(f"metric {METRIC}", from_gateway, METRIC_SPAN_S)
    program = shutil.which("nvidia-smi") if urlsplit(url).hostname in _LOCAL_HOSTS else None
    return None if program is None else GpuSource("nvidia-smi", lambda: _from_nvidia_smi(program), INTERVAL_S)


class GpuWatch:
    """Reads a source once per second while it runs."""

    def __init__(self, source: GpuSource | None) -> None:
        self._source = source
        self._readings: list[tuple[float, float]] = []

    async def run(self) -> None:
        """Read until cancelled."""
        if self._source is None:
            return
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            await asyncio.sleep(INTERVAL_S)
            found = await self._source.read()
            if found is not None:
                self._readings.append((clock() - began, found))

    @property
    def mean(self) -> float | None:
        """The mean of readings that cover only the time of the watch; else the last one, if half of it does."""
        if self._source is None or not self._readings:
            return None
        span_s = self._source.span_s
        inside = [value for at, value in self._readings if at >= span_s]
        if inside:
            return sum(inside) / len(inside)
        last_at, last = self._readings[-1]
        return last if last_at >= span_s / 2 else None


def mean_utilisation(metrics: str) -> float | None:
    """The mean over workers of a page of metrics."""
    found = [float(value) for value in _SAMPLE.findall(metrics)]
    return sum(found) / len(found) if found else None


async def _from_nvidia_smi(program: str) -> float | None:
    """The mean over the GPUs of this machine."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        process = await asyncio.create_subprocess_exec(
            program, *_COMMAND, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        output, _ = await process.communicate()
        values = [float(line) / 100 for line in output.decode().split()]
        return sum(values) / len(values)
    return None
