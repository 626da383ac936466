"""`transformers serve` and the server of llama-cpp-python on the CPU, each from a virtual environment of its own.

TRANSFORMERS_VENV and LLAMACPP_VENV name these; else they are beside the sources, where `make test-engines` puts them.
"""

import os
import subprocess
from pathlib import Path

from safetensors.torch import load_file, save_file

from support.contract_model import ensure_contract_model
from support.engine_process import ROOT, EngineProcess

CONTEXT = 1024
_THREADS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_EOS = 2


def _venv(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or ROOT / default).absolute()


def ensure_endless_model(directory: Path) -> Path:
    """The contract's model without an end token: these engines cannot be told to write on after one."""
    ensure_contract_model(directory)
    path = directory / "model.safetensors"
    weights = load_file(str(path))
    weights["lm_head.weight"][_EOS] = 0.0
    save_file(weights, str(path), metadata={"format": "pt"})
    return directory


class TransformersServer(EngineProcess):
    """`transformers serve` of a model directory `m`: the name under which it is served is its path."""

    def __init__(self, scratch: Path) -> None:
        self.model_dir = ensure_endless_model(scratch / "m")
        super().__init__(scratch / "transformers.log", {**_THREADS, "HF_HOME": str(scratch)}, scratch)
        self._command = [
            *(str(_venv("TRANSFORMERS_VENV", ".venv-transformers") / "bin" / "transformers"), "serve", "m"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu", "--dtype", "float32"),
        ]


class LlamaCppServer(EngineProcess):
    """llama-cpp-python's server of the same model as a GGUF file."""

    def __init__(self, scratch: Path, *more: str) -> None:
        self.model_dir = ensure_endless_model(scratch / "m")
        super().__init__(scratch / "llamacpp.log", _THREADS)
        python, model = str(_venv("LLAMACPP_VENV", ".venv-llamacpp") / "bin" / "python"), scratch / "m.gguf"
        script = Path(__file__).with_name("write_gguf.py")
        subprocess.run([python, str(script), str(self.model_dir), str(model)], env={}, check=True)
        self._command = [
            *(python, "-m", "llama_cpp.server", "--model", str(model), "--model_alias", "m"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--n_ctx", str(CONTEXT), "--n_threads", "1"),
            *("--n_threads_batch", "1", "--verbose", "false", *more),
        ]
