"""Jobs for HTTP workers, plans of them, and what a worker emits."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

from msgspec import json

from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob, Payload, ResumeMode, ResumePoint
from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Done, Failed, Item
from inferry.domain.values import replace
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.builders import a_job
from support.upstream import Upstream
from support.virtual_net import run_virtual_net
from support.virtual_time import LoopClock


def a_call(
    job_id: str = "j",
    *,
    api: Literal["chat", "completions"] = "chat",
    tokens: int = 8,
    tenant: str = "a",
    resume: ResumeMode = ResumeMode.CONTINUE,
    resume_point: ResumePoint | None = None,
    attempt: int = 1,
    stream: bool = False,
    **fields: Any,
) -> InferenceJob:
    """A chat, or a completion of a few token ids; `fields` are more of its body."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    if api == "completions":
        prompt = {"prompt": [5, 6, 7]}
    body = json.encode({"model": "m", **prompt, "max_tokens": tokens, **fields})
    job = a_job(job_id, output=tokens, tenant=tenant, resume=resume, attempt=attempt, stream=stream)
    payload = Payload(api=api, body=body, sampling=Sampling(max_tokens=tokens), cache_salt=fields.get("cache_salt"))
    return replace(job, token_budget=tokens, payload=payload, resume_point=resume_point)


def a_plan(*jobs: InferenceJob) -> BatchPlan:
    return BatchPlan(plan_id=1, worker="up", jobs=jobs, reason=ReleaseReason.IMMEDIATE, formed_at=0.0)


def a_worker(up: Upstream, **settings: Any) -> OpenAIHttpWorker:
    return OpenAIHttpWorker("up", HttpWorkerSettings(url=up.url, **settings), LoopClock())


async def ran(up: Upstream, job: InferenceJob | None = None, **settings: Any) -> list[Item]:
    """What one job on a worker before the server emitted, from start to close."""
    worker = a_worker(up, **settings)
    items: list[Item] = []
    try:
        await worker.start()
        await worker.run(a_plan(a_call() if job is None else job), items.append)
    finally:
        await worker.close()
    return items


def run(work: Coroutine[Any, Any, None]) -> None:
    """In virtual time, the servers too; whatever has a clock there must have a `LoopClock`."""
    run_virtual_net(asyncio.wait_for(work, 120))


def raw_of(items: list[Item]) -> bytes:
    return b"".join(item.raw for item in items if isinstance(item, Delta))


def done(items: list[Item]) -> Done:
    end = items[-1]
    assert isinstance(end, Done), end
    return end


def failed(items: list[Item]) -> Failed:
    end = items[-1]
    assert isinstance(end, Failed), end
    return end


def error_of(items: list[Item]) -> GatewayError:
    return failed(items).error
