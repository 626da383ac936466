"""Values for tests, with defaults for every field."""

import itertools
from typing import Literal

from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload, ResumeMode
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.routes import BatchKey, OutputLength, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.workers import Capacity, KvPacking, Load, Phase, WorkerView

_numbers = itertools.count(1)


def a_job(
    job_id: str | None = None,
    *,
    tokens: int = 50,
    cached: int = 0,
    output: int = 10,
    tenant: str = "a",
    run_id: str = "run",
    step_id: str | None = None,
    lane: Lane = Lane.P1,
    model: str = "m",
    precision: str | None = None,
    adapter: str | None = None,
    isolation: str | None = None,
    group: str | None = None,
    stream: bool = False,
    at: float = 0.0,
    max_wait_s: float = 60.0,
    deadline: float | None = None,
    attempt: int = 1,
    preemptions: int = 0,
    avoid: tuple[str, ...] = (),
    length: OutputLength | None = None,
    session: str | None = None,
    template_id: str | None = None,
    prefix: tuple[str, ...] = (),
    resume: ResumeMode = ResumeMode.RESTART,
    body: bytes = b"{}",
    prompt_ids: tuple[int, ...] | None = None,
    sampling: Sampling | None = None,
) -> InferenceJob:
    """A job of `tokens` prompt tokens that arrived at `at`."""
    job_id = f"job-{next(_numbers)}" if job_id is None else job_id
    route = RouteKey(model, precision, adapter, isolation, avoid, length)
    return InferenceJob(
        job_id=job_id,
        tenant=tenant,
        run_id=run_id,
        step_id=job_id if step_id is None else step_id,
        lane=lane,
        route=route,
        batch_key=BatchKey(route, streaming=stream, group=group),
        footprint=Footprint(Estimate.exactly(tokens), Estimate.exactly(cached), Estimate.exactly(output)),
        token_budget=tokens + output,
        prompt_hash="hash",
        arrived_at=at,
        max_wait_s=max_wait_s,
        deadline=deadline,
        stream=stream,
        attempt=attempt,
        preemptions=preemptions,
        session=session,
        template_id=template_id,
        prefix=prefix,
        resume=resume,
        payload=Payload(api="chat", body=body, sampling=sampling or Sampling(max_tokens=output), prompt_ids=prompt_ids),
    )


def a_view(
    worker: str = "w",
    *,
    models: tuple[str, ...] = ("m",),
    adapters: tuple[str, ...] = (),
    isolation: str | None = None,
    precision: str | None = None,
    group: str = "default",
    output_length: OutputLength | None = None,
    kv_packing: KvPacking = "sum",
    phase: Phase = Phase.READY,
    pads: bool = False,
    refills: bool = False,
    sequences: int | None = None,
    kv_tokens: int | None = None,
    prefill_tokens: int | None = None,
    prefill_tokens_per_s: float | None = None,
    batch_sequences: int | None = None,
    foreign: Load | None = None,
    load: Load | None = None,
    at: float = 0.0,
) -> WorkerView:
    """A worker that is up and, unless told otherwise, has no limits."""
    return WorkerView(
        worker=worker,
        models=frozenset(models),
        adapters=frozenset(adapters),
        isolation=isolation,
        precision=precision,
        group=group,
        output_length=output_length,
        kv_packing=kv_packing,
        phase=phase,
        pads=pads,
        refills=refills,
        capacity=Capacity(sequences, kv_tokens, prefill_tokens, prefill_tokens_per_s, batch_sequences),
        foreign=Load() if foreign is None else foreign,
        load=Load() if load is None else load,
        observed_at=at,
    )


def a_policy(
    *,
    window: Literal["adaptive", "fixed", "off"] = "off",
    coalesce_ms: float = 10,
    max_wait_ms: float = 60_000,
    max_batch: int = 64,
    queue_limit: int = 10_000,
    share: float = 0.0,
    reserve: float = 0.0,
    may_preempt: tuple[Lane, ...] = (),
    preemptible: bool = False,
    ttft_ms: float | None = None,
    itl_ms: float | None = None,
    groups: tuple[str, ...] | None = None,
    borrow_groups: bool = False,
    prompt_buckets: tuple[int, ...] = (),
) -> LanePolicy:
    """A batch lane that holds no job, has no share and no reserve, unless told otherwise."""
    return LanePolicy(
        window=window,
        coalesce_ms=coalesce_ms,
        max_wait_ms=max_wait_ms,
        max_batch=max_batch,
        queue_limit=queue_limit,
        share=share,
        reserve=reserve,
        may_preempt=may_preempt,
        preemptible=preemptible,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        groups=groups,
        borrow_groups=borrow_groups,
        prompt_buckets=prompt_buckets,
    )
