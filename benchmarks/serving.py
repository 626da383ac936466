"""A gateway as a separate process, for measurements from outside."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.layouts import METRICS_OF_TODAY, config_for, layout_of


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def run_process(
    command: list[str],
    *,
    core: int | str | None = None,
    cwd: Path | None = None,
    extra_env: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process until the block ends, optionally on one core or a range; `quiet` drops its standard error too."""
    pinned = ["taskset", "-c", str(core), *command] if core is not None else command
    errors = subprocess.DEVNULL if quiet else None
    env = None if extra_env is None else {**os.environ, **extra_env}
    process = subprocess.Popen(pinned, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def run_gateway(
    config: dict[str, Any], *, core: int | str | None = None, package: Path | None = None, processes: int = 1
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """`inferry serve` with this configuration, ready: its port and its process.

    `package` is another directory to import the package from. A package of an earlier commit gets its own config keys.
    """
    with tempfile.TemporaryDirectory() as name, _serving(config, Path(name), core, package, processes) as served:
        yield served


@contextlib.contextmanager
def run_gateway_with_key(
    config: dict[str, Any], tenant: str, *, core: int | None = None, package: Path | None = None
) -> Iterator[tuple[int, subprocess.Popen[bytes], str]]:
    """The same with authentication, and a key of the tenant."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "keys.yaml").write_text(json.dumps(_config_of(package, config)))
        command = [sys.executable, "-m", "inferry", "keys", "create", "--tenant", tenant, "--config", "keys.yaml"]
        env = {**os.environ, **_environment(package)}
        created = subprocess.run([*command, "--quiet"], cwd=name, env=env, capture_output=True, text=True, check=True)
        with _serving(config, Path(name), core, package) as (port, process):
            yield port, process, created.stdout.strip()


@contextlib.contextmanager
def _serving(
    config: dict[str, Any], directory: Path, core: int | str | None, package: Path | None = None, processes: int = 1
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    port = free_port()
    (directory / "inferry.yaml").write_text(json.dumps(_config_of(package, config)))
    command = [sys.executable, "-m", "inferry", "serve", "--config", "inferry.yaml", "--port", str(port)]
    command += ["--log-level", "warning", *([] if processes == 1 else ["--workers", str(processes)])]
    with run_process(command, core=core, cwd=directory, extra_env=_environment(package)) as process:
        wait_for(f"http://127.0.0.1:{port}/ready", process)
        yield port, process


def _config_of(package: Path | None, config: dict[str, Any]) -> Any:
    return config if package is None else config_for(layout_of(package), config)


def _environment(package: Path | None) -> dict[str, str]:
    return {} if package is None else {"PYTHONPATH": str(package)}


def parse_metrics(text: str) -> dict[str, float]:
    """Metrics by name, summed over labels. Names of an earlier commit are replaced by those of today."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#") and " " in line:
            name, value = line.rsplit(" ", 1)
            name = name.partition("{")[0]
            name = METRICS_OF_TODAY.get(name, name)
            found[name] = found.get(name, 0.0) + float(value)
    return found


def wait_for(url: str, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"{url} did not answer within {seconds:g} s")


def cpu_seconds(pid: int) -> float:
    """Time that all threads of a process have run so far."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def cpu_and_run_queue_seconds(pid: int) -> tuple[float, float]:
    """Seconds that the main thread of a process has run, and seconds that it waited for a core."""
    ran, waited = Path(f"/proc/{pid}/schedstat").read_text().split()[:2]
    return int(ran) / 1e9, int(waited) / 1e9


def resident_bytes(pid: int) -> int:
    """Memory that a process has in use now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def wait_until_idle(pid: int, seconds: float = 20.0) -> None:
    """Wait until the process uses hardly any CPU time."""
    end = time.monotonic() + seconds
    before = cpu_seconds(pid)
    while time.monotonic() < end:
        time.sleep(0.1)
        now = cpu_seconds(pid)
        if now - before <= 0.02:
            return
        before = now
