"""One commit in a process of its own, for comparisons: runs functions of today's benchmarks with its package.

    python -m benchmarks.commit_process PACKAGE

Every line of input is a JSON list, a module of benchmarks, a function of it and its arguments; the answer is one line.
PACKAGE is the directory of the commit's compiled package and comes first on PYTHONPATH.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.layouts import install, layout_of

ROOT = Path(__file__).parents[1]


class CommitProcess:
    """The process as its owner sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, module: str, function: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps([module, function, *arguments]), file=self._process.stdin, flush=True)

    def result(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        return json.loads(line)

    def call(self, module: str, function: str, *arguments: Any) -> Any:
        self.start(module, function, *arguments)
        return self.result()


@contextmanager
def run_commit_process(package: Path) -> Iterator[CommitProcess]:
    command = [sys.executable, "-m", "benchmarks.commit_process", str(package)]
    environment = os.environ | {"PYTHONPATH": f"{package}:{ROOT}", "PYTHONHASHSEED": "0"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT) as process:
        try:
            yield CommitProcess(process)
        finally:
            process.kill()


def main(package: Path) -> None:
    install(layout_of(package))
    answers, sys.stdout = sys.stdout, sys.stderr  # so that prints of a benchmark are no answers
    for line in sys.stdin:
        module, function, *arguments = json.loads(line)
        result = getattr(import_module(f"benchmarks.{module}"), function)(*arguments)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
