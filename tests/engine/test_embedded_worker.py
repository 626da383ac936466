"""The embedded worker over its real engine process."""

import asyncio
import gc
import os
import random
import shutil
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferry.domain.errors import ClientClosed, ContextLengthExceeded, UpstreamRefused, WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Done, End, Failed, FinishReason, Item
from inferry.domain.workers import Phase
from inferry.engine.config import EngineConfig
from inferry.engine.messages import Request
from inferry.engine.tokenizer import HfTokenizer
from inferry.streams.detokenizer import Assembler
from inferry.workers.in_process.embedded import EmbeddedWorker
from inferry.workers.in_process.engine_supervisor import EngineFailed
from support.engine_fixtures import TIE, Teacher, a_job, a_plan, generate_alone, greedy, shortfall
from support.waiting import async_until

CONFIG = EngineConfig(max_sequences=64, kv_tokens=16_384, chunk_tokens=256)


class Heard:
    """Items that a worker emitted, by job; `first` is set with the first token of any job."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[Delta]] = defaultdict(list)
        self.ends: dict[str, End] = {}
        self.first = asyncio.Event()

    def __call__(self, item: Item) -> None:
        assert item.job_id not in self.ends
        if isinstance(item, Delta):
            assert item.index == len(self.deltas[item.job_id])
            self.deltas[item.job_id].append(item)
            self.first.set()
        elif isinstance(item, Done | Failed):
            self.ends[item.job_id] = item

    def tokens(self, job_id: str) -> list[int]:
        return [token for delta in self.deltas[job_id] for token in delta.token_ids]

    def text(self, job_id: str) -> str:
        return "".join(delta.text for delta in self.deltas[job_id])


class EngineHost:
    """One event loop and one worker for the tests of this module: a process takes two seconds to start."""

    def __init__(self, model_dir: Path, tokenizer: HfTokenizer) -> None:
        self.tokenizer = tokenizer
        self.runner = asyncio.Runner()
        self.worker = a_worker(model_dir, tokenizer)
        self.runner.run(self.worker.start())

    def close(self) -> None:
        self.runner.run(self.worker.close())
        self.runner.close()

    def assert_empty(self) -> None:
        assert not self.worker._jobs.is_busy
        assert not self.worker._jobs._by_job
        stats = self.worker.stats
        assert stats is not None
        assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)
        assert stats.free_blocks == CONFIG.blocks


def a_worker(model_dir: Path, tokenizer: HfTokenizer, *, restart_backoff_s: float = 0.5) -> EmbeddedWorker:
    return EmbeddedWorker(
        "embedded",
        model_dir=model_dir,
        models=["tiny"],
        make_assembler=lambda stop: Assembler(tokenizer, stop),
        engine=CONFIG,
        restart_backoff_s=restart_backoff_s,
    )


@pytest.fixture(scope="module")
def env(tiny_dir: Path, tokenizer: HfTokenizer) -> Iterator[EngineHost]:
    env = EngineHost(tiny_dir, tokenizer)
    yield env
    env.close()


async def run_alone(worker: EmbeddedWorker, job: InferenceJob) -> Heard:
    heard = Heard()
    await worker.run(a_plan(job), heard)
    return heard


def test_the_view_and_the_card_describe_the_engine(env: EngineHost) -> None:
    view = env.worker.view()
    assert (view.phase, view.models, view.kv_capacity) == (Phase.READY, frozenset(["tiny"]), 16_384)
    assert (view.capacity.sequences, view.capacity.kv_tokens, view.capacity.prefill_tokens) == (64, 16_384, 1_024)
    (card,) = env.worker.cards()
    assert (card.name, card.context_tokens, card.vocab_size, card.features) == (
        "tiny",
        16_384,
        4096,
        frozenset({"echo", "prefill", "streamed_echo", "structured_outputs"}),
    )


def test_sixty_four_jobs_of_many_plans_do_not_mix(env: EngineHost, tiny_dir: Path) -> None:
    rng = random.Random(5)
    lengths = [600, 300] + [rng.randint(1, 80) for _ in range(62)]
    prompts = {f"job-{n}": [rng.randrange(7, 4096) for _ in range(length)] for n, length in enumerate(lengths)}
    jobs = [
        a_job(job_id, prompt, sampling=greedy(12), lane=Lane(n % 3))
        for n, (job_id, prompt) in enumerate(prompts.items())
    ]

    async def all_at_once() -> Heard:
        heard = Heard()
        plans = [a_plan(*jobs[start : start + 5]) for start in range(0, 64, 5)]
        await asyncio.gather(*(env.worker.run(plan, heard) for plan in plans))
        return heard

    heard = env.runner.run(all_at_once())
    teacher = Teacher(tiny_dir)
    requests = [Request(n, prompt, greedy(12), Lane.P1) for n, prompt in enumerate(prompts.values())]
    alone = generate_alone(tiny_dir, requests)
    for number, (job_id, prompt) in enumerate(prompts.items()):
        end = heard.ends[job_id]
        assert isinstance(end, Done)
        assert end.finish is FinishReason.LENGTH
        assert (end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.output_tokens) == (len(prompt), 0, 12)
        assert end.usage.gpu_seconds is not None
        assert end.usage.gpu_seconds > 0
        tokens = heard.tokens(job_id)
        assert tokens == alone[number] or shortfall(teacher.logits([*prompt, *tokens]), prompt, tokens) <= TIE
        assert heard.text(job_id) == env.tokenizer.decode(tokens)
        for delta in heard.deltas[job_id]:
            assert (delta.run_id, delta.step_id) == (f"run-of-{job_id}", f"step-of-{job_id}")
    env.assert_empty()


def test_a_stop_string_ends_the_text_before_it_and_counts_the_token_that_completed_it(env: EngineHost) -> None:
    prompt = [50, 60, 70]
    free = env.runner.run(run_alone(env.worker, a_job("free", prompt, sampling=greedy(30))))
    text = free.text("free")
    stop = text[25:29]
    cut = text.find(stop)
    stopped = env.runner.run(run_alone(env.worker, a_job("s", prompt, sampling=greedy(30, stop=("\x00", stop)))))
    end = stopped.ends["s"]
    assert isinstance(end, Done)
    assert end.finish is FinishReason.STOP
    assert stopped.text("s") == text[:cut]
    tokens = free.tokens("free")
    needed = next(n for n in range(31) if stop in env.tokenizer.decode(tokens[:n]))
    assert end.usage.output_tokens == needed == len(stopped.tokens("s"))
    env.assert_empty()


def test_a_stop_token_ends_with_stop(env: EngineHost) -> None:
    prompt = [50, 60, 70]
    free = env.runner.run(run_alone(env.worker, a_job("free", prompt, sampling=greedy(10))))
    token = free.tokens("free")[4]
    sampling = Sampling(temperature=0.0, max_tokens=10, stop_token_ids=(token,), ignore_eos=True)
    stopped = env.runner.run(run_alone(env.worker, a_job("s", prompt, sampling=sampling)))
    end = stopped.ends["s"]
    assert isinstance(end, Done)
    assert (end.finish, end.usage.output_tokens) == (FinishReason.STOP, 5)


def test_a_seed_gives_the_same_tokens_alone_and_in_company(env: EngineHost) -> None:
    def sampled(job_id: str, seed: int | None) -> InferenceJob:
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=seed, max_tokens=20, ignore_eos=True)
        return a_job(job_id, [9, 8, 7, 6], sampling=sampling)

    alone = env.runner.run(run_alone(env.worker, sampled("a", 42))).tokens("a")

    async def in_company() -> Heard:
        heard = Heard()
        await env.worker.run(a_plan(*(sampled(f"n{n}", None) for n in range(9)), sampled("a", 42)), heard)
        return heard

    heard = env.runner.run(in_company())
    assert heard.tokens("a") == alone
    assert len({tuple(heard.tokens(f"n{n}")) for n in range(9)}) > 1


def test_a_refused_job_fails_alone(env: EngineHost) -> None:
    too_long = a_job("long", [5] * 16_384)
    outside = a_job("outside", [4096])
    fine = a_job("fine", [5, 6])

    async def scenario() -> Heard:
        heard = Heard()
        await env.worker.run(a_plan(too_long, outside, fine), heard)
        return heard

    ends = env.runner.run(scenario()).ends
    assert isinstance(ends["fine"], Done)
    for job_id, error in (("long", ContextLengthExceeded), ("outside", UpstreamRefused)):
        end = ends[job_id]
        assert isinstance(end, Failed)
        assert isinstance(end.error, error)


def test_a_cancelled_job_fails_as_closed_by_the_client_and_is_freed_when_cancel_returns(env: EngineHost) -> None:
    async def scenario() -> None:
        heard = Heard()
        running = asyncio.create_task(env.worker.run(a_plan(a_job("j", [1, 2, 3], sampling=greedy(5_000))), heard))
        await heard.first.wait()
        assert await env.worker.cancel(["j", "unknown"]) == {"j"}
        env.assert_empty()
        await running
        end = heard.ends["j"]
        assert isinstance(end, Failed)
        assert isinstance(end.error, ClientClosed)
        assert end.usage.output_tokens == len(heard.tokens("j"))
        assert end.usage.gpu_seconds is not None

    env.runner.run(scenario())


def test_a_run_that_is_itself_cancelled_frees_its_jobs(env: EngineHost) -> None:
    async def scenario() -> None:
        heard = Heard()
        running = asyncio.create_task(env.worker.run(a_plan(a_job("j", [1, 2, 3], sampling=greedy(5_000))), heard))
        await heard.first.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await run_alone(env.worker, a_job("next", [1, 2]))
        env.assert_empty()
        assert not heard.ends

    env.runner.run(scenario())


def test_a_reader_that_raises_ends_its_own_plan_only(env: EngineHost) -> None:
    def broken(item: Item) -> None:
        raise LookupError("no reader")

    async def scenario() -> None:
        heard = Heard()
        fine = asyncio.create_task(env.worker.run(a_plan(a_job("fine", [1, 2], sampling=greedy(40))), heard))
        with pytest.raises(LookupError):
            await env.worker.run(a_plan(a_job("broken", [3, 4], sampling=greedy(5_000))), broken)
        await fine
        assert isinstance(heard.ends["fine"], Done)
        await run_alone(env.worker, a_job("next", [1, 2]))
        env.assert_empty()

    env.runner.run(scenario())


def test_a_thousand_random_cancels_leak_nothing(env: EngineHost) -> None:
    rng = random.Random(11)
    cancelled = 0

    async def one(number: int, heard: Heard) -> None:
        nonlocal cancelled
        prompt = [rng.randrange(7, 4096) for _ in range(rng.randint(1, 40))]
        job = a_job(f"job-{number}", prompt, sampling=greedy(rng.randint(1, 60)), lane=Lane(rng.randrange(3)))
        running = asyncio.create_task(env.worker.run(a_plan(job), heard))
        patience = rng.randint(0, 6)
        for _ in range(1_000):
            if len(heard.deltas[job.job_id]) >= patience or running.done():
                break
            await asyncio.sleep(0)
        await env.worker.cancel([job.job_id])
        cancelled += 1
        await running

    async def scenario() -> None:
        heard = Heard()
        for start in range(0, 1_000, 50):
            await asyncio.gather(*(one(number, heard) for number in range(start, start + 50)))
        assert len(heard.ends) == 1_000
        await run_alone(env.worker, a_job("after", [1, 2]))

    env.runner.run(scenario())
    assert cancelled == 1_000
    env.assert_empty()


async def until_ready(worker: EmbeddedWorker) -> None:
    await async_until(lambda: worker.view().phase is Phase.READY)


def test_a_killed_engine_fails_its_jobs_and_restarts(tiny_dir: Path, tokenizer: HfTokenizer) -> None:
    async def scenario() -> None:
        worker = a_worker(tiny_dir, tokenizer, restart_backoff_s=0.01)
        await worker.start()
        try:
            heard = Heard()
            jobs = [a_job(f"j{n}", [n + 7, 2, 3], sampling=greedy(5_000)) for n in range(5)]
            running = asyncio.create_task(worker.run(a_plan(*jobs), heard))
            await heard.first.wait()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            await running
            for end in heard.ends.values():
                assert isinstance(end, Failed)
                assert isinstance(end.error, WorkerLost)
                assert end.usage.output_tokens == len(heard.tokens(end.job_id))
            assert worker.view().phase is not Phase.READY
            refused = (await run_alone(worker, a_job("early", [1, 2]))).ends["early"]
            assert isinstance(refused, Failed)
            assert isinstance(refused.error, WorkerLost)
            assert await worker.cancel(["j1"]) == frozenset()
            await until_ready(worker)
            again = (await run_alone(worker, a_job("again", [1, 2]))).ends["again"]
            assert isinstance(again, Done)
        finally:
            await worker.close()

    asyncio.run(scenario())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_close_leaves_no_process_thread_task_or_file(tiny_dir: Path, tokenizer: HfTokenizer) -> None:
    async def scenario() -> None:
        files, threads = open_files(), threading.active_count()
        worker = a_worker(tiny_dir, tokenizer)
        await worker.start()
        pid = worker.pid
        assert pid is not None
        heard = Heard()
        running = asyncio.create_task(worker.run(a_plan(a_job("j", [1, 2], sampling=greedy(5_000))), heard))
        await heard.first.wait()
        await worker.close()
        await running
        end = heard.ends["j"]
        assert isinstance(end, Failed)
        assert isinstance(end.error, WorkerLost)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert (open_files(), threading.active_count()) == (files, threads)
        assert worker.view().phase is Phase.DOWN
        await worker.close()

    asyncio.run(scenario())
    gc.collect()


def test_a_failed_start_reports_why_and_may_be_retried(tmp_path: Path, tiny_dir: Path, tokenizer: HfTokenizer) -> None:
    async def scenario() -> None:
        worker = a_worker(tmp_path, tokenizer)
        with pytest.raises(EngineFailed, match=r"config\.json"):
            await worker.start()
        shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True)
        await worker.start()
        assert worker.view().phase is Phase.READY
        await worker.close()

    asyncio.run(scenario())


def test_automatic_kv_tokens_are_unknown_before_the_engine_is_ready(tiny_dir: Path, tokenizer: HfTokenizer) -> None:
    worker = EmbeddedWorker(
        "embedded",
        model_dir=tiny_dir,
        models=["tiny"],
        make_assembler=lambda stop: Assembler(tokenizer, stop),
        engine=EngineConfig(kv_tokens="auto"),
    )
    assert worker.view().capacity.kv_tokens is None
