"""Log probabilities of a job that is interrupted and resumed: one entry for each token, as of an undisturbed one."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Done, Failed, Item
from inferry.domain.values import replace
from inferry.engine.config import EngineConfig
from inferry.engine.tokenizer import HfTokenizer, HfTokenTexts
from inferry.ingress.openai.collect import collect_events
from inferry.ingress.openai.render import ContinuationWriter
from inferry.streams.detokenizer import Assembler
from inferry.workers.in_process.embedded import EmbeddedWorker
from inferry.workers.in_process.logprobs_writer import TokenTexts
from inferry.workers.in_process.output_formats import OutputFormats
from support.engine_fixtures import a_job, a_plan


class Reader:
    """What one attempt emitted. It is cancelled after `patience` tokens."""

    def __init__(self, patience: int | None) -> None:
        self.raw, self.tokens = b"", 0
        self.end: Done | Failed | None = None
        self.enough = asyncio.Event()
        self._patience = patience

    def __call__(self, item: Item) -> None:
        if isinstance(item, Delta):
            assert not item.text
            self.raw += item.raw
            self.tokens += item.tokens
        elif isinstance(item, Done | Failed):
            self.end = item
        if self.end is not None or (self._patience is not None and self.tokens >= self._patience):
            self.enough.set()


class Host:
    def __init__(self, model_dir: Path, tokenizer: HfTokenizer) -> None:
        self.runner = asyncio.Runner()
        texts = HfTokenTexts(tokenizer)
        self.worker = EmbeddedWorker(
            "embedded",
            model_dir=model_dir,
            models=["tiny"],
            make_assembler=lambda stop: Assembler(tokenizer, stop),
            formats=OutputFormats(token_texts=TokenTexts(texts.text, lambda: Assembler(texts))),
            engine=EngineConfig(max_sequences=8, kv_tokens=8_192, chunk_tokens=256),
        )
        self.runner.run(self.worker.start())

    async def answer(self, job: InferenceJob, cuts: list[int]) -> tuple[dict[str, Any], int]:
        """The choice of all attempts as one client sees them, and how many there were."""
        raw, attempts = b"", 0
        for cut in [*cuts, None]:
            attempts += 1
            reader = Reader(cut)
            running = asyncio.create_task(self.worker.run(a_plan(job), reader))
            await reader.enough.wait()
            if cut is not None:
                await self.worker.cancel([job.job_id])
            await running
            raw += reader.raw
            if isinstance(reader.end, Done):
                if job.resume_point is not None:
                    raw += ContinuationWriter(raw).finish(reader.end)
                break
            assert isinstance(reader.end, Failed)
            assert reader.end.resume_point is not None
            job = replace(job, attempt=job.attempt + 1, resume_point=reader.end.resume_point)
        (choice,) = collect_events(raw, b"")["choices"]
        return choice, attempts


@pytest.fixture(scope="module")
def host(tiny_dir: Path, tokenizer: HfTokenizer) -> Iterator[Host]:
    host = Host(tiny_dir, tokenizer)
    yield host
    host.runner.run(host.worker.close())
    host.runner.close()


def a_call(api: Any, seed: int, *, stop: tuple[str, ...] = ()) -> InferenceJob:
    rng = random.Random(seed)
    # Of random tokens many are halves of characters.
    sampling = Sampling(temperature=2.0, seed=seed, max_tokens=40, ignore_eos=True, logprobs=2, stop=stop)
    job = a_job("cut", [rng.randrange(7, 4096) for _ in range(9)], sampling=sampling)
    return replace(job, resume=ResumeMode.CONTINUE, payload=replace(job.payload, api=api))


def values_of(choice: dict[str, Any]) -> list[float]:
    found = choice["logprobs"]
    return [one["logprob"] for one in found["content"]] if "content" in found else found["token_logprobs"]


def texts_of(choice: dict[str, Any]) -> Any:
    """The text of the answer, those of its tokens, and where they begin."""
    found = choice["logprobs"]
    if "content" in found:
        return choice["message"], [one["token"] for one in found["content"]]
    return choice["text"], found["tokens"], found["text_offset"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("stop", [(), ("\x00never in it",)])
def test_no_entry_is_lost_or_repeated(host: Host, api: Any, seed: int, stop: tuple[str, ...]) -> None:
    job = a_call(api, seed, stop=stop)
    assert [card.can_resume_logprobs for card in host.worker.cards()] == [True]

    async def scenario() -> None:
        alone, _ = await host.answer(job, [])
        attempts = 0
        for _ in range(50):  # the engine may finish before the first cut where this process has to wait for a core
            pieces, attempts = await host.answer(job, [3, 5, 1])
            assert len(values_of(pieces)) == 40
            assert values_of(pieces) == pytest.approx(values_of(alone), abs=1e-4)
            assert texts_of(pieces) == texts_of(alone)
            if attempts > 1:
                break
        assert attempts > 1

    host.runner.run(scenario())
