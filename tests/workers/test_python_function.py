"""A Python function as a worker: inputs, limits, errors by item, cancellation, crashes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts.worker_calls import Received, a_call, a_plan, receive, until_ready
from inferry.domain.errors import ClientClosed, InternalError, UpstreamRefused, WorkerLost
from inferry.domain.jobs import InferenceJob, PooledInputs
from inferry.domain.pooling import decode_answer, decode_vector
from inferry.domain.routes import Task
from inferry.domain.streams import FinishReason
from inferry.domain.values import replace
from inferry.workers.in_process.engine_supervisor import EngineFailed
from inferry.workers.in_process.function_jobs import inputs_of, limited
from inferry.workers.in_process.python_function import FunctionSettings, PythonFunctionWorker

MODULE = """
import asyncio, os, pathlib, sys, time
import inferry

HERE = pathlib.Path(__file__).parent

def upper(prompts):
    with (HERE / "batches").open("a") as file:
        print(len(prompts), file=file)
    for prompt in prompts:
        if prompt == "crash":
            os._exit(9)
        if prompt == "exit":
            sys.exit("secret prompt")
        if prompt == "wait":
            (HERE / "started").touch()
            while not (HERE / "go").exists():
                time.sleep(0.005)
    if "bad" in prompts:
        raise ValueError("secret prompt")
    return [3 if prompt == "three" else str(prompt).upper() for prompt in prompts]

@inferry.batched(on_error="fail")
async def lengths(texts):
    await asyncio.sleep(0)
    if "bad" in texts:
        raise KeyError
    return [[float(len(text)), 1.0] for text in texts]

def short(texts):
    return texts[:1]

def similar(pairs):
    return [1.0 if a == b else 0.25 for a, b in pairs]

number = 7
"""


def a_job(job_id: str, prompt: Any = "hello", **changes: Any) -> InferenceJob:
    job = a_call(job_id, **changes)
    return replace(job, payload=replace(job.payload, body=msgspec.json.encode({"prompt": prompt}), prompt_ids=None))


def a_pooled_job(
    job_id: str, api: Any, body: dict[str, Any], count: int, dimensions: int | None = None
) -> InferenceJob:
    job = a_call(job_id)
    pooled = PooledInputs(count, None, None, dimensions)
    return replace(job, payload=replace(job.payload, api=api, body=msgspec.json.encode(body), pooled=pooled))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "own_functions.py").write_text(MODULE)
    return tmp_path


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 100))


@asynccontextmanager
async def a_worker(
    directory: Path, function: str = "upper", task: Task = Task.GENERATE, **more: Any
) -> AsyncIterator[PythonFunctionWorker]:
    settings = FunctionSettings(function=f"own_functions:{function}", directory=directory, model="m", task=task, **more)
    worker = PythonFunctionWorker("python", settings, restart_backoff_s=0.05)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


def test_a_plan_is_one_call_of_the_function_up_to_its_maximum(directory: Path) -> None:
    async def scenario() -> Received:
        async with a_worker(directory, max_batch=4) as worker:
            return await receive(worker, *(a_job(f"j{i}", f"text {i}") for i in range(6)))

    received = run(scenario())
    assert [received.text(f"j{i}") for i in range(6)] == [f"TEXT {i}" for i in range(6)]
    assert (directory / "batches").read_text().split() == ["4", "2"]
    assert received.done("j0").usage.gpu_seconds is None, "it has no GPU"


def test_an_error_of_one_input_belongs_to_its_job_and_quotes_nothing(directory: Path) -> None:
    async def scenario() -> Received:
        async with a_worker(directory) as worker:
            return await receive(worker, *(a_job(prompt, prompt) for prompt in ("good", "bad", "three", "fine")))

    received = run(scenario())
    assert received.text("good") == "GOOD"
    assert received.text("fine") == "FINE"
    refused, broken = received.failed("bad").error, received.failed("three").error
    assert isinstance(refused, UpstreamRefused)
    assert refused.message == "the function raised ValueError"
    assert isinstance(broken, InternalError)
    assert broken.message == "the function returned a int instead of a text"


def test_a_wrong_number_of_results_fails_the_jobs(directory: Path) -> None:
    async def scenario() -> Received:
        async with a_worker(directory, "short") as worker:
            return await receive(worker, a_job("a"), a_job("b"))

    error = run(scenario()).failed("a").error
    assert isinstance(error, InternalError)
    assert error.message == "short returned 1 results for 2 items"


def test_an_asynchronous_batched_function_embeds(directory: Path) -> None:
    async def scenario() -> Received:
        async with a_worker(directory, "lengths", Task.EMBED, gpus=1) as worker:
            assert [card.tasks for card in worker.cards()] == [frozenset({Task.EMBED})]
            jobs = [a_pooled_job("j", "embeddings", {"input": ["a", "bcd"]}, 2)]
            jobs.append(a_pooled_job("cut", "embeddings", {"input": ["bcd"]}, 1, dimensions=1))
            return await receive(worker, *jobs)

    received = run(scenario())
    answer = decode_answer(received.deltas["j"][0].raw)
    assert [decode_vector(str(vector)) for vector in answer.data] == [[1.0, 1.0], [3.0, 1.0]]
    assert [decode_vector(str(one)) for one in decode_answer(received.deltas["cut"][0].raw).data] == [[1.0]]
    usage = received.done("j").usage
    assert usage.gpu_seconds is not None
    assert answer.usage.prompt_tokens == usage.prompt_tokens == 5, "as estimated"


def test_a_function_with_on_error_fail_fails_the_whole_call(directory: Path) -> None:
    async def scenario() -> Received:
        async with a_worker(directory, "lengths", Task.EMBED) as worker:
            jobs = [a_pooled_job(text, "embeddings", {"input": [text]}, 1) for text in ("good", "bad")]
            return await receive(worker, *jobs)

    received = run(scenario())
    assert [received.failed(job).error.message for job in ("good", "bad")] == ["the function raised KeyError"] * 2


def test_pairs_are_scored(directory: Path) -> None:
    async def scenario() -> Received:
        async with a_worker(directory, "similar", Task.SCORE) as worker:
            return await receive(worker, a_pooled_job("j", "score", {"text_1": ["a"], "text_2": ["a", "b"]}, 2))

    assert decode_answer(run(scenario()).deltas["j"][0].raw).data == [1.0, 0.25]


@pytest.mark.parametrize("prompt", ["crash", "exit"])
def test_a_function_that_ends_its_process_fails_its_jobs_and_is_started_again(directory: Path, prompt: str) -> None:
    async def scenario() -> tuple[Received, Received]:
        async with a_worker(directory) as worker:
            lost = await receive(worker, a_job("lost", prompt))
            await until_ready(worker)
            return lost, await receive(worker, a_job("next"))

    lost, following = run(scenario())
    error = lost.failed("lost").error
    assert isinstance(error, WorkerLost)
    assert "secret" not in error.message
    assert following.text("next") == "HELLO"


def test_a_killed_process_is_started_again(directory: Path) -> None:
    async def scenario() -> Received:
        async with a_worker(directory) as worker:
            received = Received()
            running = asyncio.create_task(worker.run(a_plan(worker, a_job("j", "wait")), received))
            await until(directory / "started")
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            await running
            await until_ready(worker)
            return received

    assert isinstance(run(scenario()).failed("j").error, WorkerLost)


def test_a_call_that_takes_too_long_is_killed(directory: Path) -> None:
    async def scenario() -> Received:
        async with a_worker(directory, call_timeout_s=0.1) as worker:
            received = await receive(worker, a_job("j", "wait"))
            await until_ready(worker)
            return received

    error = run(scenario()).failed("j").error
    assert isinstance(error, WorkerLost)
    assert error.message == "the engine made no progress for 0.1 s"


def test_a_cancel_is_confirmed_when_the_function_holds_the_input_no_longer(directory: Path) -> None:
    async def scenario() -> tuple[Received, frozenset[str]]:
        async with a_worker(directory, max_batch=1) as worker:
            received = Received()
            jobs = [a_job("runs", "wait"), a_job("waits", "never called"), a_job("stays", "stays")]
            running = asyncio.create_task(worker.run(a_plan(worker, *jobs), received))
            await until(directory / "started")
            cancelling = asyncio.create_task(worker.cancel(["runs", "waits", "unknown"]))
            await asyncio.sleep(0)
            assert not received.ends, "nothing is confirmed while the call runs"
            (directory / "go").touch()
            freed = await cancelling
            assert set(received.ends) >= freed
            await running
            return received, freed

    received, freed = run(scenario())
    assert freed == {"runs", "waits"}
    assert all(isinstance(received.failed(job).error, ClientClosed) for job in freed)
    assert received.text("stays") == "STAYS"
    assert (directory / "batches").read_text().split() == ["1", "1"], "the job that waited was never called"


def test_closing_ends_running_jobs(directory: Path) -> None:
    async def scenario() -> Received:
        async with a_worker(directory) as worker:
            received = Received()
            running = asyncio.create_task(worker.run(a_plan(worker, a_job("j", "wait")), received))
            await until(directory / "started")
            await worker.close()
            await running
            return received

    assert isinstance(run(scenario()).failed("j").error, WorkerLost)


def test_a_plan_that_is_dropped_leaves_nothing_behind(directory: Path) -> None:
    async def scenario() -> Received:
        async with a_worker(directory, max_batch=1) as worker:
            running = asyncio.create_task(worker.run(a_plan(worker, a_job("j", "wait"), a_job("k")), Received()))
            await until(directory / "started")
            running.cancel()
            await asyncio.wait([running])
            (directory / "go").touch()
            return await receive(worker, a_job("j", "again"))

    assert run(scenario()).text("j") == "AGAIN"
    assert (directory / "batches").read_text().split() == ["1", "1"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing", "AttributeError: module 'own_functions' has no attribute 'missing'"),
        ("number", "TypeError: own_functions:number is a int and not a function"),
    ],
)
def test_a_function_that_cannot_be_imported_fails_the_start(directory: Path, function: str, message: str) -> None:
    async def scenario() -> None:
        with pytest.raises(EngineFailed) as failed:
            async with a_worker(directory, function):
                pass
        assert str(failed.value) == message

    run(scenario())


def test_what_the_function_gets_for_each_api() -> None:
    messages = [{"role": "user", "content": "hello"}]
    chat = a_call("chat")
    chat = replace(chat, payload=replace(chat.payload, api="chat", body=msgspec.json.encode({"messages": messages})))
    assert inputs_of(chat) == [messages]
    assert inputs_of(a_job("text", "hello")) == ["hello"]
    assert inputs_of(a_job("list", ["hello"])) == ["hello"]
    assert inputs_of(a_job("ids", [5, 6, 7])) == [[5, 6, 7]]
    pairs = {"text_1": ["a", "b"], "text_2": ["c", "d"]}
    assert inputs_of(a_pooled_job("pairs", "score", pairs, 2)) == [("a", "c"), ("b", "d")]


def test_texts_end_at_stop_strings_and_output_limits() -> None:
    assert limited("one two three", a_job("j")) == ("one two three", 4, FinishReason.STOP, None)
    assert limited("one two three", a_job("j", stop=("three", "two"))) == ("one ", 1, FinishReason.STOP, "two")
    assert limited("one two three", a_job("j", tokens=2)) == ("one two ", 2, FinishReason.LENGTH, None)
    assert limited("äöü" * 9, a_job("j", tokens=1)) == ("äö", 1, FinishReason.LENGTH, None)
    capped = a_job("j")
    capped = replace(capped, payload=replace(capped.payload, output_cap=1))
    assert limited("one two three", capped) == ("one ", 1, FinishReason.LENGTH, None)


async def until(path: Path) -> None:
    while not await asyncio.to_thread(path.exists):
        await asyncio.sleep(0.005)
