"""The contract of a Worker, held by every implementation and by the fake."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from inferry.adapters.workers.embedded import EmbeddedWorker
from inferry.adapters.workers.openai_http import HttpWorkerSettings, OpenAIHttpWorker
from inferry.domain.clock import SystemClock
from inferry.domain.errors import ClientClosed
from inferry.domain.jobs import BatchKey, Estimate, Footprint, InferenceJob, Lane, Payload, RouteKey, Sampling
from inferry.domain.plans import BatchPlan, Phase, ReleaseReason
from inferry.domain.ports import Worker
from inferry.domain.streams import Delta, Done, End, Failed, FinishReason, Item
from inferry.engine.tokenizer import HfTokenizer
from inferry.streams.assembler import Assembler
from support import upstream
from support.scripted_worker import ScriptedWorker

Making = Callable[[Path], AbstractAsyncContextManager[Worker]]


@asynccontextmanager
async def scripted(model_dir: Path) -> AsyncIterator[Worker]:
    worker = ScriptedWorker(words=[f" w{i}" for i in range(400)])
    yield worker
    await worker.close()


@asynccontextmanager
async def over_http(model_dir: Path) -> AsyncIterator[Worker]:
    async def words(up: upstream.Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await upstream.begin(request)
        for number in range(body["max_tokens"]):
            finish = "length" if number == body["max_tokens"] - 1 else None
            await response.write(upstream.chunk(f" w{number}", finish, chat=False))
            await asyncio.sleep(0)
        await response.write(upstream.usage(len(body["prompt"]), body["max_tokens"]) + upstream.DONE)
        return response

    async with upstream.Upstream(words) as up:
        worker = OpenAIHttpWorker("http", HttpWorkerSettings(url=up.url), SystemClock())
        yield worker
        await worker.close()


@asynccontextmanager
async def embedded(model_dir: Path) -> AsyncIterator[Worker]:
    tokenizer = HfTokenizer(model_dir)
    worker = EmbeddedWorker(
        "embedded", model_dir=model_dir, models=["m"], make_assembler=lambda stop: Assembler(tokenizer, stop)
    )
    yield worker
    await worker.close()


@pytest.fixture(params=[scripted, over_http, embedded], ids=lambda make: make.__name__)
def worker(request: pytest.FixtureRequest, tiny_model: Path) -> Callable[[], AbstractAsyncContextManager[Worker]]:
    make: Making = request.param
    return lambda: make(tiny_model)


MakeWorker = Callable[[], AbstractAsyncContextManager[Worker]]


class Heard:
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
        else:
            self.ends[item.job_id] = item

    def tokens(self, job_id: str) -> int:
        return sum(delta.tokens for delta in self.deltas[job_id])


def a_call(job_id: str, *, tokens: int = 8, prompt: int = 5) -> InferenceJob:
    route = RouteKey("m")
    ids = tuple(range(10, 10 + prompt))
    body = {"model": "m", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return InferenceJob(
        job_id=job_id,
        tenant="a",
        run_id=f"run-{job_id}",
        step_id=f"step-{job_id}",
        lane=Lane.P1,
        route=route,
        batch_key=BatchKey(route),
        footprint=Footprint(Estimate.exactly(prompt), Estimate.exactly(0), Estimate.exactly(tokens)),
        token_budget=tokens,
        prompt_hash="",
        arrived_at=0.0,
        max_wait_s=1.0,
        payload=Payload(
            api="completions",
            body=msgspec.json.encode(body),
            sampling=Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True),
            prompt_ids=ids,
        ),
    )


def a_plan(worker: Worker, *jobs: InferenceJob) -> BatchPlan:
    return BatchPlan(plan_id=1, worker=worker.name, jobs=jobs, reason=ReleaseReason.IMMEDIATE, formed_at=0.0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_every_job_of_a_plan_gets_contiguous_deltas_and_one_end(worker: MakeWorker) -> None:
    async def scenario() -> None:
        async with worker() as w:
            await w.start()
            heard = Heard()
            jobs = [a_call(f"j{i}", tokens=3 + i, prompt=4 + i) for i in range(6)]
            await w.run(a_plan(w, *jobs), heard)
            for i, job in enumerate(jobs):
                end = heard.ends[job.job_id]
                assert isinstance(end, Done)
                assert end.finish is FinishReason.LENGTH
                assert end.usage.output_tokens == 3 + i == heard.tokens(job.job_id)
                assert end.usage.prompt_tokens == 4 + i
                for delta in heard.deltas[job.job_id]:
                    assert (delta.run_id, delta.step_id) == (job.run_id, job.step_id)

    run(scenario())


def test_plans_run_side_by_side(worker: MakeWorker) -> None:
    async def scenario() -> None:
        async with worker() as w:
            await w.start()
            heard = Heard()
            plans = [a_plan(w, a_call(f"p{i}-a"), a_call(f"p{i}-b")) for i in range(4)]
            await asyncio.gather(*(w.run(plan, heard) for plan in plans))
            assert len(heard.ends) == 8
            assert all(isinstance(end, Done) for end in heard.ends.values())

    run(scenario())


def test_a_worker_is_ready_after_its_start_and_names_its_models(worker: MakeWorker) -> None:
    async def scenario() -> None:
        async with worker() as w:
            await w.start()
            view = w.view()
            assert view.phase is Phase.READY
            assert view.worker == w.name
            assert view.models == {"m"} == {card.name for card in w.cards()}
            assert view.room.sequences is not None

    run(scenario())


def test_a_cancelled_job_ends_once_and_its_neighbours_go_on(worker: MakeWorker) -> None:
    async def scenario() -> None:
        async with worker() as w:
            await w.start()
            heard = Heard()
            gone, stays = a_call("gone", tokens=400), a_call("stays", tokens=12)
            running = asyncio.create_task(w.run(a_plan(w, gone, stays), heard))
            await heard.first.wait()
            freed = await w.cancel(["gone"])
            await running
            assert freed == {"gone"}
            end = heard.ends["gone"]
            assert isinstance(end, Failed)
            assert isinstance(end.error, ClientClosed)
            assert isinstance(heard.ends["stays"], Done)

    run(scenario())


@pytest.mark.parametrize("companions", [0, 2])
def test_a_job_may_be_cancelled_before_anything_came(worker: MakeWorker, companions: int) -> None:
    async def scenario() -> None:
        async with worker() as w:
            await w.start()
            heard = Heard()
            others = [a_call(f"other-{i}") for i in range(companions)]
            running = asyncio.create_task(w.run(a_plan(w, a_call("gone", tokens=400), *others), heard))
            cancelling = asyncio.create_task(w.cancel(["gone"]))
            await running
            assert await cancelling == {"gone"}
            assert isinstance(heard.ends["gone"], Failed)
            assert all(isinstance(heard.ends[other.job_id], Done) for other in others)

    run(scenario())


def test_cancelling_what_is_not_there_frees_nothing(worker: MakeWorker) -> None:
    async def scenario() -> None:
        async with worker() as w:
            await w.start()
            assert await w.cancel(["nobody"]) == frozenset()
            heard = Heard()
            await w.run(a_plan(w, a_call("over")), heard)
            assert await w.cancel(["over"]) == frozenset()

    run(scenario())


def test_closing_ends_what_runs_with_an_error(worker: MakeWorker) -> None:
    async def scenario() -> None:
        async with worker() as w:
            await w.start()
            heard = Heard()
            running = asyncio.create_task(w.run(a_plan(w, a_call("j", tokens=400)), heard))
            await heard.first.wait()
            await w.close()
            await asyncio.wait([running])
            assert running.exception() is not None or isinstance(heard.ends["j"], Failed)

    run(scenario())
