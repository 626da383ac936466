"""Runs pipelines: one task per stage, each waiting for the stages that it needs.

A run belongs to the task that awaits it. The first failure, or the end of that task, cancels every other stage, and the
run ends when all of them have ended.
"""

import asyncio
import inspect
import logging
from array import array
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import msgspec
from msgspec import Struct

from inferry.domain.errors import DeadlineExceeded, FunctionFailed, GatewayError, InvalidRequest
from inferry.pipelines import stage_calls
from inferry.pipelines.batch_sizes import batch_sizes, may_start
from inferry.pipelines.composed import CHAT, Fields
from inferry.pipelines.deadlines import StageDurations, stage_deadline, times_after
from inferry.pipelines.declaration import EmbedStage, FunctionStage, GenerateStage, JoinStage, MapStage, RankStage
from inferry.pipelines.failures import at_stage, first_error
from inferry.pipelines.graph import INPUT, CheckedPipeline, Graph, Node
from inferry.pipelines.joint_embeds import JointEmbeds
from inferry.pipelines.ports import Calls
from inferry.pipelines.resources import Resources
from inferry.pipelines.similarity import VectorIndex
from inferry.pipelines.stage_calls import Usage
from inferry.pipelines.template import render
from inferry.pipelines.threads import in_thread
from inferry.pipelines.value_types import TEXT, VECTOR, ValueType, parse_type, read_value

log = logging.getLogger(__name__)

Scope = Mapping[str, Any]


class ServedPipeline(Struct, frozen=True):
    """A pipeline with what its stages use, and what was learned of them."""

    checked: CheckedPipeline
    resources: Resources
    durations: StageDurations


class PipelineRun:
    """One run. `results` are the values of the stages by name, `usage` the tokens of all calls so far.

    `answer_fields`: where they are given, the client is answered with the response of the last stage. They are further
    fields of its request.
    """

    def __init__(
        self,
        pipeline: ServedPipeline,
        calls: Calls,
        deadline: float | None = None,
        answer_fields: Fields | None = None,
    ) -> None:
        self._graph = pipeline.checked.graph
        self._resources = pipeline.resources
        self._durations = pipeline.durations
        self._calls = calls
        self._deadline = deadline
        self._answer_fields = answer_fields
        self._joint_embeds = JointEmbeds()
        self.results: dict[str, Any] = {}
        self.usage = Usage()

    async def run(self, inputs: Scope) -> Any:
        """The value of the output stage. Raises the GatewayError of the first stage that failed."""
        return await self._run_graph(self._graph, {INPUT: inputs}, self._deadline, "", "")

    async def _run_graph(self, graph: Graph, scope: Scope, deadline: float | None, prefix: str, suffix: str) -> Any:
        """`prefix` is that of names of stages, `suffix` the element of each map, as `-3`."""
        values = dict(scope)
        parts = None if deadline is None else _Parts(graph, self._durations, prefix, deadline)
        tasks: dict[str, asyncio.Task[None]] = {}

        async def stage(node: Node) -> None:
            # The answer begins when nothing else can fail any more: a failure after its first byte would be in-band.
            answers = graph is self._graph and node.name == graph.output and self._answer_fields is not None
            for name in [other for other in tasks if other != node.name] if answers else node.needs:
                await tasks[name]
            started = self._calls.now()
            part = None if parts is None else parts.deadline_of(node.name, started)
            step = _Step(prefix + node.name, suffix, part, answers)
            values[node.name] = await self._run_stage(node, values, step)
            if not answers:
                self._durations.observe(step.path, self._calls.now() - started)

        try:
            async with asyncio.TaskGroup() as group:
                for node in graph.nodes:
                    tasks[node.name] = group.create_task(stage(node))
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        if graph is self._graph:
            self.results = {node.name: values[node.name] for node in graph.nodes}
        return values[graph.output]

    async def _run_stage(self, node: Node, scope: Scope, step: "_Step") -> Any:
        stage = node.stage
        try:
            if isinstance(stage, MapStage):
                return await self._map(node, scope, step)
            found = {field: render(template, scope) for field, template in node.templates.items()}
            if isinstance(stage, EmbedStage):
                return await self._embed(stage, found["input"], step)
            if isinstance(stage, RankStage):
                return await self._rank(stage, found, step)
            if isinstance(stage, GenerateStage):
                return await self._generate(stage, found, step)
            if isinstance(stage, FunctionStage):
                return await self._call_function(stage, found, step)
            return _join(stage, found)
        except GatewayError as error:
            raise at_stage(error, step.name) from None

    # -- kinds of stages ---------------------------------------------------------------------------------------------

    async def _embed(self, stage: EmbedStage, found: Any, step: "_Step") -> Any:
        if isinstance(found, str):
            return (await self._embed_all(stage, [found], step))[0]
        return await self._embed_all(stage, read_value(found, TEXT.listed(), "input"), step)

    async def _embed_all(self, stage: EmbedStage, texts: list[str], step: "_Step") -> "list[array[float]]":
        """The vectors of all texts. Stages of the run that start together make one call, with the first one's name."""
        if not texts:
            return []

        async def embed(texts: list[str], deadline: float | None) -> "list[array[float]]":
            return await self._embed_parts(stage, texts, _Step(step.path, step.suffix, deadline, False))

        key = msgspec.json.encode([stage.model, stage.options])
        return await self._joint_embeds.embed(key, texts, step.deadline, embed)

    async def _embed_parts(self, stage: EmbedStage, texts: list[str], step: "_Step") -> "list[array[float]]":
        """The vectors of all texts, of as many calls as the queue suggests."""
        sizes = batch_sizes(len(texts), self._calls.queued_for(stage.model), self._calls.workers(stage.model))
        ends = list(accumulate(sizes))
        parts = [texts[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        if len(parts) == 1:
            return await self._embed_part(stage, texts, step)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._embed_part(stage, part, step.part(index)))
                    for index, part in enumerate(parts)
                ]
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        return [vector for task in tasks for vector in task.result()]

    async def _embed_part(self, stage: EmbedStage, texts: list[str], step: "_Step") -> "list[array[float]]":
        body = await self._call(stage_calls.EMBEDDINGS, stage_calls.embed_fields(stage, texts), step)
        vectors, usage = stage_calls.read_vectors(body)
        self.usage.add(usage)
        return vectors

    async def _rank(self, stage: RankStage, found: Mapping[str, Any], step: "_Step") -> list[dict[str, Any]]:
        texts = found.get("documents")
        if texts is not None:
            texts = read_value(texts, TEXT.listed(), "documents")
        if stage.model is not None:
            if not texts:
                return []
            query = read_value(found["query"], TEXT, "query")
            body = await self._call(stage_calls.RERANK, stage_calls.rank_fields(stage, query, texts), step)
            ranking, usage = stage_calls.read_ranking(body)
            self.usage.add(usage)
        else:
            query = read_value(found["query"], VECTOR, "query")
            if stage.file is not None:
                stored = self._resources.documents[stage.file]
                texts, index = stored.texts, stored.index
            else:
                index = VectorIndex(read_value(found["vectors"], VECTOR.listed(), "vectors"))
            if texts is not None and len(texts) != len(index):
                raise InvalidRequest(f"there are {len(texts)} documents and {len(index)} vectors")
            ranking = index.rank(query, stage.top)
        return [
            {"index": index, "score": score} | ({} if texts is None else {"text": texts[index]})
            for index, score in ranking
        ]

    async def _generate(self, stage: GenerateStage, found: Mapping[str, Any], step: "_Step") -> str:
        contents = [read_value(text, TEXT, field) for field, text in found.items()]
        fields = stage_calls.generate_fields(stage, contents)
        if step.answers and self._answer_fields is not None:
            await self._calls.respond(step.name, {**self._answer_fields, **fields}, self._deadline_ms(step))
            return ""
        text, usage = stage_calls.read_text(await self._call(CHAT, fields, step))
        self.usage.add(usage)
        return text

    async def _call_function(self, stage: FunctionStage, found: Mapping[str, Any], step: "_Step") -> Any:
        function = self._resources.functions[stage.function]
        arguments = {field.removeprefix("arguments."): value for field, value in found.items()}
        seconds = None if step.deadline is None else max(0.0, step.deadline - self._calls.now())
        try:
            async with asyncio.timeout(seconds):
                if inspect.iscoroutinefunction(function):
                    result = await function(**arguments)
                else:
                    result = await in_thread(function, **arguments)
                    if inspect.isawaitable(result):
                        result = await result
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the function ran") from None
        except GatewayError:
            raise
        except Exception as error:
            # Only its type: a message may quote what the function was called with.
            log.warning("the function %s raised %s", stage.function, type(error).__name__)
            raise FunctionFailed(f"the function raised {type(error).__name__}") from None
        expected = parse_type(stage.returns)
        assert expected is not None, "the graph was checked"
        return _returned(result, expected)

    async def _map(self, node: Node, scope: Scope, step: "_Step") -> list[Any]:
        stage, body = node.stage, node.body
        assert isinstance(stage, MapStage), "a map has this kind"
        assert body is not None, "a map has a body"
        items = render(node.templates["over"], scope)
        if not isinstance(items, list):
            raise InvalidRequest("`over` must be a list")
        (first, *others) = body.nodes
        if not others and isinstance(first.stage, EmbedStage):
            # All texts of the map in one stage: the scheduler has one job instead of one for each.
            texts = [render(first.templates["input"], {**scope, stage.item: item}) for item in items]
            if all(isinstance(text, str) for text in texts):
                return await self._embed_all(first.stage, texts, step)
        tasks: list[asyncio.Task[Any]] = []
        running: set[asyncio.Task[Any]] = set()
        calls, load, width = self._calls, self._calls.map_load(), body.width

        def ended(task: asyncio.Task[Any]) -> None:
            load.jobs -= width

        load.maps += 1
        try:
            async with asyncio.TaskGroup() as group:
                for index, item in enumerate(items):
                    while not may_start(len(running), width, load, calls.queued(), calls.queue_limit()):
                        _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    inner = {**scope, stage.item: item}
                    suffix = f"{step.suffix}-{index}"
                    one = self._run_graph(body, inner, step.deadline, f"{step.path}.", suffix)
                    tasks.append(group.create_task(one))
                    running.add(tasks[-1])
                    load.jobs += width
                    tasks[-1].add_done_callback(ended)
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        finally:
            load.maps -= 1
        return [task.result() for task in tasks]

    async def _call(self, path: str, fields: Fields, step: "_Step") -> bytes:
        return await self._calls.step(step.name, path, fields, self._deadline_ms(step))

    def _deadline_ms(self, step: "_Step") -> int | None:
        if step.deadline is None:
            return None
        left = int(1000 * (step.deadline - self._calls.now()))
        if left < 1:
            raise DeadlineExceeded("the deadline passed before the stage started")
        return left


class _Step(Struct, frozen=True):
    """One stage of a run: where it is in the pipeline, which elements of maps it is for, and until when it runs."""

    path: str
    suffix: str
    deadline: float | None
    answers: bool

    @property
    def name(self) -> str:
        return self.path + self.suffix

    def part(self, index: int) -> "_Step":
        return _Step(self.path, f"{self.suffix}.part{index}", self.deadline, False)


class _Parts:
    """The deadline of a graph, divided between its stages by the durations known when it starts."""

    def __init__(self, graph: Graph, known: StageDurations, prefix: str, deadline: float) -> None:
        needs = {node.name: node.needs for node in graph.nodes}
        predicted = known.predict([prefix + name for name in needs])
        self._durations = {name: predicted[prefix + name] for name in needs}
        self._after = times_after(needs, self._durations)
        self._deadline = deadline

    def deadline_of(self, stage: str, now: float) -> float:
        return stage_deadline(now, self._deadline, self._durations[stage], self._after[stage])


def _join(stage: JoinStage, found: Mapping[str, Any]) -> Any:
    items = found["items"] if isinstance(stage.items, str) else list(found.values())
    if not isinstance(items, list):
        raise InvalidRequest("`items` must be a list")
    if stage.separator is None:
        return items
    if not all(isinstance(item, str | int | float) for item in items):
        raise InvalidRequest("an item is neither text nor a number, and cannot be part of a text")
    return stage.separator.join(map(str, items))


def _returned(result: Any, expected: ValueType) -> Any:
    try:
        return read_value(result, expected, "the result")
    except InvalidRequest as error:
        raise FunctionFailed(error.message.replace("`", "")) from None
