"""Probes a worker with a real generation of one token, or with a result of a pooling model, in the highest lane."""

import asyncio
from typing import Literal

import msgspec

from inferry.domain.errors import InvalidRequest, WorkerLost, WorkerTimeout
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload, PooledInputs
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import ModelCard, Worker
from inferry.domain.routes import BatchKey, RouteKey, Task
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Done, Failed, Item
from inferry.domain.values import replace

PROBE_TIMEOUT_S = 60.0


async def probe(worker: Worker, number: int, now: float) -> bool:
    """Generate one token with the worker's first model, or one result where it does not generate; or raise.

    Returns False where the model has no chat template, so that only a completion generates.
    """
    cards = worker.cards()
    if not cards:
        raise WorkerLost("it serves no model")
    job = _probe_job(f"probe-{worker.name}-{number}", cards[0].name, now)
    if Task.GENERATE not in cards[0].tasks:
        job = _pooled_probe(job, cards[0])
    try:
        await _run(worker, job)
        return True
    except InvalidRequest as error:
        if job.payload.api != "chat" or "chat template" not in error.message:
            raise
    await _run(worker, _completion_probe(job))
    return False


async def _run(worker: Worker, job: InferenceJob) -> None:
    ends: list[Done | Failed] = []

    def emit(item: Item) -> None:
        if isinstance(item, Done | Failed):
            ends.append(item)

    plan = BatchPlan(
        plan_id=0, worker=worker.name, jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=job.arrived_at
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await worker.run(plan, emit)
    except TimeoutError:
        raise WorkerTimeout(f"no token within {PROBE_TIMEOUT_S:.0f} s") from None
    if not ends:
        raise WorkerLost("it returned neither a token nor an error")
    if isinstance(ends[0], Failed):
        raise ends[0].error


def _probe_job(job_id: str, model: str, now: float) -> InferenceJob:
    route = RouteKey(model)
    one = Estimate.exactly(1)
    body = b'{"model":"%s","messages":[{"role":"user","content":"ping"}],"max_tokens":1}' % model.encode()
    return InferenceJob(
        job_id=job_id,
        tenant="inferry",
        run_id=job_id,
        step_id="probe",
        lane=Lane.P0,
        route=route,
        batch_key=BatchKey(route),
        footprint=Footprint(one, Estimate.exactly(0), one),
        token_budget=1,
        prompt_hash="",
        arrived_at=now,
        max_wait_s=0.0,
        payload=Payload(api="chat", body=body, sampling=Sampling(max_tokens=1, temperature=0.0), prompt_ids=(0,)),
    )


def _completion_probe(job: InferenceJob) -> InferenceJob:
    body = b'{"model":%s,"prompt":"ping","max_tokens":1}' % msgspec.json.encode(job.route.model)
    payload = Payload(api="completions", body=body, sampling=job.payload.sampling, prompt_ids=job.payload.prompt_ids)
    return replace(job, payload=payload)


def _pooled_probe(job: InferenceJob, card: ModelCard) -> InferenceJob:
    api: Literal["embeddings", "score", "classify"] = "embeddings"
    if Task.EMBED not in card.tasks:
        api = "score" if Task.SCORE in card.tasks else "classify"
    inputs = b'"text_1":["ping"],"text_2":["ping"]' if api == "score" else b'"input":["ping"]'
    body = b'{"model":%s,%s}' % (msgspec.json.encode(card.name), inputs)
    pooled = PooledInputs(1, ((0,),))
    payload = Payload(api=api, body=body, sampling=job.payload.sampling, non_streaming=True, pooled=pooled)
    return replace(job, payload=payload)
