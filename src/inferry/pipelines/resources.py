"""What pipelines use besides models: Python functions, and files of documents. Loaded once, before anything runs."""

import importlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from inferry.domain.errors import InvalidRequest
from inferry.pipelines.declaration import FunctionStage, Pipeline, RankStage
from inferry.pipelines.graph import Graph, Node, PipelineError
from inferry.pipelines.similarity import VectorIndex


class StoredDocuments(Struct, frozen=True):
    """The documents of a file."""

    texts: tuple[str, ...]
    index: VectorIndex


class _Line(Struct):
    text: str
    vector: list[float]


class Resources(Struct, frozen=True):
    """Functions by `package.module:name`, documents by file name."""

    functions: dict[str, Callable[..., Any]] = {}
    documents: dict[str, StoredDocuments] = {}


def load_resources(graph: Graph, directory: Path) -> Resources:
    """What the graph uses. Files are relative to the directory. Raises PipelineError."""
    found = Resources()
    for node in _all_nodes(graph):
        stage = node.stage
        if isinstance(stage, FunctionStage) and stage.function not in found.functions:
            function = load_object(stage.function)
            if not callable(function):
                raise PipelineError(f"{stage.function} is no function")
            found.functions[stage.function] = function
        elif isinstance(stage, RankStage) and stage.file is not None and stage.file not in found.documents:
            found.documents[stage.file] = _load_documents(directory / stage.file)
    return found


def load_object(name: str) -> Any:
    """The object `package.module:name`. Raises PipelineError."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything while it is imported
        raise PipelineError(f"{name} cannot be imported: {type(error).__name__}: {error}") from None


def load_pipeline(name: str) -> Pipeline:
    """A pipeline that is declared in Python. Raises PipelineError."""
    found = load_object(name)
    if not isinstance(found, Pipeline):
        raise PipelineError(f"{name} is no pipeline")
    return found


def _all_nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        if node.body is not None:
            yield from _all_nodes(node.body)


def _load_documents(path: Path) -> StoredDocuments:
    decoder = msgspec.json.Decoder(_Line)
    texts, vectors, number = [], [], 0
    try:
        with path.open("rb") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    one = decoder.decode(line)
                    texts.append(one.text)
                    vectors.append(array("f", one.vector))
        return StoredDocuments(tuple(texts), VectorIndex(vectors))
    except OSError as error:
        raise PipelineError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, OverflowError):
        raise PipelineError(f'{path}:{number} must have the form {{"text": "…", "vector": […]}}') from None
    except InvalidRequest as error:
        raise PipelineError(f"{path}: {error.message}") from None
