"""The `pipelines` section of the configuration."""

from pathlib import Path
from typing import Any

import pytest

from inferry.cli.config.loader import dump, parse
from inferry.cli.config.pipelines import checked_pipelines
from inferry.cli.config.schema import ConfigError
from inferry.pipelines.builder import PipelineBuilder

EMBED = {"kind": "embed", "model": "inferry-triage", "input": "{{ input.text }}"}
TEXT = {"kind": "generate", "messages": [{"content": "Hello?"}]}
PIPELINE: dict[str, Any] = {"inputs": {"text": {}}, "stages": {"vector": EMBED}}

_declare = PipelineBuilder()
_declare.embed("vector", model="inferry-triage", input=_declare.text("text"))
declared = _declare.build()


def test_yaml_and_python_give_the_same_pipeline() -> None:
    config = parse({"pipelines": {"a": PIPELINE, "b": {"python": "cli.test_config_pipelines:declared"}}})
    first, second = checked_pipelines(config.pipelines)
    assert first.graph == second.graph
    assert parse({"pipelines": {"a": PIPELINE}}).pipelines["a"].stages["vector"].__struct_config__.tag == "embed"
    assert "pipelines:" in dump(config)


def test_texts_of_pipelines_may_have_lines() -> None:
    message = {"content": "Context:\n\t{{ input.text }}"}
    stage = {"kind": "generate", "model": "m", "messages": [message]}
    parse({"pipelines": {"a": {"inputs": {"text": {}}, "stages": {"answer": stage}}}})


@pytest.mark.parametrize(
    ("pipelines", "message"),
    [
        ({"a": {**PIPELINE, "output": "x"}}, "pipelines.a.output names no stage: x"),
        ({"a": {"stages": {"s": {**EMBED, "input": "{{ x }}"}}}}, "pipelines.a.stages.s.input: unknown name `x`"),
        ({"a": {}}, "pipelines.a.stages is empty"),
        ({"a": {"stage": {}}}, "unknown key `pipelines.a.stage`; did you mean `stages`?"),
        ({"a": {"stages": {"s": {**EMBED, "modl": "x"}}}}, "unknown key `pipelines.a.stages.s.modl`"),
        ({"a/b": PIPELINE}, "pipelines.a/b: a name has"),
        ({"taken": PIPELINE}, "pipelines.taken: a worker, or another composed model, has this name"),
        ({"a": {"python": "no.such:thing"}}, "pipelines.a.python: no.such:thing cannot be imported"),
        ({"a": {"python": "os:sep"}}, "os:sep is no pipeline"),
        ({"a": {**PIPELINE, "python": "os:sep"}}, "pipelines.a.python replaces all other keys"),
        ({"a": {"stages": {"s": {"kind": "function", "function": "os:sep"}}}}, "os:sep is no function"),
        ({"a": PIPELINE, "b": {"stages": {"s": {**TEXT, "model": "a"}}}}, "pipelines.b: a stage calls the pipeline a"),
        ({"a": {"stages": {"s": {**TEXT, "model": "a"}}}}, "pipelines.a: a stage calls the pipeline a"),
    ],
)
def test_a_mistake_is_named(pipelines: Any, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse({"pipelines": pipelines, "workers": [{"kind": "embedded", "models": ["taken"]}]})
    assert message in str(found.value)


def test_a_cycle_of_pipelines_and_other_composed_models_is_named() -> None:
    routes = {"auto": {"default": "next"}, "next": {"default": "loop"}}
    pipelines = {"loop": {"inputs": {"text": {}}, "chat_input": "text", "stages": {"s": {**TEXT, "model": "auto"}}}}
    with pytest.raises(ConfigError, match="loop: a stage calls auto, which may call the pipeline loop"):
        parse(
            {
                "routes": routes,
                "pipelines": pipelines,
                "workers": [{"kind": "vllm", "name": "a", "url": "http://127.0.0.1:1"}],
            }
        )
    parse(
        {
            "routes": {"auto": {"default": "m"}},
            "pipelines": pipelines,
            "workers": [{"kind": "embedded", "models": ["m"]}],
        }
    )


def test_a_file_of_documents_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    stages = {"s": {"kind": "rank", "query": "{{ input.v }}", "file": str(path)}}
    raw = {"pipelines": {"a": {"inputs": {"v": {"type": "vector"}}, "stages": stages}}}
    with pytest.raises(ConfigError, match="cannot read"):
        parse(raw)
    path.write_text('{"text": "a", "vector": [1, 2]}\n{"text": "b"}\n')
    with pytest.raises(ConfigError, match=":2 must have the form"):
        parse(raw)
    path.write_text('{"text": "a", "vector": [1, 2]}\n{"text": "b", "vector": [1]}\n')
    with pytest.raises(ConfigError, match="differ in length"):
        parse(raw)
    path.write_text('{"text": "a", "vector": [1, 2]}\n\n')
    parse(raw)
