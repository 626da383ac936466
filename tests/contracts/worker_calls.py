"""Calls for the worker contract, and what a worker emits for them."""

import asyncio
import json
from collections import defaultdict
from typing import Any

import msgspec

from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload, ResumeMode, ResumePoint
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Tokenizer, Worker
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Done, End, Failed, Item
from inferry.domain.values import replace
from inferry.domain.workers import Phase


class Received:
    """Everything a worker emitted, checked for order as it comes."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[Delta]] = defaultdict(list)
        self.ends: dict[str, End] = {}
        self.first = asyncio.Event()

    def __call__(self, item: Item) -> None:
        assert item.job_id not in self.ends, "nothing comes after the end"
        if isinstance(item, Delta):
            assert item.index == len(self.deltas[item.job_id]), "indexes are contiguous"
            self.deltas[item.job_id].append(item)
            if item.tokens:
                self.first.set()
        elif isinstance(item, Done | Failed):
            self.ends[item.job_id] = item

    async def first_or_end(self, running: "asyncio.Task[None]") -> None:
        """The first token. None comes from an engine that was killed after earlier jobs, until its death is noticed."""
        first = asyncio.create_task(self.first.wait())
        await asyncio.wait({running, first}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()

    def counted(self, job_id: str) -> int:
        return sum(delta.tokens for delta in self.deltas[job_id])

    def pieces(self, job_id: str) -> list[tuple[str, tuple[int, ...]]]:
        """Text and token ids of each delta, whether it brings them itself or in events."""
        return [_read(delta) for delta in self.deltas[job_id]]

    def text(self, job_id: str) -> str:
        return "".join(text for text, _ in self.pieces(job_id))

    def ids(self, job_id: str) -> tuple[int, ...]:
        return tuple(token for _, ids in self.pieces(job_id) for token in ids)

    def failed(self, job_id: str) -> Failed:
        end = self.ends[job_id]
        assert isinstance(end, Failed)
        return end

    def done(self, job_id: str) -> Done:
        end = self.ends[job_id]
        assert isinstance(end, Done), end
        return end


def _read(delta: Delta) -> tuple[str, tuple[int, ...]]:
    if not delta.raw:
        return delta.text, delta.token_ids
    events = [json.loads(event.removeprefix(b"data: ")) for event in delta.raw.split(b"\n\n") if event]
    choices = [choice for event in events for choice in event["choices"]]
    ids = tuple(token for choice in choices for token in choice.get("token_ids") or ())
    return "".join(choice["text"] for choice in choices), ids


def a_prompt(tokens: int = 5, begin: int = 20) -> tuple[int, ...]:
    return tuple(range(begin, begin + tokens))


def a_call(
    job_id: str,
    *,
    tokens: int = 8,
    prompt: tuple[int, ...] | None = None,
    stop: tuple[str, ...] = (),
    resume_point: ResumePoint | None = None,
    resume: ResumeMode = ResumeMode.CONTINUE,
) -> InferenceJob:
    """A greedy call of /v1/completions that says how many tokens it wants, and that it wants to see their ids."""
    route = RouteKey("m")
    ids = a_prompt() if prompt is None else prompt
    body = {"model": "m", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | ({"stop": stop} if stop else {})
    return InferenceJob(
        job_id=job_id,
        tenant="a",
        run_id=f"run-{job_id}",
        step_id=f"step-{job_id}",
        lane=Lane.P1,
        route=route,
        batch_key=BatchKey(route),
        footprint=Footprint(Estimate.exactly(len(ids)), Estimate.exactly(0), Estimate.exactly(tokens)),
        token_budget=tokens,
        prompt_hash="",
        arrived_at=0.0,
        max_wait_s=1.0,
        resume=resume,
        resume_point=resume_point,
        payload=Payload(
            api="completions",
            body=msgspec.json.encode(body),
            sampling=Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, stop=stop),
            prompt_ids=ids,
        ),
    )


def a_text_call(
    tokenizer: Tokenizer, job_id: str, *, prompt: tuple[int, ...] | None = None, **more: Any
) -> InferenceJob:
    """The same call with the text of its prompt, and without what such an engine does not know."""
    job = a_call(job_id, prompt=prompt, **more)
    body = json.loads(job.payload.body)
    body["prompt"] = tokenizer.decode(body["prompt"])
    body = {name: value for name, value in body.items() if name not in ("ignore_eos", "return_token_ids")}
    return replace(job, payload=replace(job.payload, body=json.dumps(body).encode(), prompt_ids=None))


def a_plan(worker: Worker, *jobs: InferenceJob) -> BatchPlan:
    return BatchPlan(plan_id=1, worker=worker.name, jobs=jobs, reason=ReleaseReason.IMMEDIATE, formed_at=0.0)


async def receive(worker: Worker, *jobs: InferenceJob) -> Received:
    received = Received()
    await worker.run(a_plan(worker, *jobs), received)
    return received


async def until_ready(worker: Worker) -> None:
    while worker.view().phase is not Phase.READY:
        await asyncio.sleep(0.05)


def where_text_is_out(received: Received, at_least: int) -> int:
    """The first place, at or after this many tokens, where no character is half written."""
    tokens = 0
    for text, ids in received.pieces("whole"):
        tokens += len(ids)
        if tokens >= at_least and text:
            return tokens
    return tokens


def text_after(received: Received, cut: int) -> str:
    tokens, rest = 0, ""
    for text, ids in received.pieces("whole"):
        rest += text if tokens >= cut else ""
        tokens += len(ids)
    return rest
