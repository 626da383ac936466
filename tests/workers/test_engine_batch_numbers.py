"""Workers of engines that pad: what their views say. What requests say of batch keys and lanes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.values import replace
from inferry.domain.workers import EngineMode, StepWork
from inferry.engine.config import EngineConfig
from inferry.engine.messages import Add, Request, Stats
from inferry.workers.in_process.embedded import EmbeddedWorker
from support.builders import a_job
from support.loop_helpers import run_pending


def a_worker(mode: EngineMode) -> EmbeddedWorker:
    return EmbeddedWorker(
        "w",
        model_dir=Path("nowhere"),
        models=["m"],
        make_assembler=lambda stop: None,  # type: ignore[arg-type,return-value]
        controlled=True,
        engine=EngineConfig(mode=mode, max_sequences=8, chunk_tokens=64),
    )


@pytest.mark.parametrize(
    ("mode", "pads", "refills", "sequences", "prefill_tokens", "controlled"),
    [
        ("continuous", False, False, 8, 256, True),
        ("hybrid", False, False, 16, None, True),
        ("dynamic", True, True, 8, None, False),
        ("static", True, False, 8, None, False),
    ],
)
def test_the_view_says_how_a_mode_batches(
    mode: EngineMode, pads: bool, refills: bool, sequences: int, prefill_tokens: int | None, controlled: bool
) -> None:
    view = a_worker(mode).view()
    assert (view.pads, view.refills, view.controlled) == (pads, refills, controlled)
    assert (view.capacity.sequences, view.capacity.prefill_tokens) == (sequences, prefill_tokens)


def test_the_view_has_what_the_steps_computed() -> None:
    worker = a_worker("static")
    assert worker.view().step_work is None
    worker._engine.stats = Stats(1, 0, 0, 0, 0, prompt_tokens=5, decode_rows=4, padding_tokens=3, padding_rows=2)
    assert worker.view().step_work == StepWork(5, 4, 3, 2)


def numbers(mode: EngineMode, keys: list[str]) -> list[int]:
    """The numbers in the requests of plans with these batch keys, sent one after the other."""
    return [request.batch for request in requests(mode, [with_key(n, key) for n, key in enumerate(keys)])]


def requests(mode: EngineMode, jobs: list[InferenceJob]) -> list[Request]:
    """The requests of plans of one job each, sent one after the other."""

    async def plans() -> list[Request]:
        worker = a_worker(mode)
        sent: list[Any] = []
        worker._engine._phase = type(worker._engine._phase).READY
        worker._engine.send = lambda message: sent.append(message) is None  # type: ignore[method-assign,func-returns-value]
        worker._make_assembler = lambda stop: None  # type: ignore[assignment,return-value]
        tasks = [asyncio.create_task(worker.run(a_plan(n, job), lambda item: None)) for n, job in enumerate(jobs)]
        await run_pending()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [request for message in sent if isinstance(message, Add) for request in message.requests]

    return asyncio.run(plans())


def a_plan(number: int, job: InferenceJob) -> BatchPlan:
    return BatchPlan(plan_id=number, worker="w", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)


def with_key(number: int, key: str) -> InferenceJob:
    job = a_job(f"job-{number}")
    return replace(
        job, batch_key=BatchKey(RouteKey("m"), group=key), payload=replace(job.payload, prompt_ids=(1, 2, 3))
    )


def test_plans_have_the_same_number_if_their_batch_key_is_the_same() -> None:
    first, second, third, fourth = numbers("static", ["a", "b", "a", "b"])
    assert first == third != second == fourth
    assert numbers("continuous", ["a", "b"]) == [0, 0]


def test_a_request_says_whether_it_is_batch_work() -> None:
    jobs = [replace(with_key(number, "a"), is_batch=is_batch) for number, is_batch in enumerate((True, False))]
    assert [request.is_batch for request in requests("continuous", jobs)] == [True, False]
