"""The path of a call may run compiled: whatever is written in it, mypyc must take, and it must do the same."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inferry_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_decides_and_what_carries_calls_is_compiled(build: ModuleType) -> None:
    modules = {path.removeprefix("src/inferry/") for path in build.modules()}
    assert {
        "scheduling/scheduler.py",
        "dispatch/loop.py",
        "ingress/http/connection.py",
        "workers/openai_http/sse.py",
    } <= modules


def test_no_compiled_module_defines_a_struct(build: ModuleType) -> None:
    """mypyc would drop what stands beside the bases (`frozen`, `kw_only`) and not say so."""
    for path in build.modules():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                assert not node.keywords, f"{path}: {node.name} belongs into a module that is not compiled"
                assert "Struct" not in [base.id for base in node.bases if isinstance(base, ast.Name)], path


def test_every_module_that_stays_plain_is_there(build: ModuleType) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for path in build.tomllib.loads(text)["tool"]["inferry"]["compiled"]["exclude"]:
        assert (ROOT / "src/inferry" / path).exists(), f"{path} is named in pyproject.toml and is not there"
