"""A pipeline as it is declared, in YAML or by `inferry.pipelines.builder`: immutable, and not checked yet."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class PipelineInput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One input of a pipeline."""

    type: str = "text"
    """`text`, `number`, `vector`, `any`, or `list[…]` of one of them."""
    default: Any | UnsetType = UNSET
    """The value where a call gives none. An input without default is required."""


class _Stage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A stage. Its texts may be templates: `{{ input.NAME }}` and `{{ STAGE }}` are replaced by their values."""


class EmbedStage(_Stage, frozen=True, kw_only=True, tag="embed"):
    """Vectors of texts."""

    model: str
    """A model that embeds."""
    input: str
    """A text, or a reference to a list of texts. The stage is a vector, or a list of vectors."""
    options: dict[str, Any] = {}
    """Further fields of the request to `/v1/embeddings`, such as `dimensions`."""


class RankStage(_Stage, frozen=True, kw_only=True, tag="rank"):
    """The best documents of a list, the best one first: by a model that scores, or by the cosine of vectors.

    A result has `index`, `score`, and `text` where the stage has documents. `{{ STAGE.text }}` is the list of texts.
    """

    model: str | None = None
    """A model that scores a text with a document. null compares vectors."""
    query: str
    """The text, or the vector, that documents are compared with."""
    documents: str | None = None
    """A reference to a list of texts. Required with a `model`."""
    vectors: str | None = None
    """A reference to a list of vectors, one for each document."""
    file: str | None = None
    """A file with one document per line: `{"text": "…", "vector": […]}`. It replaces `documents` and `vectors`, and is
    read when the gateway starts."""
    top: int | None = None
    """How many results are kept. null keeps all."""
    options: dict[str, Any] = {}
    """Further fields of the request to `/v1/rerank`."""


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str = "user"
    """`system`, `user` or `assistant`."""
    content: str
    """Text."""


class GenerateStage(_Stage, frozen=True, kw_only=True, tag="generate"):
    """A text that a model generates."""

    model: str
    """A model that generates."""
    messages: tuple[Message, ...]
    """The conversation."""
    max_tokens: int | None = None
    """Maximum output tokens; null sets no limit."""
    temperature: float | None = None
    """Sampling temperature; null is the model's default."""
    options: dict[str, Any] = {}
    """Further fields of the request to `/v1/chat/completions`, such as `seed` or `response_format`."""


class JoinStage(_Stage, frozen=True, kw_only=True, tag="join"):
    """One list, or one text, of several values."""

    items: str | tuple[str, ...]
    """A reference to a list, or several texts or references."""
    separator: str | None = None
    """The stage is a text: the items with this between them. null makes it a list."""


class FunctionStage(_Stage, frozen=True, kw_only=True, tag="function"):
    """The result of a Python function. A coroutine function runs on the event loop, any other one in a thread."""

    function: str
    """`package.module:name`."""
    arguments: dict[str, str] = {}
    """Arguments by name."""
    returns: str = "any"
    """The type of the result, written as `inputs.<input>.type`."""


class MapStage(_Stage, frozen=True, kw_only=True, tag="map"):
    """The results of stages that run once for every element of a list, in the order of the list."""

    over: str
    """A reference to a list."""
    item: str = "item"
    """The name of an element in templates of the inner stages."""
    stages: "dict[str, Stage]"
    """The inner stages, by name. Their templates may also refer to the outer stages."""
    output: str | None = None
    """The inner stage whose results the list has; null is the last one."""


Stage = EmbedStage | RankStage | GenerateStage | JoinStage | FunctionStage | MapStage
STAGE_KINDS = (EmbedStage, RankStage, GenerateStage, JoinStage, FunctionStage, MapStage)


class Pipeline(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pipeline: a graph of stages, reached as `/v1/pipelines/NAME`."""

    inputs: dict[str, PipelineInput] = {}
    """What a call gives, by name."""
    stages: dict[str, Stage] = {}
    """The stages by name. A stage starts when all stages that its templates name have ended."""
    output: str | None = None
    """The stage whose result is the answer; null is the last one."""
    chat_input: str | None = None
    """The text input that gets the last user message where the pipeline is called as a model in chat completions. null
    allows calls of `/v1/pipelines/NAME` only. Other inputs need defaults, and the output must be a generate stage."""
    deadline_ms: int | None = None
    """Maximum time of a run in milliseconds, divided between the stages; null sets no limit. A call may set an earlier
    one with `x-inferry-deadline-ms`."""
