"""One calibration against a live engine: query it, warm it up, and probe it until the time is used up.

Probes that would exceed the time limit are left out; the probe in progress at the limit is dropped.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime

from msgspec import Struct

from inferry._version import __version__
from inferry.domain.values import replace
from inferry.loadgen.prober import Prober
from inferry.loadgen.probes import (
    MAX_PROMPT_TOKENS,
    MAX_SEQUENCES,
    STEADY_TOKENS,
    PaceEstimate,
    Probe,
    ProbeLimits,
    schedule,
    warm_up,
)
from inferry.loadgen.server import CACHE, NoSuchModel, ProbeError, Refused, Server
from inferry.sim.costs import EngineFlags
from inferry.sim.observations import Conditions, Flag, Observation

MAX_ROUNDS = 3
MIN_CONCURRENCY = 8
"""Minimum burst size, even for a slow engine: fewer calls do not show the cost of a burst."""
MAX_CLIENT_CPU = 0.8
_RUNNING = "vllm:num_requests_running"
_GENERATED = "vllm:generation_tokens_total"
_MAX_FAILURES = 5

OnProgress = Callable[[str, float], None]
"""Gets the name of the probe and the fraction of the time that is used up."""


class CalibrationOptions(Struct, frozen=True, kw_only=True):
    """The options of a calibration. None: not given."""

    model: str | None = None
    seconds: float = 60.0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_tokens: int | None = None
    block_tokens: int | None = None


async def observe(
    server: Server, options: CalibrationOptions, on_progress: OnProgress
) -> tuple[Conditions, list[Observation]]:
    """Probe the engine for the given time. Raises ProbeError if nothing could be observed."""
    on_progress("what is served", 0.0)
    models = await server.models()
    model = _choose_model(models, options.model, server.url)
    version = await server.version()
    idle = await server.metrics()
    session = _Session(server, Prober(server, model), options, models[model], idle, on_progress)
    await session.run()
    conditions = Conditions(
        url=server.url,
        model=model,
        server=" ".join(("vLLM" if idle else "", version or "")).strip() or "unknown",
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        inferry=__version__,
        seconds=round(session.used_s, 1),
        flags=session.flags,
        max_model_len=models[model],
        prompts="token ids" if session.prober.form.ids else "text",
        request_fields=session.prober.form.fields,
        warm_up_calls=session.warm_up_calls,
        left_out=session.left_out,
        warnings=tuple(session.warnings),
    )
    return conditions, session.observations


class _Session:
    """Runs the probes of one calibration."""

    def __init__(
        self,
        server: Server,
        prober: Prober,
        options: CalibrationOptions,
        context_tokens: int | None,
        idle: dict[str, float],
        on_progress: OnProgress,
    ) -> None:
        self.prober = prober
        self.observations: list[Observation] = []
        self.warnings: list[str] = []
        self.warm_up_calls = 0
        self.left_out = 0
        self.used_s = 0.0
        self.flags = _flags(options, idle)
        self._server = server
        self._options = options
        self._context_tokens = context_tokens
        self._on_progress = on_progress
        self._pace_estimate = PaceEstimate()
        self._began = 0.0
        self._failures = 0
        if idle.get(_RUNNING):
            self._warn(f"the engine was busy with {idle[_RUNNING]:.0f} requests of others: figures will be too high")

    async def run(self) -> None:
        self._on_progress("which requests the server takes", 0.0)
        await self.prober.negotiate()
        self._began = time.perf_counter()
        try:
            async with asyncio.timeout(self._options.seconds):
                limits = await self._warm_up()
                for number in range(MAX_ROUNDS):
                    if not await self._round(limits, number):
                        break
        except TimeoutError:
            pass  # the time is used up; the observations so far count
        self.used_s = time.perf_counter() - self._began
        if not self.observations:
            raise ProbeError(f"not one probe was over within {self._options.seconds:g} s: give it more with --seconds")

    async def _warm_up(self) -> ProbeLimits:
        seconds = self._options.seconds
        max_prompt = MAX_PROMPT_TOKENS
        if self._context_tokens is not None:
            max_prompt = min(max_prompt, self._context_tokens - 2 * STEADY_TOKENS)
        known = {name: flag.value for name, flag in self.flags.items() if flag.source != "assumed"}
        limits = ProbeLimits(
            prompt_tokens=max(64, max_prompt),
            sequences=min(MAX_SEQUENCES, known.get("max_num_seqs", MAX_SEQUENCES)),
            kv_tokens=known.get("kv_tokens"),
            context_tokens=self._context_tokens,
            chunk_tokens=self.flags["max_num_batched_tokens"].value,
        )
        max_calls = 0
        for probe in warm_up(limits):
            if self._pace_estimate.expected_s(probe) > seconds / 8:
                continue
            self._on_progress(f"warming up: {probe.description}", self._used)
            seen = await self.prober.run(probe)
            self.warm_up_calls += len(seen.calls)
            self._record(probe, seen)
            max_calls = max(max_calls, probe.sequences)
        affordable_prompt = seconds / 12 / max(1e-9, self._pace_estimate.prompt_token_s)
        affordable_sequences = (
            max_calls * seconds / 10 / (STEADY_TOKENS * max(1e-9, self._pace_estimate.itl_s(max_calls)))
        )
        return replace(
            limits,
            prompt_tokens=max(64, min(limits.prompt_tokens, int(affordable_prompt))),
            sequences=min(limits.sequences, max(MIN_CONCURRENCY, int(affordable_sequences))),
        )

    async def _round(self, limits: ProbeLimits, number: int) -> bool:
        """One round of probes; whether anything was probed in it."""
        probed = False
        for probe in schedule(limits):
            remaining_s = self._options.seconds * (1 - self._used)
            if self._pace_estimate.expected_s(probe) > remaining_s:
                self.left_out += number == 0
                continue
            self._on_progress(probe.description, self._used)
            try:
                seen = await self.prober.run(probe)
            except Refused as error:
                self._failures += 1
                if self._failures > _MAX_FAILURES or not self.observations:
                    raise
                self._warn(f"{probe.description}: {error}")
                continue
            probed = True
            self._record(probe, seen)
            self.observations.append(seen)
            self._detect_other_load(probe, seen)
        return probed

    def _record(self, probe: Probe, seen: Observation) -> None:
        calls = seen.calls[: probe.sequences]
        if probe.kind == "prefill":
            self._pace_estimate.record_prompt(calls[0].prompt_tokens, calls[0].first_s)
        itls = [call.itl_s for call in calls if call.itl_s is not None]
        if probe.kind in ("prefill", "decode") and itls:
            self._pace_estimate.record_itl(probe.sequences, statistics.median(itls))

    def _detect_other_load(self, probe: Probe, seen: Observation) -> None:
        own_tokens = sum(call.output_tokens for call in seen.calls)
        generated = seen.engine.get(_GENERATED, 0.0)
        if generated > 1.02 * own_tokens + 8:
            self._warn("the engine also worked for others meanwhile: figures will be too high")
        if seen.client_busy > MAX_CLIENT_CPU and probe.sequences > 1:
            busy = f"this process was busy {seen.client_busy:.0%} of the time"
            self._warn(f"{probe.description}: {busy}, so that it measured itself too")
        early = sum(call.output_tokens < probe.output_tokens for call in seen.calls[: probe.sequences])
        if early > len(seen.calls) / 10:
            self._warn(
                "the server ends answers early although it was told not to: inter-token latencies are of what came"
            )

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    @property
    def _used(self) -> float:
        return min(1.0, (time.perf_counter() - self._began) / self._options.seconds)


def _choose_model(models: dict[str, int | None], requested: str | None, url: str) -> str:
    if not models:
        raise NoSuchModel(f"{url} serves no model")
    if requested is None:
        if len(models) > 1:
            raise NoSuchModel(f"{url} serves several models; name one with --model: {', '.join(sorted(models))}")
        return next(iter(models))
    if requested not in models:
        raise NoSuchModel(f"{url} does not serve {requested!r}; it serves {', '.join(sorted(models))}")
    return requested


def _flags(options: CalibrationOptions, idle: dict[str, float]) -> dict[str, Flag]:
    """The engine's flags: as given, else as the engine reports them, else usual values."""
    usual = EngineFlags()
    block = int(idle.get(f"{CACHE}/block_size", 0))
    reported = {"kv_tokens": block * int(idle.get(f"{CACHE}/num_gpu_blocks", 0)), "block_tokens": block}
    given = {
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "kv_tokens": options.kv_tokens,
        "block_tokens": options.block_tokens,
    }
    flags = {}
    for name in ("max_num_seqs", "max_num_batched_tokens", "kv_tokens", "block_tokens"):
        value = given[name]
        if value is not None:
            flags[name] = Flag(value, "given")
        elif reported.get(name):
            flags[name] = Flag(reported[name], "told by the engine")
        else:
            flags[name] = Flag(getattr(usual, name), "assumed")
    return flags
