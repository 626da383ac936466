"""The engine on a CPU needs nothing of the GPU's part."""

import subprocess
import sys

_PROGRAM = """
import sys
sys.modules["triton"] = None  # an import of it fails
import inferry.cli.worker_wiring, inferry.engine.process, inferry.engine.runner
print(sorted(name for name in sys.modules if name.startswith("inferry.engine.gpu")))
"""


def test_a_cpu_needs_no_triton() -> None:
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[]"
