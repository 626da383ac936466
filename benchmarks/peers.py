"""Other gateways as separate processes, if they are installed (`make venv-peers`).

They have their own virtual environment, because they need other versions of the same packages. Each runs with its
defaults, one process, and no optional features.
"""

import json
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.serving import free_port, run_process, wait_for
from inferry.cli.checkout import ROOT

VENV = "PEERS"
"""The environment variable that names their virtual environment."""
USUAL_VENV = ROOT / ".venv-peers"

Started = tuple[int, subprocess.Popen[bytes], tuple[str, ...]]
"""The port it listens on, its process, and the headers a call needs."""


def installed() -> dict[str, str]:
    """Peers that can be measured, with their versions."""
    python = _venv() / "bin" / "python"
    found = {}
    for name in STARTS:
        if (_venv() / "bin" / name).is_file():
            version_output = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
            done = subprocess.run([python, "-c", version_output], capture_output=True, text=True, check=True)
            found[name] = done.stdout.strip()
    return found


@contextmanager
def start_peer(name: str, backend: int, directory: Path, *, core: int) -> Iterator[Started]:
    """The peer, ready, in front of an OpenAI-compatible server on this port that serves the model `m`."""
    with ExitStack() as stack:
        yield STARTS[name](stack, backend, directory, core)


def _smg(stack: ExitStack, backend: int, directory: Path, core: int) -> Started:
    port = free_port()
    command = [
        *(str(_venv() / "bin" / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", f"http://127.0.0.1:{backend}", "--log-level", "error"),
    ]
    process = stack.enter_context(run_process(command, core=core, cwd=directory))
    wait_for(f"http://127.0.0.1:{port}/readiness", process)
    return port, process, ()


def _litellm(stack: ExitStack, backend: int, directory: Path, core: int) -> Started:
    port, key = free_port(), f"sk-{secrets.token_hex(16)}"
    server = {"model": "openai/m", "api_base": f"http://127.0.0.1:{backend}/v1", "api_key": "none"}
    config = directory / "litellm.yaml"
    config.write_text(json.dumps({"model_list": [{"model_name": "m", "litellm_params": server}]}))
    command = [
        *(str(_venv() / "bin" / "litellm"), "--host", "127.0.0.1", "--port", str(port)),
        *("--config", str(config)),
    ]
    extra = {"LITELLM_MASTER_KEY": key, "LITELLM_LOG": "ERROR"}
    process = stack.enter_context(run_process(command, core=core, cwd=directory, extra_env=extra, quiet=True))
    wait_for(f"http://127.0.0.1:{port}/health/readiness", process)
    return port, process, (f"authorization: Bearer {key}",)


STARTS: dict[str, Callable[[ExitStack, int, Path, int], Started]] = {"smg": _smg, "litellm": _litellm}


def _venv() -> Path:
    return Path(os.environ.get(VENV, USUAL_VENV))
