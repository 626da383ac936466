"""A real vLLM server on the CPU, as a process that can be asked, watched and killed.

It runs from a virtual environment of its own: the one named by VLLM_VENV, else `.venv-vllm` beside the sources.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from support.serving import free_port, get

ROOT = Path(__file__).parents[2]
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
START_S = 300.0


def vllm_venv() -> Path:
    return Path(os.environ.get("VLLM_VENV") or ROOT / ".venv-vllm").absolute()


class VllmServer:
    """`vllm serve` of one model directory under the name `m`. A context manager; `start` again after a kill."""

    def __init__(
        self, model_dir: Path, log_path: Path, *more: str, max_sequences: int = 32, **environment: str
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self._command = [
            *(str(vllm_venv() / "bin" / "vllm"), "serve", str(model_dir), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(max_sequences)),
            *("--num-gpu-blocks-override", str(BLOCKS_PER_CEILING), "--scheduling-policy", "priority"),
            *("--enable-prefix-caching", *more),
        ]
        self._environment = {**ENVIRONMENT, **environment}
        self._popen: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "VllmServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def start(self) -> None:
        self.begin()
        self.wait()

    def begin(self) -> None:
        self.stop()
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                self._command,
                env={**_without_pythons(os.environ), **self._environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it has generated a token: a server says that it is healthy before it knows."""
        end = time.monotonic() + START_S
        while not self.generates():
            assert self._popen is not None
            assert self._popen.poll() is None, self._log_tail()
            assert time.monotonic() < end, self._log_tail()
            time.sleep(0.2)

    def stop(self) -> None:
        """Everything it started too."""
        if self._popen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
            self._popen = None

    def send_signal(self, number: signal.Signals) -> None:
        """To the API server alone."""
        os.kill(self.pid, number)

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

    def generates(self) -> bool:
        if self._popen is None or self._popen.poll() is not None:
            return False
        try:
            return self._one_token() == 200
        except (OSError, http.client.HTTPException):
            return False

    def _one_token(self) -> int:
        # A server that was told to end may take the call and never answer.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            body = json.dumps({"model": "m", "prompt": [9, 9, 9], "max_tokens": 1})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            return connection.getresponse().status
        finally:
            connection.close()

    def _log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:]


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


def _without_pythons(environment: "os._Environ[str]") -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith("PYTHON")}
