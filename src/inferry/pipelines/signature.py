"""What each kind of stage takes and returns."""

import re
from collections.abc import Iterator, Mapping

from inferry.pipelines.declaration import (
    EmbedStage,
    FunctionStage,
    GenerateStage,
    JoinStage,
    MapStage,
    RankStage,
    Stage,
)
from inferry.pipelines.value_types import ANY, NUMBER, RANKED, TEXT, VECTOR, ValueType, parse_type, record

NAME = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_ROLES = frozenset({"system", "developer", "user", "assistant"})
_RESERVED = {
    "embed": frozenset({"model", "input", "encoding_format", "stream"}),
    "rank": frozenset({"model", "query", "documents", "top_n", "return_documents"}),
    "generate": frozenset({"model", "messages", "max_tokens", "temperature", "stream", "stream_options", "n"}),
}
"""Fields of the requests that the stage sets itself."""


def template_texts(stage: Stage) -> dict[str, str]:
    """The stage's texts that may be templates, by their path in the stage."""
    found: dict[str, str | None] = {}
    if isinstance(stage, EmbedStage):
        found = {"input": stage.input}
    elif isinstance(stage, RankStage):
        found = {"query": stage.query, "documents": stage.documents, "vectors": stage.vectors}
    elif isinstance(stage, GenerateStage):
        found = {f"messages[{index}].content": one.content for index, one in enumerate(stage.messages)}
    elif isinstance(stage, JoinStage):
        items = stage.items
        found = {"items": items} if isinstance(items, str) else {f"items[{i}]": one for i, one in enumerate(items)}
    elif isinstance(stage, FunctionStage):
        found = {f"arguments.{name}": text for name, text in stage.arguments.items()}
    else:
        found = {"over": stage.over}
    return {field: text for field, text in found.items() if text is not None}


def check_stage(stage: Stage, types: Mapping[str, ValueType]) -> Iterator[str]:
    """Problems of a stage whose templates have these types. Each begins with the path below the stage."""
    if isinstance(stage, EmbedStage):
        if not (TEXT.accepts(types["input"]) or TEXT.listed().accepts(types["input"])):
            yield f".input must be a text or a list of texts, and is {types['input']}"
    elif isinstance(stage, RankStage):
        yield from _check_rank(stage, types)
    elif isinstance(stage, GenerateStage):
        yield from _check_generate(stage, types)
    elif isinstance(stage, JoinStage):
        yield from _check_join(stage, types)
    elif isinstance(stage, FunctionStage):
        if _FUNCTION.fullmatch(stage.function) is None:
            yield ".function must have the form package.module:name"
        if parse_type(stage.returns) is None:
            yield ".returns must be text, number, vector, any, or list[…] of one of them"
    elif types["over"].element() is None:
        yield f".over must be a list, and is {types['over']}"
    elif NAME.fullmatch(stage.item) is None:
        yield ".item: a name has letters, digits and underscores, and begins with no digit"
    if isinstance(stage, EmbedStage | RankStage | GenerateStage):
        for name in stage.options:
            if name in _RESERVED[str(stage.__struct_config__.tag)]:
                yield f".options.{name} is set by the stage itself"


def _check_rank(stage: RankStage, types: Mapping[str, ValueType]) -> Iterator[str]:
    sources = [name for name in ("vectors", "file") if getattr(stage, name) is not None]
    if stage.model is not None:
        if stage.documents is None or sources:
            yield ": a rank with a model has documents, and neither vectors nor a file"
    elif len(sources) != 1:
        yield ": a rank without a model has either vectors or a file"
    elif stage.file is not None and stage.documents is not None:
        yield ": the file has the documents; remove documents"
    expected = {"query": TEXT if stage.model else VECTOR, "documents": TEXT.listed(), "vectors": VECTOR.listed()}
    for field, type in types.items():
        if not expected[field].accepts(type):
            yield f".{field} must be {expected[field]}, and is {type}"
    if stage.top is not None and stage.top < 1:
        yield ".top must be at least 1"


def _check_generate(stage: GenerateStage, types: Mapping[str, ValueType]) -> Iterator[str]:
    if not stage.messages:
        yield ".messages is empty"
    for index, message in enumerate(stage.messages):
        if message.role not in _ROLES:
            yield f".messages[{index}].role must be {', '.join(sorted(_ROLES))}"
    for field, type in types.items():
        if not TEXT.accepts(type):
            yield f".{field} must be text, and is {type}"


def _check_join(stage: JoinStage, types: Mapping[str, ValueType]) -> Iterator[str]:
    if isinstance(stage.items, str) and types["items"].element() is None:
        yield f".items must be a list, and is {types['items']}"
    if not stage.items:
        yield ".items is empty"
    if stage.separator is not None:
        for field, type in types.items():
            one = type.element() if field == "items" else type
            if one is not None and not (TEXT.accepts(one) or NUMBER.accepts(one)):
                yield f".{field}: {one} cannot be part of a text"


def result_type(stage: Stage, types: Mapping[str, ValueType]) -> ValueType:
    """The type of the stage's value; that of a map follows from its body."""
    if isinstance(stage, EmbedStage):
        found = types["input"]
        return ANY if found.base == "any" else VECTOR.listed() if found.depth else VECTOR
    if isinstance(stage, RankStage):
        has_texts = stage.documents is not None or stage.file is not None
        return RANKED.listed() if has_texts else record({"index": NUMBER, "score": NUMBER}).listed()
    if isinstance(stage, JoinStage):
        if stage.separator is not None:
            return TEXT
        if isinstance(stage.items, str):
            return types["items"]
        kinds = {(type.base, type.depth) for type in types.values()}
        return (next(iter(types.values())) if len(kinds) == 1 else ANY).listed()
    if isinstance(stage, FunctionStage):
        return parse_type(stage.returns) or ANY
    assert not isinstance(stage, MapStage), "the graph knows the type of a map"
    return TEXT
