"""Hot packages are compiled by mypyc: every module of them is in the list, and mypyc can compile it."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from test_import_rules import imported_modules

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "inferry"
HOT_PACKAGES = {
    *("admission", "cluster", "dispatch", "domain", "ingress", "ledger", "observe", "prediction", "runs", "scheduling"),
    *("streams", "workers"),
}
COLD_PACKAGES = {"cli", "client", "durable", "engine", "loadgen", "pipelines", "report", "settings", "sim"}
"""Packages that no call passes through, and the embedded engine, whose time is spent in torch."""


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inferry_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_of_a_hot_package_is_compiled_or_named_as_plain(build: ModuleType) -> None:
    compiled = {path.removeprefix("src/inferry/") for path in build.modules()}
    plain = set(named_in_pyproject(build)["exclude"])
    for package in HOT_PACKAGES:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            if path.name != "__init__.py":
                where = "`include` or `exclude` of [tool.inferry.compiled] in pyproject.toml"
                assert name in compiled | plain, f"{name} is in neither of {where}"


def test_every_package_is_hot_or_cold() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == HOT_PACKAGES | COLD_PACKAGES
    assert not HOT_PACKAGES & COLD_PACKAGES


def test_nothing_outside_hot_packages_is_compiled(build: ModuleType) -> None:
    assert {Path(path).relative_to("src/inferry").parts[0] for path in build.modules()} == HOT_PACKAGES


def test_the_scheduler_and_the_path_of_a_call_are_compiled(build: ModuleType) -> None:
    assert {
        "src/inferry/scheduling/scheduler.py",
        "src/inferry/dispatch/loop.py",
        "src/inferry/ingress/http/connection.py",
        "src/inferry/workers/openai_http/sse.py",
    } <= set(build.modules())


def test_no_compiled_module_defines_a_struct(build: ModuleType) -> None:
    """mypyc would silently drop class keywords (`frozen`, `kw_only`)."""
    for path in build.modules():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                assert not node.keywords, f"{path}: {node.name} belongs into a module that is not compiled"
                assert "Struct" not in [base.id for base in node.bases if isinstance(base, ast.Name)], path


def test_no_compiled_function_awaits_while_it_handles_an_exception(build: ModuleType) -> None:
    """Code made by mypyc keeps the handled exception in the thread while it is suspended: other tasks see it."""
    for path in build.modules():
        handlers = [
            statement
            for block in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(block, ast.Try)
            for statement in (*(one for handler in block.handlers for one in handler.body), *block.finalbody)
        ]
        for statement in handlers:
            for node in ast.walk(statement):
                is_suspension = isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith)
                assert not is_suspension, f"{path}:{statement.lineno} awaits in `except` or `finally`"


def test_no_compiled_constant_is_a_final_tuple_of_floats(build: ModuleType) -> None:
    """mypyc takes such a tuple for a name that is not set, and raises NameError where it is used."""
    for path in build.modules():
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation):
                floats = [one for one in ast.walk(node.value or node) if isinstance(getattr(one, "value", None), float)]
                assert not isinstance(node.value, ast.Tuple) or not floats, f"{path}:{node.lineno}"


def test_every_name_in_the_list_is_a_module(build: ModuleType) -> None:
    named = named_in_pyproject(build)
    for path in named["exclude"]:
        assert (PACKAGE / path).exists(), f"pyproject.toml names {path}, which does not exist"
    for glob in named["include"]:
        assert any(PACKAGE.glob(glob)), f"pyproject.toml names {glob}, which matches no module"


def test_mypyc_needs_only_what_the_build_requires(build: ModuleType) -> None:
    """pip builds where nothing else is installed, and mypyc follows imports from one module to the next."""
    pyproject = build.tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = {re.split(r"[^\w.-]", one)[0] for one in pyproject["build-system"]["requires"]}
    skipped = {one.removesuffix(".*") for one in pyproject["tool"]["mypy"]["overrides"][0]["module"]}
    todo = [ROOT / path for path in build.modules()]
    seen = set(todo)
    while todo:
        path = todo.pop()
        for name in imported_modules(path):
            top = name.split(".")[0]
            if top == "inferry":
                inner = ROOT / "src" / name.replace(".", "/")
                found = inner.with_suffix(".py") if inner.with_suffix(".py").exists() else inner / "__init__.py"
                if found.exists() and found not in seen:
                    seen.add(found)
                    todo.append(found)
            elif top not in sys.stdlib_module_names:
                where = path.relative_to(ROOT)
                assert top in required | skipped, f"{where} imports {name}, which [build-system] does not require"


def named_in_pyproject(build: ModuleType) -> dict[str, list[str]]:
    named: dict[str, list[str]] = build.tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["inferry"][
        "compiled"
    ]
    return named
