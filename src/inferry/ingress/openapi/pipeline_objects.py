"""Objects of the answers of pipelines."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from inferry.ingress.openapi.responses import Usage


class PipelineInputObject(Struct, forbid_unknown_fields=True):
    """An input of a pipeline."""

    type: str
    required: bool


class PipelineStageObject(Struct, forbid_unknown_fields=True):
    """A stage of a pipeline, and the stages whose results it needs."""

    name: str
    kind: Literal["embed", "rank", "generate", "join", "function", "map"]
    needs: list[str]
    type: str


class PipelineObject(Struct, forbid_unknown_fields=True):
    """A pipeline. Its templates are not shown."""

    id: str
    object: Literal["pipeline"]
    inputs: dict[str, PipelineInputObject]
    stages: list[PipelineStageObject]
    output: str
    chat_input: str | None
    deadline_ms: int | None


class PipelineList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[PipelineObject]


class PipelineResult(Struct, forbid_unknown_fields=True):
    """The result of a run. `usage` is the sum over all stages."""

    id: str
    object: Literal["pipeline.result"]
    created: int
    pipeline: str
    run_id: str
    output: Any
    usage: Usage
    stages: dict[str, Any] | UnsetType = UNSET
