"""A run that is cancelled ends all its steps within the limit, in virtual time, whatever stage it is in."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from inferry.domain.pooling import encode_vector
from inferry.pipelines.batch_sizes import MapLoad
from inferry.pipelines.composed import Fields
from inferry.pipelines.deadlines import StageDurations
from inferry.pipelines.declaration import Pipeline
from inferry.pipelines.executor import PipelineRun, ServedPipeline
from inferry.pipelines.graph import check_pipeline
from inferry.pipelines.resources import Resources
from inferry.pipelines.stage_calls import EMBEDDINGS
from support.virtual_time import run_virtual

MAX_CANCEL_S = 0.25
STEP_S, ABORT_S = 10.0, 0.2
TEXTS = [f"text {number}" for number in range(600)]
EMBED: dict[str, Any] = {"kind": "embed", "model": "m"}
NOTE: dict[str, Any] = {"kind": "generate", "model": "m", "messages": [{"content": "{{ item }}"}]}
STAGES: dict[str, Any] = {
    "vectors": {**EMBED, "input": "{{ input.texts }}"},
    "query": {**EMBED, "input": "a question"},
    "best": {"kind": "rank", "query": "{{ query }}", "vectors": "{{ vectors }}", "documents": "{{ input.texts }}"},
    "notes": {"kind": "map", "over": "{{ best.text }}", "stages": {"note": NOTE}},
    "answer": {"kind": "generate", "model": "m", "messages": [{"content": "{{ notes.0 }}"}]},
}


class SlowCalls:
    """Every step takes ten seconds; the engine takes 0.2 s to free one that is cancelled. `running` counts steps."""

    def __init__(self) -> None:
        self.running = 0
        self.load = MapLoad()
        self.now = asyncio.get_running_loop().time

    async def step(self, stage: str, path: str, fields: Fields, deadline_ms: int | None) -> bytes:
        with self._counted():
            try:
                await asyncio.sleep(STEP_S)
            except asyncio.CancelledError:
                await asyncio.sleep(ABORT_S)
                raise
        if path != EMBEDDINGS:
            return b'{"choices": [{"message": {"content": "found"}}]}'
        data = [{"embedding": encode_vector([1.0])} for _ in fields["input"]]
        return msgspec.json.encode({"data": data, "usage": {}})

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def respond(self, stage: str, fields: Fields, deadline_ms: int | None) -> None:
        raise AssertionError("the answer is not streamed")

    def queued(self) -> int:
        return 0

    def queued_for(self, model: str) -> int:
        return 0

    def queue_limit(self) -> int:
        return 1000

    def map_load(self) -> MapLoad:
        return self.load

    def workers(self, model: str) -> int:
        return 4


@pytest.mark.parametrize(("at_s", "running"), [(5.0, 4), (15.0, 256), (25.0, 256), (45.0, 1)])
def test_a_cancelled_run_ends_within_250_ms(at_s: float, running: int) -> None:
    """In its embeddings, which four workers share; in the first and the last elements of its map; in its answer."""

    async def act() -> None:
        checked = check_pipeline(
            "p", msgspec.convert({"inputs": {"texts": {"type": "list[text]"}}, "stages": STAGES}, Pipeline)
        )
        calls, loop = SlowCalls(), asyncio.get_running_loop()
        run = PipelineRun(ServedPipeline(checked, Resources(), StageDurations()), calls)
        task = asyncio.create_task(run.run({"texts": TEXTS}))
        await asyncio.sleep(at_s)
        assert calls.running == running
        began = loop.time()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert loop.time() - began <= MAX_CANCEL_S
        assert calls.running == 0
        assert (calls.load.maps, calls.load.jobs) == (0, 0)
        assert len(asyncio.all_tasks()) == 1, "no task is left"

    run_virtual(act())
