"""`check-config` finds wrong functions of `kind: python` workers, without importing them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from inferry.cli.config.loader import parse
from inferry.cli.config.python_functions import check_functions
from inferry.cli.config.schema import ConfigError
from inferry.cli.main import app
from inferry.cli.worker_wiring import make_worker
from inferry.domain.clock import ManualClock

MODULE = """

def function(inputs): ...
async def asynchronous(inputs): ...
class Model: ...
assigned = Model()
annotated: Model = Model()
from somewhere import imported as renamed
"""


def a_worker(directory: Path, function: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "own",
        "kind": "python",
        "function": function,
        "model": "m",
        "task": "embed",
        "directory": str(directory),
        **more,
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "checked_package").mkdir()
    (tmp_path / "checked_package" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "checked_package" / "module.py").write_text(MODULE)
    (tmp_path / "conditional_module.py").write_text("if True:\n    def function(inputs): ...\n")
    (tmp_path / "wrong_module.py").write_text("def function(:")
    return tmp_path


def problems(directory: Path, function: str) -> list[str]:
    return list(check_functions(parse({"workers": [a_worker(directory, function)]}).workers))


@pytest.mark.parametrize("name", ["function", "asynchronous", "assigned", "annotated", "renamed"])
def test_functions_are_found_without_being_imported(directory: Path, name: str) -> None:
    assert problems(directory, f"checked_package.module:{name}") == []


def test_what_only_an_import_can_tell_passes(directory: Path) -> None:
    assert problems(directory, "conditional_module:anything") == []
    assert problems(directory, "json:loads") == [], "a module of the standard library"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("checked_package.module:missing", "module checked_package.module has no function missing"),
        ("checked_package.other:function", "there is no module checked_package.other in "),
        ("no_such_package:function", "there is no module no_such_package in "),
        ("wrong_module:function", "module wrong_module cannot be read: SyntaxError"),
    ],
)
def test_a_function_that_is_not_there_is_named(directory: Path, function: str, message: str) -> None:
    (problem,) = problems(directory, function)
    assert problem.startswith(f"workers[0].function: {message}")
    (worker,) = parse({"workers": [a_worker(directory, function)]}).workers
    with pytest.raises(ConfigError, match="worker `own`: "):
        make_worker(worker, ManualClock())


def test_check_config_fails_for_it(directory: Path) -> None:
    file = directory / "inferry.yaml"
    file.write_text(yaml.safe_dump({"workers": [a_worker(directory, "no_such_package:function")]}))
    result = CliRunner().invoke(app, ["check-config", "--config", str(file)])
    assert result.exit_code != 0
    assert "there is no module no_such_package" in result.output


@pytest.mark.parametrize("function", ["module", "module.function", "mod-ule:f", "module:f.g", ":f", "a..b:f"])
def test_a_path_of_the_wrong_form_is_refused(directory: Path, function: str) -> None:
    with pytest.raises(ConfigError, match=r"must be written as package\.module:name"):
        parse({"workers": [a_worker(directory, function)]})


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"call_timeout_s": 0}, {"gpus": -1}, {"task": "sing"}])
def test_wrong_values_are_refused(directory: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        parse({"workers": [a_worker(directory, "module:function", **wrong)]})
