"""Measures steps of a runner: their time, and the time of their kernels by torch.profiler.

A step is repeated as it is, so that every repeat computes the same. On a GPU the next step is launched before the last
one is collected, as the engine does.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import count
from random import Random

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from inferry.domain.sampling import Sampling
from inferry.engine.planner import Work
from inferry.engine.profiling.kernels import seconds_by_class
from inferry.engine.profiling.roofline import Piece
from inferry.engine.runners import BlockingSteps, OverlappingRunner, Runner
from inferry.engine.sequences import Sequence as EngineSequence

WARM_UP_STEPS = 3
MAX_PROFILED_STEPS = 5


def work_of(pieces: Sequence[Piece], block_tokens: int, vocab_size: int) -> list[Work]:
    """Work with these pieces, each of a sequence with blocks of its own."""
    rng, blocks = Random(0), count()  # noqa: S311 - repeatable, not secret
    work = []
    for key, piece in enumerate(pieces):
        end = piece.computed + piece.tokens
        # A sequence with more tokens than are computed is not sampled from.
        tokens = [rng.randrange(vocab_size) for _ in range(end + (not piece.is_sampled))]
        sequence = EngineSequence(
            key, tokens, sampling=Sampling(temperature=0.0), lane=0, arrival=key, limit=len(tokens) + 1
        )
        sequence.computed = piece.computed
        sequence.blocks = [next(blocks) for _ in range(-(-end // block_tokens))]
        work.append(Work(sequence, piece.tokens))
    return work


def blocks_of(pieces: Sequence[Piece], block_tokens: int) -> int:
    return sum(-(-(piece.computed + piece.tokens) // block_tokens) for piece in pieces)


def measure_step(runner: Runner, work: Sequence[Work], steps: int) -> tuple[float, dict[str, float]]:
    """Median seconds of a step without a profiler, and these seconds by class of kernels."""
    for _ in _repeat(runner, work, WARM_UP_STEPS):
        pass
    step_s = statistics.median(_repeat(runner, work, steps))
    return step_s, seconds_by_class(_kernels(runner, work, min(steps, MAX_PROFILED_STEPS)), step_s)


def _repeat(runner: Runner, work: Sequence[Work], steps: int) -> Iterator[float]:
    """Seconds from the end of each step to the end of the next. One more step is computed than is measured."""
    launched = runner if isinstance(runner, OverlappingRunner) else BlockingSteps(runner)
    launched.launch(work)
    last = time.perf_counter()
    for _ in range(steps):
        launched.launch(work)
        launched.collect()
        now = time.perf_counter()
        yield now - last
        last = now
    launched.collect()


def _kernels(runner: Runner, work: Sequence[Work], steps: int) -> list[tuple[str, float]]:
    """Names and seconds of the kernels of a step: CUDA kernels, or operators of the CPU without those they call."""
    is_cuda = isinstance(runner, OverlappingRunner) and torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        for _ in _repeat(runner, work, steps):
            pass
    if is_cuda:
        kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
        spent = [(event.name, event.time_range.end - event.time_range.start) for event in kernels]
    else:
        spent = [(event.key, event.self_cpu_time_total) for event in profiler.key_averages()]
    return [(name, microseconds / 1e6 / (steps + 1)) for name, microseconds in spent]
