"""The same package with its scheduler compiled, to be measured beside the one that runs here.

Built from the checkout as `INFERRY_COMPILED=1 pip install .` builds it, but put aside.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
BUILT = ROOT / "build" / "compiled"


def build() -> Path | None:
    """Compile into build/compiled, a minute or so where something has changed; None, and why, where that cannot be."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    lacking = [
        what
        for what, is_there in (
            ("a checkout", (ROOT / "setup.py").exists()),
            ("mypyc", importlib.util.find_spec("mypyc") is not None),
            (f"the C compiler {compiler}", shutil.which(compiler) is not None),
        )
        if not is_there
    ]
    if lacking:
        print(f"nothing is compiled without {' and '.join(lacking)}", flush=True)
        return None
    shutil.rmtree(BUILT, ignore_errors=True)  # or what is no longer in the source would still be there
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(BUILT)]
    build = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"INFERRY_COMPILED": "1"}, capture_output=True, text=True
    )
    if build.returncode:
        raise RuntimeError(f"the scheduler does not compile:\n{build.stdout[-2000:]}{build.stderr[-2000:]}")
    return BUILT


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
