"""Pooled jobs of the embedded worker, with the engine process played by the test."""

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import pytest

from inferry.domain.errors import ClientClosed, ContextLengthExceeded, WorkerLost
from inferry.domain.jobs import InferenceJob, PooledInputs
from inferry.domain.pooling import decode_answer, decode_vector
from inferry.domain.streams import Done, Failed, Usage
from inferry.domain.values import replace
from inferry.engine.messages import Abort, Aborted, Account, End, Rejected, StepDone
from support.loop_helpers import run, run_pending
from support.pooling import an_embedding
from workers.test_engine_worker import STATS, scene_of

__all__ = ["scene_of"]


def a_job(job_id: str, *ids: tuple[int, ...], pairs: tuple[tuple[int, int], ...] | None = None) -> InferenceJob:
    job = an_embedding(job_id, *(list(one) for one in ids))
    api = "embeddings" if pairs is None else "score"
    count = len(ids) if pairs is None else len(pairs)
    return replace(job, payload=replace(job.payload, api=api, pooled=PooledInputs(count, ids, pairs)))


def vector(*values: float) -> bytes:
    return struct.pack(f"{len(values)}f", *values)


def results(*found: tuple[int, bytes]) -> StepDone:
    ends = [End(Account(key, 3, 0, 0.5), True) for key, _ in found]
    return StepDone([], ends, STATS, list(found))


def test_a_job_ends_with_the_last_of_its_inputs(scene_of: Callable[[], Any]) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            task = await scene.runs(a_job("j", (1, 2, 3), (4, 5, 6)))
            first, second = scene.link.sent[-1].requests
            assert (first.prompt_ids, second.prompt_ids, first.pooled) == ([1, 2, 3], [4, 5, 6], True)
            scene.says(results((second.key, vector(0, 1))))
            assert not scene.items
            scene.says(results((first.key, vector(1, 0))))
            await task
            delta, end = scene.items
            answer = decode_answer(delta.raw)
            assert [decode_vector(str(one)) for one in answer.data] == [[1, 0], [0, 1]]
            assert (answer.usage.prompt_tokens, delta.tokens) == (6, 0)
            assert isinstance(end, Done)
            assert end.usage == Usage(6, 0, 0, 1.0)

    run(scenario())


def test_a_score_is_the_cosine_of_two_inputs(scene_of: Callable[[], Any]) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            task = await scene.runs(a_job("j", (1,), (2,), (3,), pairs=((0, 1), (0, 2))))
            keys = [request.key for request in scene.link.sent[-1].requests]
            values = [vector(1, 0), vector(0.6, 0.8), vector(0, 1)]
            scene.says(results(*zip(keys, values, strict=True)))
            await task
            assert decode_answer(scene.items[0].raw).data == [pytest.approx(0.6), 0]

    run(scenario())


def test_a_rejected_input_fails_its_job_by_its_index_and_frees_the_others(scene_of: Callable[[], Any]) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            task = await scene.runs(a_job("j", (1,), (2,)))
            first, second = scene.link.sent[-1].requests
            scene.says(Rejected(second.key, True, "too long"))
            assert scene.link.sent[-1] == Abort(1, [first.key])
            assert not scene.items
            scene.says(Aborted(1, [Account(first.key, 1, 0, 0.1)], STATS))
            await task
            assert isinstance(scene.end, Failed)
            assert isinstance(scene.end.error, ContextLengthExceeded)
            assert "input 1" in scene.end.error.message

    run(scenario())


def test_a_cancelled_job_is_confirmed_once_all_its_inputs_are_freed(scene_of: Callable[[], Any]) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            task = await scene.runs(a_job("j", (1,), (2,)))
            keys = [request.key for request in scene.link.sent[-1].requests]
            cancel = asyncio.create_task(scene.worker.cancel(["j"]))
            await run_pending()
            assert scene.link.sent[-1] == Abort(1, keys)
            scene.says(Aborted(1, [Account(key, 1, 0, 0.1) for key in keys], STATS))
            assert await cancel == {"j"}
            await task
            assert isinstance(scene.end, Failed)
            assert isinstance(scene.end.error, ClientClosed)
            assert await scene.worker.cancel(["j"]) == frozenset()

    run(scenario())


def test_a_lost_engine_loses_its_pooled_jobs(scene_of: Callable[[], Any]) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            task = await scene.runs(a_job("j", (1,)))
            await scene.is_lost()
            await task
            assert isinstance(scene.end, Failed)
            assert isinstance(scene.end.error, WorkerLost)

    run(scenario())


def test_a_plan_that_is_not_awaited_any_more_is_aborted(scene_of: Callable[[], Any]) -> None:
    async def scenario() -> None:
        async with scene_of() as scene:
            task = await scene.runs(a_job("j", (1,)))
            (request,) = scene.link.sent[-1].requests
            task.cancel()
            await run_pending()
            assert scene.link.sent[-1] == Abort(1, [request.key])
            scene.says(results((request.key, vector(1))))
            assert not scene.items

    run(scenario())
