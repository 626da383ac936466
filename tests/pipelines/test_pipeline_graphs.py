"""Declared pipelines: what is accepted, what is refused, and the same graph from YAML and from Python."""

from typing import Any

import msgspec
import pytest

from inferry.domain.errors import InvalidRequest
from inferry.pipelines.builder import PipelineBuilder
from inferry.pipelines.declaration import Message, Pipeline
from inferry.pipelines.graph import PipelineError, check_pipeline
from inferry.pipelines.template import TemplateError, parse_template, render

EMBED = {"kind": "embed", "model": "e"}
GENERATE = {"kind": "generate", "model": "g"}
RETRIEVAL: dict[str, Any] = {
    "inputs": {"question": {}, "documents": {"type": "list[text]", "default": []}},
    "chat_input": "question",
    "stages": {
        "query": {**EMBED, "input": "{{ input.question }}"},
        "vectors": {**EMBED, "input": "{{ input.documents }}"},
        "best": {
            "kind": "rank",
            "query": "{{ query }}",
            "vectors": "{{ vectors }}",
            "documents": "{{ input.documents }}",
            "top": 3,
        },
        "notes": {
            "kind": "map",
            "over": "{{ best.text }}",
            "item": "document",
            "stages": {"note": {**GENERATE, "messages": [{"content": "{{ document }} {{ input.question }}"}]}},
        },
        "context": {"kind": "join", "items": "{{ notes }}", "separator": "\n"},
        "answer": {**GENERATE, "messages": [{"content": "{{ context }}: {{ input.question }}"}], "max_tokens": 9},
    },
}


def declared(**changes: Any) -> Pipeline:
    stages = {**RETRIEVAL["stages"], **changes.pop("stages", {})}
    return msgspec.convert({**RETRIEVAL, "stages": stages, **changes}, Pipeline)


def problem(**changes: Any) -> str:
    with pytest.raises(PipelineError) as found:
        check_pipeline("p", declared(**changes))
    return str(found.value)


def test_stages_follow_what_they_need() -> None:
    graph = check_pipeline("p", declared()).graph
    assert {node.name: node.needs for node in graph.nodes} == {
        "query": (),
        "vectors": (),
        "best": ("query", "vectors"),
        "notes": ("best",),
        "context": ("notes",),
        "answer": ("context",),
    }
    assert [str(node.type) for node in graph.nodes] == [
        *("vector", "list[vector]", "list[record]", "list[text]", "text", "text")
    ]


def test_a_builder_declares_what_yaml_declares() -> None:
    declare = PipelineBuilder()
    question, documents = declare.text("question"), declare.texts("documents", default=[])
    query = declare.embed("query", model="e", input=question)
    vectors = declare.embed("vectors", model="e", input=documents)
    best = declare.rank("best", query=query, vectors=vectors, documents=documents, top=3)
    with declare.map("notes", best.text, item="document") as each:
        each.generate("note", model="g", messages=[Message(content=f"{each.item} {question}")])
    context = declare.join("context", each.results, separator="\n")
    declare.generate("answer", model="g", messages=[Message(content=f"{context}: {question}")], max_tokens=9)
    assert declare.build(chat_input=question) == declared()
    with pytest.raises(ValueError, match="already"):
        declare.embed("query", model="e", input=question)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"query": {**EMBED, "input": "{{ input.quest }}"}}, "stages.query.input: unknown name `input.quest`"),
        ({"query": {**EMBED, "input": "{{ other }}"}}, "stages.query.input: unknown name `other`"),
        ({"query": {**EMBED, "input": "{{ answer }}"}}, "stages has a cycle: "),
        ({"query": {**EMBED, "input": "{{ input.question"}}, "a reference must have the form"),
        ({"query": {**EMBED, "input": "{{ vectors }}"}}, "query.input must be a text or a list of texts"),
        ({"context": {"kind": "join", "items": "{{ answer.x }}"}}, "cycle"),
        ({"context": {"kind": "join", "items": "{{ input.question }}"}}, "context.items must be a list"),
        ({"answer": {**GENERATE, "messages": [{"content": "{{ notes }}"}]}}, "must be text, and is list[text]"),
        ({"answer": {**GENERATE, "messages": [{"content": "a {{ notes }}"}]}}, "cannot be part of a text"),
        ({"answer": {**GENERATE, "messages": []}}, "messages is empty"),
        ({"answer": {**GENERATE, "messages": [{"content": "x"}], "options": {"stream": True}}}, "set by the stage"),
        ({"best": {"kind": "rank", "query": "{{ query }}"}}, "either vectors or a file"),
        ({"best": {"kind": "rank", "model": "r", "query": "{{ query }}"}}, "has documents"),
        ({"input": {**EMBED, "input": "x"}}, "the name is taken"),
        ({"a b": {**EMBED, "input": "x"}}, "letters, digits and underscores"),
        ({"notes": {"kind": "map", "over": "{{ context }}", "stages": {"a": {**EMBED, "input": "x"}}}}, "cycle"),
        ({"notes": {"kind": "map", "over": "{{ best.text }}", "stages": {}}}, "notes.stages is empty"),
        ({"work": {"kind": "function", "function": "no-colon"}}, "package.module:name"),
    ],
)
def test_a_mistake_in_a_stage_is_named(stages: Any, message: str) -> None:
    assert message in problem(stages=stages)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": "none"}, "output names no stage: none"),
        ({"output": "notes"}, "output must be a generate stage"),
        ({"chat_input": "documents"}, "chat_input must name an input of type text"),
        ({"inputs": {"question": {}, "documents": {"type": "list[text]"}}}, "inputs.documents needs a default"),
        ({"inputs": {"question": {"type": "string"}, "documents": {"default": []}}}, "inputs.question.type must be"),
        ({"inputs": {"question": {"default": 3}, "documents": {"type": "list[text]", "default": []}}}, "must be text"),
        ({"deadline_ms": 0}, "deadline_ms must be at least 1"),
    ],
)
def test_a_mistake_in_a_pipeline_is_named(changes: Any, message: str) -> None:
    assert message in problem(**changes)


def test_a_template_substitutes_and_executes_nothing() -> None:
    scope = {"a": {"b": "{{ a.c }}", "c": 3, "list": [{"x": "1"}, {"x": "2"}]}}
    assert render(parse_template("<{{ a.b }}> {{a.c}}"), scope) == "<{{ a.c }}> 3"
    assert render(parse_template("{{ a.list.x }}"), scope) == ["1", "2"]
    assert render(parse_template("{{ a.list.1.x }}"), scope) == "2"
    for text in ("{{ a.__class__ }}", "{{ a.list.7 }}", "x {{ a.list }}"):
        with pytest.raises(InvalidRequest):
            render(parse_template(text), scope)
    for text in ("{{ a()", "{{ a + 1 }}", "}}", "{{ a[0] }}", "{{}}"):
        with pytest.raises(TemplateError):
            parse_template(text)
