"""A sweep over concurrency: closed loop, one level after the other, with a warm-up at each.

At a level, as many clients as its concurrency send one call at a time. The warm-up ends when `warmup_s` have passed and
as many calls have ended as there are clients. The level ends when its least time has passed and enough calls have ended
after the warm-up; calls in progress then complete. Everything belongs to one event loop.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from uuid import uuid4

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.loadgen.gpu_utilisation import GpuSource, GpuWatch, find_source
from inferry.loadgen.load_generator import Call, LoadGenerator
from inferry.loadgen.load_test import (
    PROGRESS_INTERVAL_S,
    LoadTest,
    Progress,
    StopHook,
    client_versions,
    context_limit,
    plain_settings,
)
from inferry.loadgen.requests import RequestMaker
from inferry.loadgen.server import Server, redacted_url
from inferry.loadgen.sweep_result import LevelFigures, SweepResult, level_figures, saturated_at, ttft_missed_at
from inferry.loadgen.target import Target, open_target
from inferry.loadgen.traffic import EmptyLoad, TrafficOptions, fit_to_context
from inferry.sim.arrivals import single_call_run, uniform_lengths
from inferry.sim.calls import Run
from inferry.sim.rng import named_rng

DEFAULT_LEVEL_S = 10.0


class Sweep(Struct, frozen=True, kw_only=True):
    """The options of a sweep. `min_calls`: least calls of a level that end after its warm-up.

    The load test's traffic says the lengths, lane and tenants of calls, and `seconds` the least time of a level.
    """

    test: LoadTest
    levels: tuple[int, ...]
    min_calls: int = 20

    @property
    def level_s(self) -> float:
        return self.test.traffic.seconds or DEFAULT_LEVEL_S


class SweepProgress(Struct, frozen=True):
    """Progress of a level, or, with `figures`, its result."""

    concurrency: int
    number: int
    levels: int
    progress: Progress
    figures: LevelFigures | None = None


OnSweepProgress = Callable[[SweepProgress], None]


async def run_sweep(sweep: Sweep, key: str | None, on_progress: OnSweepProgress, install_stop: StopHook) -> SweepResult:
    """Raises ProbeError if the server cannot be used, and EmptyLoad for options that give no load.

    `install_stop` gets the function that stops the sweep early; what was measured is kept, and the result is partial.
    A level at which no call is answered ends the sweep.
    """
    test, lane = sweep.test, _lane(sweep.test.traffic)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    async with open_target(test.url, test.model, key, test.request_metadata, test.prompts) as (client, target):
        server = Server(test.url, key)
        try:
            source = await find_source(test.url, server)
            setup = _Setup(sweep, lane, target, test.salt or uuid4().hex, source, started)
            requests = RequestMaker(client, target.model, target.form, test.request_metadata, setup.salt)
            stop = _Stop()
            install_stop(stop)
            levels: list[LevelFigures] = []
            failures: dict[str, str] = {}
            for concurrency in sweep.levels:
                stop.generator = LoadGenerator(client, requests, test.limits, test.traffic.seed)
                figures = await _measure(_Level(setup, concurrency, stop.generator), source, on_progress)
                _note_failures(stop.generator.calls, failures)
                if figures is not None:
                    levels.append(figures)
                if stop.is_called or figures is None or not figures.done:
                    break
            return _result(setup, levels, failures, is_partial=stop.is_called)
        finally:
            server.close()


class _Setup(Struct, frozen=True):
    """What is the same at every level."""

    sweep: Sweep
    lane: Lane
    target: Target
    salt: str
    source: GpuSource | None
    started: str


class _Stop:
    """Stops the level in progress and those after it."""

    def __init__(self) -> None:
        self.is_called = False
        self.generator: LoadGenerator | None = None

    def __call__(self) -> None:
        self.is_called = True
        if self.generator is not None:
            self.generator.stop()


class _Level:
    """One level in progress. Its runs are taken by clients, and end when the level is over."""

    def __init__(self, setup: _Setup, concurrency: int, generator: LoadGenerator) -> None:
        self.generator = generator
        self.concurrency = concurrency
        self.began: float | None = None
        self.ended: float | None = None
        self.is_warm = asyncio.Event()
        self._sweep = setup.sweep
        self._lane = setup.lane
        self._context_tokens = context_limit(setup.sweep.test, setup.target)
        self._ended_before = 0

    @property
    def least_calls(self) -> int:
        """Calls that must end after the warm-up."""
        return max(self._sweep.min_calls, self.concurrency)

    def progress(self, figures: LevelFigures | None = None) -> SweepProgress:
        generator = self.generator
        elapsed_s = time.perf_counter() - generator.began
        calls = Progress(generator.counters, elapsed_s, self._sweep.level_s, self.concurrency + self.least_calls)
        number = self._sweep.levels.index(self.concurrency) + 1
        return SweepProgress(self.concurrency, number, len(self._sweep.levels), calls, figures)

    def runs(self) -> Iterator[Run]:
        traffic = self._sweep.test.traffic
        # The level is part of the name: no two levels send the same prompt.
        name = f"sweep-{self.concurrency}"
        rng, lengths = named_rng(traffic.seed, name), uniform_lengths(traffic.prompt_tokens, traffic.output_tokens)
        number = 0
        while not self._is_over(time.perf_counter()):
            at = time.perf_counter() - self.generator.began
            run = single_call_run(f"{name}-{number}", rng.choice(traffic.tenants), self._lane, at, lengths(rng))
            yield fit_to_context([run], self._context_tokens)[0][0]
            number += 1

    def _is_over(self, now: float) -> bool:
        if self.ended is not None:
            return True
        ended = len(self.generator.run_records)
        if self.began is None:
            if now - self.generator.began >= self._sweep.test.warmup_s and ended >= self.concurrency:
                self.began, self._ended_before = now, ended
                self.is_warm.set()
        elif now - self.began >= self._sweep.level_s and ended - self._ended_before >= self.least_calls:
            self.ended = now
        return self.ended is not None


async def _measure(level: _Level, source: GpuSource | None, on_progress: OnSweepProgress) -> LevelFigures | None:
    """The figures of a level; None if it was stopped during its warm-up."""
    generator, watch = level.generator, GpuWatch(source)
    cpu: list[float] = []

    async def report_progress() -> None:
        while True:
            on_progress(level.progress())
            await asyncio.sleep(PROGRESS_INTERVAL_S)

    async def watch_gpus() -> None:
        await level.is_warm.wait()
        cpu.append(time.process_time())
        await watch.run()

    gc.collect()
    gc.freeze()  # a garbage collection of long-lived objects would count as server time
    tasks = [asyncio.create_task(report_progress()), asyncio.create_task(watch_gpus())]
    try:
        await generator.play_closed(level.runs(), level.concurrency)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gc.unfreeze()
    if level.began is None:
        return None
    now = time.perf_counter()
    figures = level_figures(
        level.concurrency,
        generator.calls,
        (level.began, now if level.ended is None else level.ended),
        gpu_utilisation=watch.mean,
        client_cpu=(time.process_time() - cpu[0]) / max(now - level.began, 1e-3) if cpu else 0.0,
        partial=level.ended is None,
    )
    on_progress(level.progress(figures))
    return figures


def _lane(traffic: TrafficOptions) -> Lane:
    lanes = [lane for lane, part in traffic.lanes.items() if part]
    if len(lanes) != 1:
        raise EmptyLoad("--sweep measures one lane: --lane P0, P1 or P2")
    return lanes[0]


def _note_failures(calls: list[Call], failures: dict[str, str]) -> None:
    for call in calls:
        if call.detail and call.outcome not in ("done", "cancelled"):
            failures.setdefault(call.outcome, call.detail)


def _result(setup: _Setup, levels: list[LevelFigures], failures: dict[str, str], *, is_partial: bool) -> SweepResult:
    sweep, test, traffic = setup.sweep, setup.sweep.test, setup.sweep.test.traffic
    ttft_s = test.slo_targets[setup.lane].ttft_s
    prompt, output = map(_range_text, (traffic.prompt_tokens, traffic.output_tokens))
    settings = {"levels": sweep.levels, "level_s": sweep.level_s, "min_calls": sweep.min_calls}
    return SweepResult(
        label=test.label,
        workload=f"prompts of {prompt} tokens, outputs of {output} tokens",
        command=test.command,
        at=setup.started,
        partial=is_partial,
        url=redacted_url(test.url),
        server=setup.target.server,
        model=setup.target.model,
        lane=setup.lane.name,
        versions=client_versions(),
        settings={**plain_settings(test, setup.target, setup.salt), **settings, "warmup_s": test.warmup_s},
        ttft_target_s=ttft_s,
        gpu_source=None if setup.source is None else setup.source.name,
        failures=failures,
        levels=tuple(levels),
        saturated_at=saturated_at(levels),
        ttft_missed_at=ttft_missed_at(levels, ttft_s),
    )


def _range_text(span: tuple[int, int]) -> str:
    low, high = span
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"  # noqa: RUF001
