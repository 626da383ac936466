"""The same package with the path of a call compiled, to be measured beside the plain one.

Built from the checkout as `pip install .` builds it, but put aside, where `make serve` looks for it too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from inferry.checkout import ROOT

BUILT = ROOT / "build" / "compiled"


def build() -> Path | None:
    """Compile into build/compiled, a minute or two where something has changed; None, and why, where that cannot be."""
    if not (ROOT / "setup.py").exists():
        print("nothing is compiled without a checkout", flush=True)
        return None
    done = subprocess.run(["make", "--no-print-directory", "compiled"], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise RuntimeError("the path of a call does not compile")
    return BUILT if list(BUILT.glob("*__mypyc*")) else None


def call(built: Path, module: str, function: str) -> Any:
    """What a function of the compiled package returns, as JSON, from a process of its own."""
    statement = (
        "import json, inferry.scheduling.scheduler as s; assert not s.__file__.endswith('.py'), s.__file__\n"
        f"from {module} import {function} as f; print(json.dumps(f()))"
    )
    environment = os.environ | {"PYTHONPATH": str(built)}
    done = subprocess.run(
        [sys.executable, "-c", statement], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)
