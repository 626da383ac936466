"""A pipeline that was checked: its stages in the order of their dependencies, with parsed templates and types."""

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from msgspec import UNSET, Struct

from inferry.domain.errors import InvalidRequest
from inferry.pipelines.declaration import EmbedStage, GenerateStage, MapStage, Pipeline, RankStage, Stage
from inferry.pipelines.signature import NAME, check_stage, result_type, template_texts
from inferry.pipelines.template import Template, TemplateError, parse_template
from inferry.pipelines.value_types import ANY, TEXT, ValueType, parse_type, read_value, record

INPUT = "input"
"""The name of the inputs in templates."""


class PipelineError(ValueError):
    """The declaration is invalid; the message has every problem."""


class Node(Struct, frozen=True, kw_only=True):
    """One stage. `needs` are the stages of the same graph that it waits for; `body` the graph of a map."""

    name: str
    stage: Stage
    templates: Mapping[str, Template]
    needs: tuple[str, ...]
    type: ValueType
    body: "Graph | None" = None


class Graph(Struct, frozen=True):
    """Stages, each behind those it needs."""

    nodes: tuple[Node, ...]
    output: str

    @property
    def type(self) -> ValueType:
        return next(node.type for node in self.nodes if node.name == self.output)

    @property
    def width(self) -> int:
        """Jobs that one run of the graph may have at the same time, at most. A map within it counts its own."""
        return max(1, sum(isinstance(node.stage, EmbedStage | GenerateStage | RankStage) for node in self.nodes))


class CheckedPipeline(Struct, frozen=True, kw_only=True):
    """A pipeline that can run. `inputs` are the types of its inputs."""

    name: str
    declared: Pipeline
    inputs: Mapping[str, ValueType]
    graph: Graph


def answers_chat(graph: Graph) -> bool:
    """Whether the last stage generates, so that its response can be the client's, streamed or whole."""
    generates = any(node.name == graph.output and isinstance(node.stage, GenerateStage) for node in graph.nodes)
    return generates and not any(graph.output in node.needs for node in graph.nodes)


def models_of(graph: Graph) -> Iterator[str]:
    """The models that the stages call, in order."""
    for node in graph.nodes:
        if isinstance(node.stage, EmbedStage | GenerateStage | RankStage) and node.stage.model is not None:
            yield node.stage.model
        if node.body is not None:
            yield from models_of(node.body)


def check_pipeline(name: str, declared: Pipeline) -> CheckedPipeline:
    """Raises PipelineError."""
    problems: list[str] = []
    inputs = _input_types(declared, problems)
    graph = _check_graph(declared.stages, declared.output, {INPUT: record(inputs)}, "stages", problems)
    problems += _check_chat(declared, inputs, graph)
    if declared.deadline_ms is not None and declared.deadline_ms < 1:
        problems.append("deadline_ms must be at least 1")
    if problems or graph is None:
        raise PipelineError("; ".join(f"pipelines.{name}.{problem}" for problem in problems))
    return CheckedPipeline(name=name, declared=declared, inputs=inputs, graph=graph)


def _input_types(declared: Pipeline, problems: list[str]) -> dict[str, ValueType]:
    types = {}
    for name, given in declared.inputs.items():
        where = f"inputs.{name}"
        found = parse_type(given.type)
        if NAME.fullmatch(name) is None:
            problems.append(f"{where}: a name has letters, digits and underscores, and begins with no digit")
        if found is None:
            problems.append(f"{where}.type must be text, number, vector, any, or list[…] of one of them")
        elif given.default is not UNSET:
            try:
                read_value(given.default, found, f"{where}.default")
            except InvalidRequest as error:
                problems.append(error.message.replace("`", ""))
        types[name] = found or ANY
    return types


def _check_chat(declared: Pipeline, inputs: Mapping[str, ValueType], graph: Graph | None) -> Iterator[str]:
    name = declared.chat_input
    if name is None:
        return
    if inputs.get(name) != TEXT:
        yield "chat_input must name an input of type text"
    for other, given in declared.inputs.items():
        if other != name and given.default is UNSET:
            yield f"inputs.{other} needs a default, because chat completions give chat_input only"
    if graph is not None and not answers_chat(graph):
        yield "output must be a generate stage that no other stage needs, because of chat_input"


def _check_graph(
    stages: Mapping[str, Stage], output: str | None, scope: Mapping[str, ValueType], where: str, problems: list[str]
) -> Graph | None:
    """The graph of the stages; None where problems were found. `scope` are the names outside of it."""
    if not stages:
        problems.append(f"{where} is empty")
        return None
    count = len(problems)
    names = {name: _templates(stage, f"{where}.{name}", problems) for name, stage in stages.items()}
    for name in stages:
        if NAME.fullmatch(name) is None:
            problems.append(f"{where}.{name}: a name has letters, digits and underscores, and begins with no digit")
        elif name in scope:
            problems.append(f"{where}.{name}: the name is taken")
    chosen = output or list(stages)[-1]
    if chosen not in stages:
        problems.append(f"{where.removesuffix('stages')}output names no stage: {chosen}")
    if len(problems) > count:
        return None
    needs = {name: _needs(stages[name], templates, set(stages)) for name, templates in names.items()}
    try:
        order = list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        problems.append(f"{where} has a cycle: {' → '.join(reversed(error.args[1]))}")
        return None
    types, nodes = dict(scope), []
    for name in order:
        node = _node(name, stages[name], names[name], needs[name], types, f"{where}.{name}", problems)
        types[name] = ANY if node is None else node.type
        nodes += [] if node is None else [node]
    return Graph(tuple(nodes), chosen) if len(problems) == count else None


def _templates(stage: Stage, where: str, problems: list[str]) -> dict[str, Template]:
    found = {}
    for field, text in template_texts(stage).items():
        try:
            found[field] = parse_template(text)
        except TemplateError as error:
            problems.append(f"{where}.{field}: {error}")
    return found


def _needs(stage: Stage, templates: Mapping[str, Template], names: set[str]) -> tuple[str, ...]:
    """The stages, of those named, that the stage waits for, in the order of their use."""
    used = {reference.name: None for template in templates.values() for reference in template.references}
    if isinstance(stage, MapStage):
        for inner in stage.stages.values():
            try:
                found = {field: parse_template(text) for field, text in template_texts(inner).items()}
            except TemplateError:
                continue  # reported with the inner stage
            hidden = {stage.item, *stage.stages}
            used |= dict.fromkeys(_needs(inner, found, names - hidden))
    return tuple(name for name in used if name in names)


def _node(
    name: str,
    stage: Stage,
    templates: Mapping[str, Template],
    needs: tuple[str, ...],
    types: Mapping[str, ValueType],
    where: str,
    problems: list[str],
) -> Node | None:
    count = len(problems)
    found: dict[str, ValueType] = {}
    for field, template in templates.items():
        for reference in template.references:
            known = types.get(reference.name)
            type = None if known is None else known.at(reference.path)
            if type is None:
                problems.append(f"{where}.{field}: unknown name `{reference}`")
            elif template.only is None and not (TEXT.accepts(type) or (type.base == "number" and not type.depth)):
                problems.append(f"{where}.{field}: `{reference}` is {type} and cannot be part of a text")
            found[field] = TEXT if template.only is None else type or ANY
        found.setdefault(field, TEXT)
    if len(problems) > count:
        return None
    problems += [f"{where}{problem}" for problem in check_stage(stage, found)]
    body = None
    if isinstance(stage, MapStage) and len(problems) == count:
        element = found["over"].element() or ANY
        body = _check_graph(stage.stages, stage.output, {**types, stage.item: element}, f"{where}.stages", problems)
    if len(problems) > count:
        return None
    type = result_type(stage, found) if body is None else body.type.listed()
    return Node(name=name, stage=stage, templates=templates, needs=needs, type=type, body=body)
