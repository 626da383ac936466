"""Runs promtool. `make test` puts it beside the virtual environment (scripts/install_promtool.sh)."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".venv" / "promtool" / "promtool"


def promtool(*arguments: str | Path, given: str | None = None) -> str:
    """The output. A check that fails, or a promtool that is missing, fails the test. `given` is its input."""
    program = str(INSTALLED) if INSTALLED.exists() else shutil.which("promtool")
    if program is None:
        pytest.fail("promtool is missing: run `make test`, or scripts/install_promtool.sh .venv/promtool")
    command = [program, *map(str, arguments)]
    ran = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def write_yaml(path: Path, content: Any) -> Path:
    path.write_text(yaml.safe_dump(content, sort_keys=False, width=10_000), encoding="utf-8")
    return path
