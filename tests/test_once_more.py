"""`make test` runs what failed once more by itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.children import environment

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "once_more.sh"
BESIDE_OTHERS = """
def test_it(request):
    assert not hasattr(request.config, "workerinput")  # set in processes of pytest-xdist
"""
ALWAYS = """
def test_it():
    assert False
"""
MANY = """
import pytest

@pytest.mark.parametrize("number", range(11))
def test_it(number):
    assert False
"""


@pytest.mark.parametrize(
    ("test", "code", "said"),
    [(BESIDE_OTHERS, 0, "UNSTABLE"), (ALWAYS, 1, "1 failed: once more"), (MANY, 1, "11 failed")],
)
def test_what_failed_beside_others_runs_once_more_alone(tmp_path: Path, test: str, code: int, said: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(test)
    runner = tmp_path / "pytest"
    runner.write_text(f'#!/bin/sh\nexec {sys.executable} -m pytest -c /dev/null --rootdir . -p xdist "$@"\n')
    runner.chmod(0o755)
    command = [str(SCRIPT), str(runner), "-q", "-n", "1", "tests"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    assert ("once more" in done.stdout) == (test is not MANY)
