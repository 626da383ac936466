"""The embedded engine: concurrent against sequential calls, one call against transformers, steps, first tokens.

`python -m benchmarks.engine` prints a table; `measure()` returns the same figures. Compared arms alternate within one
process and run, so that a busy machine slows both.
"""

import asyncio
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Item
from inferry.engine.bundled import BUNDLED_DIRECTORY, BUNDLED_MODEL
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.runner import TorchRunner, set_threads
from inferry.engine.tokenizer import HfTokenizer
from inferry.streams.detokenizer import Assembler
from inferry.workers.in_process.embedded import EmbeddedWorker

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64
CONCURRENT = 32
REPETITIONS = 5
BATCHES = (1, 8, 32, 64)
LIVE_PROMPT_TOKENS = 200
BACKGROUND = 60
TTFT_SAMPLES = 15


def measure(repetitions: int = REPETITIONS, directory: Path = BUNDLED_DIRECTORY) -> dict[str, object]:
    """All figures of one run. Seconds are medians over the repetitions, each with its own prompts."""
    threads = set_threads(None)
    return {
        "threads": threads,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "repetitions": repetitions,
        "load_average": os.getloadavg()[0],
        **asyncio.run(_measure_worker(directory, repetitions)),
        "step_ms": {
            f"prompts of {low} to {high}": {str(batch): _step_ms(directory, batch, low, high) for batch in BATCHES}
            for low, high in ((30, 30), (100, 500))
        },
    }


async def _measure_worker(directory: Path, repetitions: int) -> dict[str, object]:
    tokenizer = HfTokenizer(directory)
    worker = EmbeddedWorker(
        "bench", model_dir=directory, models=[BUNDLED_MODEL], make_assembler=lambda stop: Assembler(tokenizer, stop)
    )
    await worker.start()
    try:
        transformers_generate = _transformers_generate(directory)
        return {
            "concurrency": await _concurrency(worker, repetitions),
            "one_call": await _single_call(worker, transformers_generate, repetitions),
            "live_first_token": await _first_tokens(worker),
        }
    finally:
        await worker.close()


async def _concurrency(worker: EmbeddedWorker, repetitions: int) -> dict[str, object]:
    """Output tokens per second of concurrent calls, and of the same calls in sequence."""
    concurrent: list[float] = []
    sequential: list[float] = []
    for seed in range(repetitions):
        rng = random.Random(seed)
        prompts = [_prompt(rng, PROMPT_TOKENS) for _ in range(CONCURRENT)]
        started = time.perf_counter()
        await asyncio.gather(*(_call(worker, prompt, OUTPUT_TOKENS) for prompt in prompts))
        concurrent.append(CONCURRENT * OUTPUT_TOKENS / (time.perf_counter() - started))
        started = time.perf_counter()
        for prompt in prompts:
            await _call(worker, prompt, OUTPUT_TOKENS)
        sequential.append(CONCURRENT * OUTPUT_TOKENS / (time.perf_counter() - started))
    return {
        "calls": CONCURRENT,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "at_once_tokens_per_s": statistics.median(concurrent),
        "in_turn_tokens_per_s": statistics.median(sequential),
        "ratio": statistics.median(a / b for a, b in zip(concurrent, sequential, strict=True)),
        "lowest_ratio": min(a / b for a, b in zip(concurrent, sequential, strict=True)),
    }


async def _single_call(
    worker: EmbeddedWorker, transformers_generate: Callable[[list[int], int], None] | None, repetitions: int
) -> dict[str, object]:
    """One greedy call alone: through the worker and its process, and with transformers in this process."""
    engine_s: list[float] = []
    transformers_s: list[float] = []
    for seed in range(repetitions + 1):
        prompt = _prompt(random.Random(1_000 + seed), PROMPT_TOKENS)
        started = time.perf_counter()
        await _call(worker, prompt, OUTPUT_TOKENS)
        engine_s.append(time.perf_counter() - started)
        if transformers_generate is not None:
            started = time.perf_counter()
            transformers_generate(prompt, OUTPUT_TOKENS)
            transformers_s.append(time.perf_counter() - started)
    engine_s, transformers_s = engine_s[1:], transformers_s[1:]  # the first of each warms up
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "ours_s": statistics.median(engine_s),
        "transformers_s": statistics.median(transformers_s) if transformers_s else None,
        "speedup": statistics.median(b / a for a, b in zip(engine_s, transformers_s, strict=True))
        if transformers_s
        else None,
    }


async def _first_tokens(worker: EmbeddedWorker) -> dict[str, object]:
    """TTFT of a live call in milliseconds, on an idle engine and on one full of batch work."""
    rng = random.Random(7)
    idle = [await _first_token_ms(worker, _prompt(rng, LIVE_PROMPT_TOKENS)) for _ in range(TTFT_SAMPLES)]
    background = [
        asyncio.create_task(_call(worker, _prompt(rng, rng.randint(20, 200)), 900, Lane.P2, f"background-{number}"))
        for number in range(BACKGROUND)
    ]
    while worker.stats is None or worker.stats.running < BACKGROUND:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    loaded: list[float] = []
    for _ in range(TTFT_SAMPLES):
        await asyncio.sleep(rng.uniform(0.02, 0.1))  # at a random time within a step, not always at its end
        loaded.append(await _first_token_ms(worker, _prompt(rng, LIVE_PROMPT_TOKENS)))
    await worker.cancel([f"background-{number}" for number in range(BACKGROUND)])
    await asyncio.gather(*background)
    return {
        "prompt_tokens": LIVE_PROMPT_TOKENS,
        "background_sequences": BACKGROUND,
        "idle_ms": statistics.median(idle),
        "crowded_ms": statistics.median(loaded),
        "crowded_worst_ms": max(loaded),
        "ratio": statistics.median(loaded) / statistics.median(idle),
    }


async def _first_token_ms(worker: EmbeddedWorker, prompt: list[int]) -> float:
    started = time.perf_counter()
    first: list[float] = []
    await _call(worker, prompt, 2, Lane.P0, on_token=lambda: first.append(time.perf_counter() - started))
    return first[0] * 1000


def _step_ms(directory: Path, batch: int, low: int, high: int) -> dict[str, float]:
    """The engine core without process or text: a decode step, and steps with a live prompt added."""
    config = EngineConfig()
    core = EngineCore(TorchRunner.load(directory, config), config)
    rng = random.Random(batch)
    for key in range(batch - 1):
        core.add(_request(key, _prompt(rng, rng.randint(low, high)), 4_000, Lane.P2))
    # One slot belongs to a live sequence, so that the prompts below find one.
    core.add(_request(batch, _prompt(rng, rng.randint(low, high)), 4_000, Lane.P1))
    while len(core.step().tokens) < batch:
        pass
    decode = [_timed_ms(core.step) for _ in range(40)]
    with_prompt: dict[bool, list[float]] = {True: [], False: []}
    if batch < config.max_sequences:
        for number in range(10):
            core.add(_request(1_000 + number, _prompt(rng, LIVE_PROMPT_TOKENS), 1, Lane.P0))
            # Batch work is held back in every other step with a live prompt, so both kinds alternate.
            elapsed = _timed_ms(core.step)
            with_prompt[number % 2 == 0].append(elapsed)
    result = {"decode": statistics.median(decode), "decode_fastest": min(decode)}
    if batch < config.max_sequences:
        result["with_live_prompt"] = statistics.median(with_prompt[False])
        result["with_live_prompt_batch_held_back"] = statistics.median(with_prompt[True])
    return result


def _timed_ms(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


def _transformers_generate(directory: Path) -> Callable[[list[int], int], None] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers import AutoModelForCausalLM
        except ImportError:
            return None
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def generate(prompt: list[int], tokens: int) -> None:
        with torch.inference_mode():
            model.generate(torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    return generate


async def _call(
    worker: EmbeddedWorker,
    prompt: list[int],
    tokens: int,
    lane: Lane = Lane.P1,
    job_id: str = "",
    on_token: Callable[[], None] | None = None,
) -> None:
    def emit(item: Item) -> None:
        if on_token is not None and isinstance(item, Delta):
            on_token()

    job = _job(job_id or f"call-{id(prompt)}", prompt, tokens, lane)
    plan = BatchPlan(plan_id=1, worker=worker.name, jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)
    await worker.run(plan, emit)


def _job(job_id: str, prompt: list[int], tokens: int, lane: Lane) -> InferenceJob:
    route = RouteKey(BUNDLED_MODEL)
    return InferenceJob(
        job_id=job_id,
        tenant="bench",
        run_id="bench",
        step_id=job_id,
        lane=lane,
        is_batch=lane is Lane.P2,
        route=route,
        batch_key=BatchKey(route),
        footprint=Footprint(*map(Estimate.exactly, (len(prompt), 0, tokens))),
        token_budget=tokens,
        prompt_hash="",
        arrived_at=0.0,
        max_wait_s=0.0,
        payload=Payload(api="completions", body=b"", sampling=_greedy(tokens), prompt_ids=tuple(prompt)),
    )


def _request(key: int, prompt: list[int], tokens: int, lane: Lane) -> Request:
    return Request(key, prompt, _greedy(tokens), lane, is_batch=lane is Lane.P2)


def _greedy(tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(7, 3_072) for _ in range(tokens)]


def report(measured: dict[str, object]) -> Table:
    """The figures as a table."""
    table = Table("what", "value", title="embedded engine")

    def rows(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                rows(f"{prefix} {name}".strip(), inner)
        else:
            table.add_row(prefix.replace("_", " "), f"{value:,.2f}" if isinstance(value, float) else str(value))

    rows("", measured)
    return table


if __name__ == "__main__":
    Console().print(report(measure()))
