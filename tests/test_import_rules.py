"""Who may import whom: every room of the house keeps to its own neighbours."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import inferry

PACKAGE = Path(inferry.__file__).parent

CORE = {"inferry.domain"}
MAY_IMPORT: dict[str, set[str]] = {
    "domain": {"msgspec", "inferry.domain"},
    "admission": CORE | {"msgspec", "inferry.admission"},
    "scheduling": CORE | {"msgspec", "inferry.scheduling"},
    "streams": CORE | {"msgspec", "inferry.streams"},
    "ledger": CORE | {"msgspec", "inferry.ledger"},
    "observe": CORE | {"prometheus_client", "opentelemetry", "inferry.observe"},
    "engine": CORE | {"msgspec", "numpy", "torch", "safetensors", "tokenizers", "jinja2", "inferry.engine"},
    "dispatch": CORE
    | {"msgspec"}
    | {f"inferry.{name}" for name in ("admission", "scheduling", "streams", "ledger", "observe", "dispatch")},
    "ingress": CORE
    | {"msgspec", "httptools", "inferry._version"}
    | {f"inferry.{name}" for name in ("dispatch.gateway", "observe", "ingress")},
    "sim": CORE | {"msgspec"} | {f"inferry.{name}" for name in ("admission", "scheduling", "streams", "ledger", "sim")},
    "adapters": CORE | {"msgspec", "inferry.adapters"},
    "adapters/workers/http1": {"httptools"},
    "adapters/workers/embedded": {"inferry.engine"},
    "adapters/workers/engine_link": {"inferry.engine"},
    "adapters/workers/engine_jobs": {"inferry.engine"},
    "adapters/workers/engine_worker": {"inferry.engine"},
    "adapters/workers/vllm_inprocess": {"inferry.engine"},
    "adapters/workers/vllm_process": {"inferry.engine", "vllm"},
    "adapters/ledgers": {"sqlalchemy"},
}
# Time is an argument and decisions are return values: nothing here may look at a clock, wait or draw lots.
FORBIDDEN_STDLIB = {
    "scheduling": {"asyncio", "time", "random", "logging", "threading", "socket"},
    "admission": {"asyncio", "time", "random", "logging", "threading", "socket"},
}
# torch only where something is computed: the planner and the block pool are tested on a laptop without it.
TORCH_MODULES = {
    "engine/model",
    "engine/loader",
    "engine/sampling",
    "engine/runner",
    "engine/tiny",
    "engine/kernels",
}


def modules() -> Iterator[Path]:
    yield from sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return str(path.relative_to(PACKAGE).with_suffix(""))


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who depends on whom"
            if node.module is not None:
                yield node.module


def covers(allowed: set[str], name: str) -> bool:
    return any(name == one or name.startswith(one + ".") for one in allowed)


@pytest.mark.parametrize("path", list(modules()), ids=room)
def test_a_module_imports_only_its_neighbours(path: Path) -> None:
    here = room(path)
    rules = [allowed for prefix, allowed in MAY_IMPORT.items() if here == prefix or here.startswith(prefix + "/")]
    if not rules:
        return  # cli, wiring, config, bench, docs: the outside of the house
    allowed = set().union(*rules)
    forbidden = set().union(*(names for prefix, names in FORBIDDEN_STDLIB.items() if here.startswith(prefix + "/")))
    for name in imported_names(path):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names:
            assert top not in forbidden, f"{here} imports {name}"
        else:
            assert covers(allowed, name), f"{here} imports {name}"
            if top == "torch":
                assert here in TORCH_MODULES, f"{here} imports torch, but computes nothing"


def test_the_package_imports_with_the_base_install_alone() -> None:
    heavy = {"torch", "tokenizers", "safetensors", "ray", "redis", "psycopg", "transformers", "numpy"}
    always_loaded = ("domain", "scheduling", "streams", "ledger", "observe", "dispatch", "ingress")
    for path in modules():
        here = room(path)
        if here.split("/")[0] in always_loaded or here in {"__init__", "cli", "config", "wiring"}:
            tree = ast.parse(path.read_text())
            for node in tree.body:  # imports inside functions are how an extra stays optional
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
                assert not {n.split(".")[0] for n in names} & heavy, f"{here} needs an extra at import time"
