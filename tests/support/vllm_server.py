"""A real vLLM server on the CPU, as a process that can be asked, watched and killed.

It runs from a virtual environment of its own: the one named by VLLM_VENV, else `.venv-vllm` beside the sources.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from support.engine_process import ROOT, EngineProcess
from support.serving import get

# One thread each: the point is two engines on few cores, and threads that wait for each other in loops.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
CONTEXT = 1024
BLOCKS_PER_CEILING = 256


def vllm_venv() -> Path:
    return Path(os.environ.get("VLLM_VENV") or ROOT / ".venv-vllm").absolute()


class VllmServer(EngineProcess):
    """`vllm serve` of one model directory."""

    probe = (9, 9, 9)

    def __init__(
        self, model_dir: Path, log_path: Path, *more: str, max_sequences: int = 32, **environment: str
    ) -> None:
        super().__init__(log_path, {**ENVIRONMENT, **environment})
        self._command = [
            *(str(vllm_venv() / "bin" / "vllm"), "serve", str(model_dir), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(max_sequences)),
            *("--num-gpu-blocks-override", str(BLOCKS_PER_CEILING), "--scheduling-policy", "priority"),
            *("--enable-prefix-caching", *more),
        ]

    def kill_engine_core(self) -> None:
        for pid in engine_cores(self.pid):
            os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def held(self) -> Iterator["PausedEngine"]:
        """Meanwhile its engine core computes only when it is let."""
        held = PausedEngine(engine_cores(self.pid))
        held.stop()
        try:
            yield held
        finally:
            held.resume()

    def settled(self, name: str) -> float:
        """A metric, once the server has told all that the engine has done: it may be far behind."""
        found, before = self.metric("vllm:generation_tokens_total"), -1.0
        while found != before:
            time.sleep(0.1)
            before, found = found, self.metric("vllm:generation_tokens_total")
        return self.metric(name)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples, or of those with this label."""
        status, _, page = get(self.url, "/metrics")
        assert status == 200
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*{re.escape(label)}[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        assert found, name
        return sum(map(float, found))


class PausedEngine:
    """An engine core that stands still: what it has begun and not ended stays so."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids

    def run_for(self, seconds: float) -> None:
        self.resume()
        time.sleep(seconds)
        self.stop()

    def stop(self) -> None:
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def engine_cores(leader: int) -> list[int]:
    """The processes of a vLLM process' group that are not the leader: the engine core and its workers."""
    listed = subprocess.run(["ps", "-eo", "pid,pgid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    group = [(int(pid), args) for pid, pgid, args in rows if int(pgid) == leader and int(pid) != leader]
    return [pid for pid, args in group if "EngineCore" in args]
