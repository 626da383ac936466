"""One calibration against a live engine: ask what it is, warm it up, probe it until the time is used up.

The time limit is kept by leaving out what would not fit and by dropping the probe under way when it has come.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime

from msgspec import Struct

from inferry._version import __version__
from inferry.bench.probe import Prober
from inferry.bench.probes import LARGEST_PROMPT, MOST_SEQUENCES, STEADY_TOKENS, Pace, Probe, Reach, schedule, warm_up
from inferry.bench.target import CACHE, NoSuchModel, ProbeError, Refused, Server
from inferry.domain.values import replace
from inferry.sim.costs import EngineFlags
from inferry.sim.observations import Conditions, Flag, Observation

ROUNDS = 3
LEAST_CROWD = 8
"""What a crowd costs cannot be told from fewer, however slow the engine is."""
BUSY_CLIENT = 0.8
_RUNNING = "vllm:num_requests_running"
_GENERATED = "vllm:generation_tokens_total"
_TOLERATED_FAILURES = 5

Watch = Callable[[str, float], None]
"""Told what is probed, and which part of the time is used up."""


class Wishes(Struct, frozen=True, kw_only=True):
    """What the person who calibrates said."""

    model: str | None = None
    seconds: float = 60.0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_tokens: int | None = None
    block_tokens: int | None = None


async def observe(server: Server, wishes: Wishes, watch: Watch) -> tuple[Conditions, list[Observation]]:
    """Probe the engine for as long as wished. Raises ProbeError where there is nothing to be learnt."""
    watch("what is served", 0.0)
    models = await server.models()
    model = _chosen(models, wishes.model, server.url)
    version = await server.version()
    idle = await server.metrics()
    session = _Session(server, Prober(server, model), wishes, models[model], idle, watch)
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
    """The probing itself."""

    def __init__(
        self,
        server: Server,
        prober: Prober,
        wishes: Wishes,
        context_tokens: int | None,
        idle: dict[str, float],
        watch: Watch,
    ) -> None:
        self.prober = prober
        self.observations: list[Observation] = []
        self.warnings: list[str] = []
        self.warm_up_calls = 0
        self.left_out = 0
        self.used_s = 0.0
        self.flags = _flags(wishes, idle)
        self._server = server
        self._wishes = wishes
        self._context_tokens = context_tokens
        self._watch = watch
        self._pace = Pace()
        self._began = 0.0
        self._failures = 0
        if idle.get(_RUNNING):
            self._warn(f"the engine was busy with {idle[_RUNNING]:.0f} requests of others: figures will be too high")

    async def run(self) -> None:
        self._watch("which requests the server takes", 0.0)
        await self.prober.negotiate()
        self._began = time.perf_counter()
        try:
            async with asyncio.timeout(self._wishes.seconds):
                reach = await self._warm_up()
                for number in range(ROUNDS):
                    if not await self._round(reach, number):
                        break
        except TimeoutError:
            pass  # the time is used up; what was observed counts
        self.used_s = time.perf_counter() - self._began
        if not self.observations:
            raise ProbeError(f"not one probe was over within {self._wishes.seconds:g} s: give it more with --seconds")

    async def _warm_up(self) -> Reach:
        seconds = self._wishes.seconds
        longest = LARGEST_PROMPT
        if self._context_tokens is not None:
            longest = min(longest, self._context_tokens - 2 * STEADY_TOKENS)
        known = {name: flag.value for name, flag in self.flags.items() if flag.source != "assumed"}
        reach = Reach(
            prompt_tokens=max(64, longest),
            sequences=min(MOST_SEQUENCES, known.get("max_num_seqs", MOST_SEQUENCES)),
            kv_tokens=known.get("kv_tokens"),
            context_tokens=self._context_tokens,
            chunk_tokens=self.flags["max_num_batched_tokens"].value,
        )
        most = 0
        for probe in warm_up(reach):
            if self._pace.expected_s(probe) > seconds / 8:
                continue
            self._watch(f"warming up: {probe.words}", self._used)
            seen = await self.prober.run(probe)
            self.warm_up_calls += len(seen.calls)
            self._learn(probe, seen)
            most = max(most, probe.sequences)
        affordable_prompt = seconds / 12 / max(1e-9, self._pace.prompt_token_s)
        affordable_crowd = most * seconds / 10 / (STEADY_TOKENS * max(1e-9, self._pace.gap_s(most)))
        return replace(
            reach,
            prompt_tokens=max(64, min(reach.prompt_tokens, int(affordable_prompt))),
            sequences=min(reach.sequences, max(LEAST_CROWD, int(affordable_crowd))),
        )

    async def _round(self, reach: Reach, number: int) -> bool:
        """One round of probes; whether anything was probed in it."""
        probed = False
        for probe in schedule(reach):
            left_s = self._wishes.seconds * (1 - self._used)
            if self._pace.expected_s(probe) > left_s:
                self.left_out += number == 0
                continue
            self._watch(probe.words, self._used)
            try:
                seen = await self.prober.run(probe)
            except Refused as error:
                self._failures += 1
                if self._failures > _TOLERATED_FAILURES or not self.observations:
                    raise
                self._warn(f"{probe.words}: {error}")
                continue
            probed = True
            self._learn(probe, seen)
            self.observations.append(seen)
            self._look_for_others(probe, seen)
        return probed

    def _learn(self, probe: Probe, seen: Observation) -> None:
        calls = seen.calls[: probe.sequences]
        if probe.kind == "prefill":
            self._pace.saw_prompt(calls[0].prompt_tokens, calls[0].first_s)
        gaps = [call.gap_s for call in calls if call.gap_s is not None]
        if probe.kind in ("prefill", "decode") and gaps:
            self._pace.saw_gap(probe.sequences, statistics.median(gaps))

    def _look_for_others(self, probe: Probe, seen: Observation) -> None:
        ours = sum(call.output_tokens for call in seen.calls)
        generated = seen.engine.get(_GENERATED, 0.0)
        if generated > 1.02 * ours + 8:
            self._warn("the engine also worked for others meanwhile: figures will be too high")
        if seen.client_busy > BUSY_CLIENT and probe.sequences > 1:
            busy = f"this process was busy {seen.client_busy:.0%} of the time"
            self._warn(f"{probe.words}: {busy}, so that it measured itself too")
        early = sum(call.output_tokens < probe.output_tokens for call in seen.calls[: probe.sequences])
        if early > len(seen.calls) / 10:
            self._warn("the server ends answers early although it was told not to: gaps are of what came")

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    @property
    def _used(self) -> float:
        return min(1.0, (time.perf_counter() - self._began) / self._wishes.seconds)


def _chosen(models: dict[str, int | None], wanted: str | None, url: str) -> str:
    if not models:
        raise NoSuchModel(f"{url} serves no model")
    if wanted is None:
        if len(models) > 1:
            raise NoSuchModel(f"{url} serves several models; name one with --model: {', '.join(sorted(models))}")
        return next(iter(models))
    if wanted not in models:
        raise NoSuchModel(f"{url} does not serve {wanted!r}; it serves {', '.join(sorted(models))}")
    return wanted


def _flags(wishes: Wishes, idle: dict[str, float]) -> dict[str, Flag]:
    """What is known of how the engine was started: what the person says, what the engine says, else what is usual."""
    usual = EngineFlags()
    block = int(idle.get(f"{CACHE}/block_size", 0))
    told = {"kv_tokens": block * int(idle.get(f"{CACHE}/num_gpu_blocks", 0)), "block_tokens": block}
    given = {
        "max_num_seqs": wishes.max_num_seqs,
        "max_num_batched_tokens": wishes.max_num_batched_tokens,
        "kv_tokens": wishes.kv_tokens,
        "block_tokens": wishes.block_tokens,
    }
    flags = {}
    for name in ("max_num_seqs", "max_num_batched_tokens", "kv_tokens", "block_tokens"):
        value = given[name]
        if value is not None:
            flags[name] = Flag(value, "given")
        elif told.get(name):
            flags[name] = Flag(told[name], "told by the engine")
        else:
            flags[name] = Flag(getattr(usual, name), "assumed")
    return flags
