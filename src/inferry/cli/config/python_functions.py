"""Whether the function of a `kind: python` worker exists. Nothing of it is imported: its module may do anything."""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from inferry.cli.config.workers import PythonWorkerConfig, WorkerConfig

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_function_path(path: str) -> bool:
    return _PATH.fullmatch(path) is not None


def check_functions(workers: Sequence[WorkerConfig]) -> Iterator[str]:
    """Error messages for functions that cannot be found."""
    for index, worker in enumerate(workers):
        if isinstance(worker, PythonWorkerConfig) and (problem := function_error(worker)) is not None:
            yield f"workers[{index}].function: {problem}"


def function_error(worker: PythonWorkerConfig) -> str | None:
    """Why the function cannot be found; None if it can, or if only its import can tell."""
    module, _, name = worker.function.partition(":")
    spec = _find(module, str(Path(worker.directory).expanduser().absolute()))
    if spec is None:
        return f"there is no module {module} in {worker.directory} or among the installed packages"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return f"module {module} cannot be read: {type(error).__name__}"
    names = set(_names(tree.body))
    return None if name in names or "*" in names else f"module {module} has no function {name}"


def _find(module: str, directory: str) -> ModuleSpec | None:
    """The module's place, found without importing the packages that it is in."""
    search: Sequence[str] | None = [directory, *sys.path]
    parts = module.split(".")
    for depth in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if spec is None:
            return None
        search = spec.submodule_search_locations or []
    return spec


def _names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that a module defines; `*` where it may define others."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)
            case ast.Assign():
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Expr():
                pass
            case _:
                yield "*"  # such as an `if`
