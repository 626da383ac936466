"""Which package may import which, with the exceptions that are left. Imports for type checking count too."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import inferry

PACKAGE = Path(inferry.__file__).parent

DOMAIN = {"inferry.domain"}
PURE = {"inferry.admission", "inferry.runs", "inferry.prediction", "inferry.scheduling", "inferry.settings"}
ALLOWED: dict[str, set[str]] = {
    "domain": {"msgspec"},
    "admission": DOMAIN | {"msgspec"},
    "runs": DOMAIN | {"msgspec"},
    "prediction": DOMAIN | {"msgspec"},
    "scheduling": DOMAIN | {"msgspec"},
    "settings": DOMAIN | {"msgspec"},
    "streams": DOMAIN | {"msgspec"},
    "ledger": DOMAIN | {"msgspec", "sqlalchemy"},
    "observe": DOMAIN | {"msgspec", "prometheus_client", "opentelemetry"},
    "engine": DOMAIN | {"msgspec", "numpy", "torch", "safetensors", "tokenizers", "jinja2", "triton", "llguidance"},
    "dispatch": DOMAIN | PURE | {"msgspec", "inferry.streams", "inferry.ledger", "inferry.observe"},
    "ingress": DOMAIN
    | {"msgspec", "httptools", "inferry._version", "inferry.dispatch.gateway", "inferry.durable", "inferry.observe"}
    | {"inferry.pipelines"},
    "pipelines": DOMAIN | {"msgspec", "inferry.dispatch.gateway"},
    "pipelines/batched": {"inferry.scheduling.batching"},
    "durable": DOMAIN | {"msgspec", "inferry.dispatch.gateway"},
    "workers": DOMAIN | {"msgspec"},
    "cluster": DOMAIN | {"msgspec", "inferry.dispatch.gateway"},
    "cluster/redis_client": {"redis"},
    "cluster/redis_work_queue": {"redis"},
    "workers/http_client": {"httptools"},
    "workers/remote": {"inferry.cluster"},
    "workers/in_process": {"inferry.engine", "inferry.pipelines.batched", "vllm"},
    "workers/ray": {"inferry.engine", "ray"},
    "report": {"msgspec"},
    "client": {"msgspec", "httptools"},
    "client/adapters": {"agents", "anthropic", "langchain_anthropic", "langchain_core", "langchain_openai", "openai"},
    "sim": DOMAIN | PURE | {"msgspec", "inferry.streams", "inferry.ledger", "inferry.report"},
    "loadgen": DOMAIN | {"msgspec", "inferry._version", "inferry.report", "inferry.sim", "inferry.workers"},
}
"""What a package may import besides the standard library and itself. `cli` may import anything."""

IMPURE = {"asyncio", "time", "random", "logging", "threading", "socket"}
"""Forbidden in pure packages: time is an argument, decisions are return values."""

TORCH_MODULES = {
    "engine/adapter_weights",
    "engine/cpu_adapters",
    "engine/lora",
    "engine/model",
    "engine/loader",
    "engine/rope",
    "engine/logprobs",
    "engine/pooling",
    "engine/sampling",
    "engine/runner",
    "engine/step_batch",
    *(f"engine/gpu/{name}" for name in ("decoder", "graphs", "loading", "runner", "sampling", "tensors", "weights")),
    "engine/gpu/adapters",
    *(f"engine/gpu/kernels/{name}" for name in ("activation", "attention", "embedding", "norms", "rotary")),
    "engine/gpu/kernels/masks",
    "engine/gpu/kernels/lora",
    "engine/gpu/kernels/thresholds",
    *(f"engine/profiling/{name}" for name in ("measure", "probes", "runners", "session")),
}
"""torch only where something is computed: the planner and the block pool are tested without it."""

COMPOSITION_ROOT = {
    *("cli/cluster_wiring", "cli/job_wiring", "cli/provider_wiring", "cli/roles", "cli/sharing_wiring"),
    *("cli/election_wiring", "cli/ray_wiring", "cli/settings_wiring", "cli/storage_wiring", "cli/wiring"),
    *("cli/pull_wiring", "cli/queue_wiring", "cli/owned_workers"),
    *("cli/observe_wiring", "cli/worker_wiring", "cli/ingress_tokenizers"),
}
ALSO_IMPORT_WORKERS_OR_STORES = {
    "cli/cascades",
    "cli/keys",
    "cli/ledger",
    "loadgen/events",
    "loadgen/load_generator",
    "loadgen/prober",
    "loadgen/requests",
    "loadgen/server",
    "loadgen/stream",
    "loadgen/target",
}
"""Exceptions to "only the composition root imports workers and stores". The list may only shrink."""


PARTS_OF_THE_GATEWAY = {"models", "lineages"}
"""Parts of the facade that have methods of their own: what parsing reads, and parents of runs before a call."""
PRIVATE_PARTS = {"estimator"}
"""What a part of the facade is made of. It has no other users, under whatever name the part was passed on."""


def modules() -> Iterator[Path]:
    yield from sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE).with_suffix(""))


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide dependencies"
            assert node.module is not None
            for alias in node.names:
                inner = PACKAGE.parent / node.module.replace(".", "/") / alias.name
                is_module = inner.with_suffix(".py").exists() or inner.with_suffix(".pyi").exists() or inner.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def covers(allowed: set[str], name: str) -> bool:
    return any(name == one or name.startswith(one + ".") for one in allowed)


@pytest.mark.parametrize("path", list(modules()), ids=name_of)
def test_a_module_imports_only_what_its_package_may(path: Path) -> None:
    here = name_of(path)
    package = here.split("/")[0]
    rules = [allowed for prefix, allowed in ALLOWED.items() if here == prefix or here.startswith(prefix + "/")]
    names = list(imported_modules(path))
    assert [name for name in names if name.split(".")[0] in ("benchmarks", "tests", "support")] == [], here
    if not rules:
        assert package in ("cli", "__init__", "__main__", "_version"), f"{package} has no import rule"
        return
    allowed = {f"inferry.{package}"}.union(*rules)
    for name in names:
        top = name.split(".")[0]
        if top in sys.stdlib_module_names:
            assert f"inferry.{package}" not in PURE or top not in IMPURE, f"{here} imports {name}"
        else:
            assert covers(allowed, name), f"{here} imports {name}"
            if top == "torch":
                assert here in TORCH_MODULES, f"{here} imports torch, but computes nothing"


def test_only_the_composition_root_imports_workers_and_stores() -> None:
    found = set()
    for path in modules():
        here = name_of(path)
        if here.startswith(("workers", "ledger")):
            continue
        if any(covers({"inferry.workers", "inferry.ledger.stores"}, name) for name in imported_modules(path)):
            found.add(here)
    assert found == {*COMPOSITION_ROOT, *ALSO_IMPORT_WORKERS_OR_STORES}


def names_after_gateway(node: ast.Attribute) -> list[str]:
    """The attributes that follow a gateway in a chain such as `self._gateway.models.cards`; none without a gateway."""
    names: list[str] = []
    one: ast.expr = node
    while isinstance(one, ast.Attribute):
        if one.attr in ("gateway", "_gateway"):
            return names
        names.insert(0, one.attr)
        one = one.value
    return names if isinstance(one, ast.Name) and one.id in ("gateway", "_gateway") else []


@pytest.mark.parametrize("package", ["ingress", "durable", "pipelines", "cluster"])
def test_the_gateway_is_a_facade_that_no_module_reaches_through(package: str) -> None:
    for path in sorted((PACKAGE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = names_after_gateway(node) if isinstance(node, ast.Attribute) else []
            is_method_of_part = len(names) == 2 and names[0] in PARTS_OF_THE_GATEWAY
            assert len(names) < 2 or is_method_of_part, f"{name_of(path)}: {'.'.join(names)}"
            is_private = isinstance(node, ast.Attribute) and node.attr in PRIVATE_PARTS
            assert not is_private, f"{name_of(path)} reaches through a part of the gateway: {ast.unparse(node)}"


def test_imports_have_no_cycle() -> None:
    graph = {
        ".".join(("inferry", *name_of(path).split("/"))).removesuffix(".__init__"): set(imported_modules(path))
        for path in modules()
    }

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            one = todo.pop()
            if one in graph and one not in seen:
                seen.add(one)
                todo += graph[one]
        return seen

    reach = {name: reachable(name) for name in graph}
    assert [name for name in graph if name in reach[name]] == []


def test_the_package_imports_with_the_base_install_alone() -> None:
    heavy = {"torch", "tokenizers", "safetensors", "ray", "redis", "psycopg", "transformers", "numpy"}
    always_loaded = {"__init__", "domain", "scheduling", "streams", "ledger", "observe", "dispatch", "ingress", "cli"}
    for path in modules():
        here = name_of(path)
        if here.split("/")[0] in always_loaded:
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
