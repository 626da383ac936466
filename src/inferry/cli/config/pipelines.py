"""The `pipelines` section of the configuration: graphs of calls, by name."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from inferry.pipelines.declaration import Pipeline
from inferry.pipelines.graph import CheckedPipeline, PipelineError, check_pipeline, models_of
from inferry.pipelines.resources import load_pipeline, load_resources

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


class PipelineConfig(Pipeline, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pipeline: a graph of stages, called as `/v1/pipelines/NAME`, and with `chat_input` also as a model of chat
    completions. See [Pipelines](../howto/pipelines.md)."""

    python: str | None = None
    """`package.module:name` of a pipeline that is declared in Python. It replaces all other keys."""


def checked_pipelines(pipelines: Mapping[str, PipelineConfig]) -> list[CheckedPipeline]:
    """Raises PipelineError."""
    return [_checked(name, config) for name, config in pipelines.items()]


def check_pipelines(
    pipelines: Mapping[str, PipelineConfig], taken: Collection[str], reached: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Problems of pipelines. Modules of functions are imported, and files of documents are read.

    `taken` are names of other models, `reached` all models that a composed model may call, by its name.
    """
    for name, config in pipelines.items():
        where = f"pipelines.{name}"
        if _NAME.fullmatch(name) is None:
            yield f"{where}: a name has 1 to 64 letters, digits, `.`, `-` and `_`"
        if name in taken:
            yield f"{where}: a worker, or another composed model, has this name"
        if config.python is not None and config != PipelineConfig(python=config.python):
            yield f"{where}.python replaces all other keys; remove them"
            continue
        try:
            checked = _checked(name, config)
        except PipelineError as error:
            yield str(error)
            continue
        for model in dict.fromkeys(models_of(checked.graph)):
            if model in pipelines and model not in taken:
                yield f"{where}: a stage calls the pipeline {model}; it can call models, routes, cascades and ensembles"
            elif found := pipelines.keys() & reached.get(model, ()):
                yield f"{where}: a stage calls {model}, which may call the pipeline {min(found)}"
        try:
            load_resources(checked.graph, Path())
        except PipelineError as error:
            yield f"{where}: {error}"


def _checked(name: str, config: PipelineConfig) -> CheckedPipeline:
    if config.python is None:
        given = {field: getattr(config, field) for field in Pipeline.__struct_fields__}
        return check_pipeline(name, Pipeline(**given))
    try:
        return check_pipeline(name, load_pipeline(config.python))
    except PipelineError as error:
        raise PipelineError(f"pipelines.{name}.python: {error}") from None
