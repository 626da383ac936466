"""The package as plain Python, or as it was in another commit, beside the compiled one of `make bench`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from inferry.cli.checkout import ROOT

SOURCE = ROOT / "src"


def call_uncompiled(module: str, function: str) -> Any:
    """The JSON result of a function, run as plain Python in a separate process."""
    statement = (
        "import json; from inferry.cli.checkout import is_compiled; assert not is_compiled()\n"
        f"from {module} import {function} as f; print(json.dumps(f()))"
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", statement], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def build_package_at(commit: str, directory: Path) -> Path:
    """Build the compiled package of a commit; the directory to put on PYTHONPATH."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", "compiled"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True)
    return directory / "compiled"
