"""A job that is interrupted in one engine and resumed in another has the output of an undisturbed one."""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from inferry.domain.constraints import Constraint
from inferry.domain.errors import ClientClosed, WorkerLost
from inferry.domain.jobs import InferenceJob, ResumeMode, ResumePoint
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Done, End, Failed, FinishReason, Item, Usage
from inferry.domain.values import replace
from inferry.engine.config import EngineConfig
from inferry.engine.tokenizer import HfTokenizer
from inferry.streams.detokenizer import Assembler
from inferry.workers.in_process.embedded import EmbeddedWorker
from inferry.workers.in_process.engine_jobs import LiveJob
from inferry.workers.plan_completion import PlanCompletion
from support.engine_fixtures import TIE, Teacher, a_job, a_plan, greedy, shortfall

CONFIG = EngineConfig(max_sequences=32, kv_tokens=8_192, chunk_tokens=256)


class Heard:
    """What one attempt emitted. With `patience` tokens it cancels, as a reader of the loop would."""

    def __init__(self, patience: int | None = None) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.end: End | None = None
        self.enough = asyncio.Event()
        self._patience = patience

    def __call__(self, item: Item) -> None:
        assert self.end is None
        if isinstance(item, Delta):
            assert not item.raw
            self.text += item.text
            self.ids += item.token_ids
            if self._patience is not None and len(self.ids) >= self._patience:
                self.enough.set()
        elif isinstance(item, Done | Failed):
            self.end = item
            self.enough.set()


class EngineHost:
    def __init__(self, model_dir: Path, tokenizer: HfTokenizer) -> None:
        self.tokenizer = tokenizer
        self.runner = asyncio.Runner()
        self.worker = a_worker(model_dir, tokenizer)
        self.runner.run(self.worker.start())

    def close(self) -> None:
        self.runner.run(self.worker.close())
        self.runner.close()

    async def run(self, job: InferenceJob, cut_after: int | None = None) -> Heard:
        """One attempt, cancelled after this many tokens."""
        heard = Heard(cut_after)
        running = asyncio.create_task(self.worker.run(a_plan(job), heard))
        if cut_after is not None:
            await heard.enough.wait()
            await self.worker.cancel([job.job_id])
        await running
        return heard

    async def run_in_pieces(self, job: InferenceJob, cuts: list[int]) -> tuple[Heard, int]:
        """All attempts as one reader sees them, and how many there were."""
        whole, attempts = Heard(), 0
        for cut in [*cuts, None]:
            attempts += 1
            part = await self.run(job, cut)
            whole.text += part.text
            whole.ids += part.ids
            whole.end = part.end
            if isinstance(part.end, Done):
                break
            assert isinstance(part.end, Failed)
            assert isinstance(part.end.error, ClientClosed)
            resume_point = part.end.resume_point
            assert resume_point is not None
            assert resume_point.prompt_ids == job.payload.prompt_ids
            assert list(resume_point.output_ids) == whole.ids
            job = replace(job, attempt=job.attempt + 1, resume_point=resume_point)
        return whole, attempts


def a_worker(model_dir: Path, tokenizer: HfTokenizer) -> EmbeddedWorker:
    return EmbeddedWorker(
        "embedded",
        model_dir=model_dir,
        models=["tiny"],
        make_assembler=lambda stop: Assembler(tokenizer, stop),
        engine=CONFIG,
        restart_backoff_s=30.0,
    )


def a_plain_job(job_id: str, prompt: list[int], sampling: Sampling) -> InferenceJob:
    return replace(a_job(job_id, prompt, sampling=sampling), resume=ResumeMode.CONTINUE)


@pytest.fixture(scope="module")
def env(tiny_dir: Path, tokenizer: HfTokenizer) -> Iterator[EngineHost]:
    env = EngineHost(tiny_dir, tokenizer)
    yield env
    env.close()


def test_the_model_card_reports_continuation(env: EngineHost) -> None:
    assert [card.can_resume for card in env.worker.cards()] == [True]


@pytest.mark.parametrize("seed", range(8))
def test_a_job_interrupted_at_random_places_has_undisturbed_output(env: EngineHost, seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(7, 4096) for _ in range(rng.randint(3, 60))]
    job = a_plain_job("cut", prompt, greedy(60))

    async def scenario() -> None:
        alone = await env.run(job)
        cuts = [rng.randint(1, 12) for _ in range(rng.randint(1, 6))]
        attempts = 0
        for _ in range(50):  # the engine may finish before the first cut where this process has to wait for a core
            pieces, attempts = await env.run_in_pieces(job, cuts)
            assert pieces.ids == alone.ids
            assert pieces.text == alone.text == env.tokenizer.decode(alone.ids)
            assert isinstance(pieces.end, Done)
            assert pieces.end.finish is FinishReason.LENGTH
            if attempts > 1:
                break
        assert attempts > 1

    env.runner.run(scenario())


def test_a_constrained_job_meets_its_schema_across_its_attempts(env: EngineHost) -> None:
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 20, "maxItems": 20}
    constraint = Constraint("response_format", schema=json.dumps(schema))
    sampling = Sampling(temperature=1.0, seed=3, max_tokens=900, constraint=constraint)
    job = a_plain_job("constrained", [50, 60, 70], sampling)
    assert [card.can_resume_constrained for card in env.worker.cards()] == [True]

    async def scenario() -> None:
        alone = await env.run(job)
        assert len(json.loads(alone.text)) == 20
        attempts = 0
        for _ in range(50):  # the engine may finish before the first cut where this process has to wait for a core
            pieces, attempts = await env.run_in_pieces(job, [3, 5, 7])
            assert (pieces.ids, pieces.text) == (alone.ids, alone.text)
            assert isinstance(pieces.end, Done)
            assert pieces.end.finish is FinishReason.STOP
            if attempts > 1:
                break
        assert attempts > 1

    env.runner.run(scenario())


def test_a_stop_string_across_any_resume_point_is_found(env: EngineHost) -> None:
    prompt = (50, 60, 70)

    async def scenario() -> None:
        free = await env.run(a_plain_job("free", list(prompt), greedy(24)))
        middle = len(env.tokenizer.decode(free.ids[:14]))
        stop = free.text[middle - 14 : middle + 6]  # several tokens have a part in it
        job = a_plain_job("stopped", list(prompt), greedy(24, stop=("\x00", stop)))
        alone = await env.run(job)
        assert isinstance(alone.end, Done)
        assert alone.end.finish is FinishReason.STOP
        assert alone.text == free.text[: free.text.find(stop)]
        held_back = 0
        for cut in range(1, len(alone.ids)):
            before, _ = Assembler(env.tokenizer, ("\x00", stop)).push(alone.ids[:cut])
            held_back += before != env.tokenizer.decode(alone.ids[:cut])
            after = await env.run(replace(job, attempt=2, resume_point=ResumePoint(prompt, tuple(alone.ids[:cut]))))
            assert before + after.text == alone.text, f"cut after {cut}"
            assert alone.ids[:cut] + after.ids == alone.ids
            assert isinstance(after.end, Done)
            assert after.end.finish is FinishReason.STOP
        assert held_back > 1

    env.runner.run(scenario())


def test_half_a_character_is_completed_after_the_resume_point(env: EngineHost) -> None:
    """The reader got nothing of it before the cut, and gets all of it after."""
    text = "naïve — 漢字と 🦜🦜 ende"
    ids = env.tokenizer.encode(text)
    prompt = (5, 6, 7)

    async def scenario() -> None:
        for cut in range(1, len(ids)):
            before = Assembler(env.tokenizer).push(ids[:cut])[0]
            job = replace(
                a_plain_job("half", list(prompt), greedy(cut + 3)), resume_point=ResumePoint(prompt, tuple(ids[:cut]))
            )
            after = await env.run(job)
            assert len(after.ids) == 3
            assert before + after.text == env.tokenizer.decode([*ids[:cut], *after.ids])

    env.runner.run(scenario())


def test_a_seeded_job_draws_the_same_tokens_after_a_cut(env: EngineHost) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=42, max_tokens=40, ignore_eos=True)
    job = a_plain_job("seeded", [9, 8, 7, 6], sampling)

    async def scenario() -> None:
        alone = await env.run(job)
        pieces, attempts = await env.run_in_pieces(job, [5, 9])
        assert attempts == 3
        assert (pieces.ids, pieces.text) == (alone.ids, alone.text)

    env.runner.run(scenario())


def test_the_usage_of_a_later_attempt_is_its_own(env: EngineHost) -> None:
    job = replace(a_plain_job("use", [9, 8, 7, 6], greedy(20)), resume_point=ResumePoint((9, 8, 7, 6), (30, 31, 32)))

    async def scenario() -> None:
        heard = await env.run(job)
        assert isinstance(heard.end, Done)
        assert (heard.end.usage.prompt_tokens, heard.end.usage.output_tokens) == (7, 17)

    env.runner.run(scenario())


def test_a_job_that_had_written_all_it_may_ends_without_the_engine(env: EngineHost) -> None:
    ids = tuple(env.tokenizer.encode("漢"))[:-1]  # half a character is held back, and comes at the end
    full = replace(a_plain_job("full", [9, 8], greedy(len(ids))), resume_point=ResumePoint((9, 8), ids))
    too_long = replace(a_plain_job("long", [9, 8], greedy(20_000)), resume_point=ResumePoint((9, 8), (5,) * 8_192))

    async def scenario() -> None:
        for job in (full, too_long):
            heard = await env.run(job)
            assert heard.end == Done(job.job_id, FinishReason.LENGTH, Usage())
            assert heard.ids == []
        assert (await env.run(full)).text == env.tokenizer.decode(ids)

    env.runner.run(scenario())


def test_only_a_resumable_job_that_has_begun_reports_its_output(env: EngineHost) -> None:
    restarted = replace(a_plain_job("restarted", [9, 8], greedy(5_000)), resume=ResumeMode.RESTART)

    async def scenario() -> None:
        heard = await env.run(restarted, cut_after=3)
        assert isinstance(heard.end, Failed)
        assert heard.end.resume_point is None
        fresh = await env.run(a_plain_job("fresh", [5] * 600, greedy(5_000)), cut_after=0)
        assert isinstance(fresh.end, Failed)
        assert fresh.end.resume_point is None or list(fresh.end.resume_point.output_ids) == fresh.ids

    env.runner.run(scenario())


def test_cancel_returns_when_the_engine_has_confirmed_it_and_not_before(env: EngineHost) -> None:
    async def scenario() -> None:
        heard = Heard(patience=1)
        job = a_plain_job("slow", [1, 2, 3], greedy(5_000))
        running = asyncio.create_task(env.worker.run(a_plan(job), heard))
        await heard.enough.wait()
        assert env.worker.pid is not None
        os.kill(env.worker.pid, signal.SIGSTOP)
        try:
            cancelling = asyncio.create_task(env.worker.cancel(["slow"]))
            await asyncio.wait([cancelling], timeout=0.2)
            assert not cancelling.done()
            assert heard.end is None
        finally:
            os.kill(env.worker.pid, signal.SIGCONT)
        assert await cancelling == {"slow"}
        await running
        assert isinstance(heard.end, Failed)
        stats = env.worker.stats
        assert stats is not None
        assert (stats.running, stats.waiting, stats.kv_tokens) == (0, 0, 0)

    env.runner.run(scenario())


@asynccontextmanager
async def another_engine(model_dir: Path, tokenizer: HfTokenizer) -> AsyncIterator[EmbeddedWorker]:
    worker = a_worker(model_dir, tokenizer)
    await worker.start()
    yield worker
    await worker.close()


def test_jobs_of_a_killed_engine_resume_on_another(env: EngineHost, tiny_dir: Path, tokenizer: HfTokenizer) -> None:
    rng = random.Random(3)
    jobs = [
        a_plain_job(f"j{n}", [rng.randrange(7, 4096) for _ in range(rng.randint(2, 30))], greedy(100)) for n in range(8)
    ]

    async def scenario() -> None:
        alone = [await env.run(job) for job in jobs]
        teacher = Teacher(tiny_dir)
        async with another_engine(tiny_dir, tokenizer) as doomed:
            parts = [Heard(patience=rng.randint(1, 30)) for _ in jobs]
            running = [
                asyncio.create_task(doomed.run(a_plan(job), heard)) for job, heard in zip(jobs, parts, strict=True)
            ]
            await asyncio.gather(*(heard.enough.wait() for heard in parts))
            assert doomed.pid is not None
            os.kill(doomed.pid, signal.SIGKILL)
            await asyncio.gather(*running)
        lost = 0
        for job, before, orphaned in zip(jobs, parts, alone, strict=True):
            if isinstance(before.end, Done):
                continue
            assert isinstance(before.end, Failed)
            assert isinstance(before.end.error, WorkerLost)
            lost += 1
            after = await env.run(replace(job, attempt=2, resume_point=before.end.resume_point))
            ids = before.ids + after.ids
            assert before.text + after.text == tokenizer.decode(ids)
            prompt = job.payload.prompt_ids or ()
            # In company the sums are taken in another order: then one of two equally good tokens may be the other.
            assert ids == orphaned.ids or shortfall(teacher.logits([*prompt, *ids]), prompt, ids) <= TIE
        assert lost

    env.runner.run(scenario())


def test_a_token_whose_text_was_delivered_in_part_is_not_delivered_twice(env: EngineHost) -> None:
    """Part of its last token's text may be held back for a stop string: what goes on knows which."""

    async def scenario() -> None:
        prompt = [50, 60, 70]
        free = await env.run(a_plain_job("free", prompt, greedy(24)))
        parted = 0
        for cut in range(2, 12):
            text = env.tokenizer.decode(free.ids[:cut])
            stop = text[-1] + "\x00"
            job = a_plain_job(f"parted-{cut}", prompt, greedy(24, stop=(stop,)))
            live = LiveJob(1, job, lambda item: None, PlanCompletion(1))
            live.output_ids = list(free.ids[:cut])
            resume_point = live.resume_point(lambda stops: Assembler(env.tokenizer, stops))
            assert resume_point is not None
            before, _ = Assembler(env.tokenizer, (stop,)).push(free.ids[:cut])
            parted += len(before) > len(env.tokenizer.decode(free.ids[: cut - 1]))
            after = await env.run(replace(job, attempt=2, resume_point=resume_point))
            assert before + after.text == free.text, f"cut after {cut}"
        assert parted

    env.runner.run(scenario())
