"""Hot packages are compiled by mypyc: every module of them is in the list, and mypyc can compile it."""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
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


def test_of_other_packages_only_the_proxy_of_observe_is_compiled(build: ModuleType) -> None:
    compiled = {Path(path).relative_to("src/inferry") for path in build.modules()}
    assert {path for path in compiled if path.parts[0] not in HOT_PACKAGES} == {Path("cli/observe_proxy.py")}
    assert {path.parts[0] for path in compiled} >= HOT_PACKAGES


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


def test_no_constant_that_a_test_replaces_is_final(build: ModuleType) -> None:
    """Compiled code holds the value of a Final constant: a test that replaces it would have no effect there."""
    final = {
        (path.removeprefix("src/").removesuffix(".py").replace("/", "."), node.target.id)
        for path in build.modules()
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "Final" in ast.unparse(node.annotation)
    }
    replaced = {(module, name) for path in (ROOT / "tests").rglob("*.py") for module, name in names_replaced_in(path)}
    assert ("inferry.dispatch.lifecycle", "RETRY_DELAY_S") in replaced
    assert not final & replaced


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


def names_replaced_in(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of every `setattr(module, "NAME", ...)` and `setattr("module.NAME", ...)` of a test."""
    tree = ast.parse(path.read_text())
    modules: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                modules.setdefault(one.asname or one.name, set()).add(f"{node.module}.{one.name}")
        elif isinstance(node, ast.Import):
            for one in node.names:
                modules.setdefault(one.asname or one.name, set()).add(one.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            match node.args:
                case [ast.Constant(value=str(dotted)), *_]:
                    module, _, name = dotted.rpartition(".")
                    yield module, name
                case [ast.Name(id=alias), ast.Constant(value=str(name)), *_]:
                    yield from ((module, name) for module in modules.get(alias, ()))


def named_in_pyproject(build: ModuleType) -> dict[str, list[str]]:
    named: dict[str, list[str]] = build.tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["inferry"][
        "compiled"
    ]
    return named


def test_a_compiler_without_link_time_optimisation_compiles_without_it(build: ModuleType, tmp_path: Path) -> None:
    refusing = tmp_path / "gcc"
    refusing.write_text('#!/bin/sh\ncase "$*" in *-flto*) exit 1;; esac\nexec gcc "$@"\n')
    refusing.chmod(0o755)
    assert build.link_time_options(str(refusing)) == []
    assert build.link_time_options("gcc") == build.LINK_TIME


def test_no_comprehension_is_in_a_call_with_attributes_of_an_object_that_only_a_local_variable_holds(
    build: ModuleType,
) -> None:
    """Such attributes are borrowed until the end of the expression; code made by mypyc drops the object before, where
    the statement inside of a comprehension ends."""
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp)
    for path in build.modules():
        for function in ast.walk(ast.parse((ROOT / path).read_text())):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            made = {
                target.id
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for call in ast.walk(function):
                if not isinstance(call, ast.Call):
                    continue
                borrowed = False
                for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                    inner = list(ast.walk(argument))
                    is_unsafe = borrowed and any(isinstance(node, comprehensions) for node in inner)
                    assert not is_unsafe, f"{path}:{call.lineno} has a comprehension after a borrowed attribute"
                    methods = [node.func for node in inner if isinstance(node, ast.Call)]
                    borrowed |= any(
                        isinstance(node, ast.Attribute)
                        and isinstance(node.value, ast.Name)
                        and node.value.id in made
                        and node not in methods
                        for node in inner
                    )
