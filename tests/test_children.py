"""Processes that tests start run the code that is tested, and not another checkout that happens to be installed."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import inferry
from inferry.engine.config import EngineConfig
from inferry.workers.in_process.embedded import embedded_program
from support.children import TESTS, environment, import_the_same_tree

WHERE = "import inferry, inferry.scheduling.scheduler as s; print(inferry.__file__, s.__file__)"
OTHER_INTERPRETERS = {
    "support/node_clients.py",
    "support/engine_process.py",
    "support/other_engines.py",
    "workers/test_vllm_in_process.py",
    "mutants/run.py",
    "deploy/dockerfile.py",
}
"""These run Node.js, the Python of an engine, one without any environment, or trees that are changed on purpose."""


def here() -> str:
    scheduler = sys.modules["inferry.scheduling.scheduler"]
    return f"{inferry.__file__} {scheduler.__file__}"


def imported(directory: Path, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", WHERE]
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def another_checkout(directory: Path) -> Path:
    package = directory / "elsewhere" / "inferry" / "scheduling"
    package.mkdir(parents=True)
    for name in ("__init__.py", "../__init__.py", "scheduler.py"):
        (package / name).write_text("")
    return directory / "elsewhere"


def test_a_child_imports_what_its_parent_imports(tmp_path: Path) -> None:
    assert imported(tmp_path) == here()


def test_another_checkout_on_the_path_is_not_what_children_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(another_checkout(tmp_path)))
    assert imported(tmp_path) != here()  # so it would be
    assert imported(tmp_path, environment()) == here()
    import_the_same_tree()
    assert imported(tmp_path) == here()


def test_a_path_that_is_relative_to_this_directory_means_the_same_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.relpath(TESTS))
    assert str(TESTS) in environment()["PYTHONPATH"].split(os.pathsep)


def test_the_engine_process_imports_what_the_gateway_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(another_checkout(tmp_path)))
    assert imported(tmp_path, dict(embedded_program(tmp_path, EngineConfig()).environment)) == here()


def starts_of_processes(path: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) in ("subprocess.run", "subprocess.Popen")]


def test_no_test_gives_a_child_an_environment_that_may_lead_elsewhere() -> None:
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        name = str(path.relative_to(TESTS))
        if name in OTHER_INTERPRETERS or path == Path(__file__):
            continue
        for call in starts_of_processes(path):
            given = [ast.unparse(one.value) for one in call.keywords if one.arg == "env"]
            found += [f"{name}:{call.lineno} {text}" for text in given if not text.startswith("environment(")]
    assert found == []
