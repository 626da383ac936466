"""Situations of a gateway: each is what an operator would run into, and the cause that explains it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from inferry.sim.costs import CostModel, EngineFlags
from support.staging.engines import ContinuousWorker, PassWorker, SimulatedWorker
from support.staging.stage import Stage


class Situation(NamedTuple):
    """`workers` makes the engines, `play` sends the traffic, `config` is the configuration without workers."""

    name: str
    cause: str | None
    workers: Callable[[], Sequence[SimulatedWorker]]
    play: Callable[[Stage], Awaitable[None]]
    config: dict[str, Any]


async def _starved(stage: Stage) -> None:
    await stage.arrivals(12, 90, prompt=(200, 600), output=(40, 80))


async def _flood(stage: Stage) -> None:
    stage.start(stage.arrivals(8, 90, lane="P2", prompt=(1000, 3000), output=(400, 600)))
    await stage.arrivals(2, 90, lane="P0", prompt=(200, 400), output=(20, 40))


async def _singles(stage: Stage) -> None:
    await stage.arrivals(20, 60, burst=4, prompt=(200, 300), output=10)


async def _mixed_lengths(stage: Stage) -> None:
    stage.start(stage.arrivals(4, 60, prompt=4000, output=10))
    await stage.arrivals(28, 60, prompt=(50, 150), output=10)


async def _tools(stage: Stage) -> None:
    await stage.agents(12, 120, tool_s=4.0, prompt=(400, 1200), output=(40, 80))


async def _long_contexts(stage: Stage) -> None:
    await stage.arrivals(6, 90, prompt=(6000, 10_000), output=(150, 250))


async def _slow_readers(stage: Stage) -> None:
    stage.start(stage.arrivals(2, 60, output=(150, 200), read_every_s=1.0))
    await stage.arrivals(4, 60, prompt=(200, 800), output=(20, 60))


async def _death(stage: Stage) -> None:
    stage.start(stage.arrivals(6, 60, prompt=(200, 800), output=(20, 60)))
    await asyncio.sleep(20)
    stage.workers[0].kill()
    await asyncio.sleep(40)


async def _backlog(stage: Stage) -> None:
    await stage.arrivals(16, 60, prompt=(200, 300), output=10)


async def _long_prompts_beside_streams(stage: Stage) -> None:
    stage.start(stage.arrivals(0.5, 90, prompt=(14_000, 18_000), output=20))
    await stage.arrivals(4, 90, lane="P0", prompt=(200, 400), output=(80, 120))


async def _bursts_of_one_tenant(stage: Stage) -> None:
    await stage.arrivals(4, 120, tenant="acme", prompt=(200, 800), output=(20, 60))


async def _steady(stage: Stage) -> None:
    stage.start(stage.arrivals(3, 90, lane="P0", prompt=(200, 800), output=(20, 60)))
    stage.start(stage.arrivals(1, 90, lane="P2", prompt=(1000, 2000), output=(100, 200)))
    await stage.agents(6, 90, tool_s=0.3, prompt=(400, 1200), output=(60, 120))


SLOWER = CostModel(base_s=0.012, prefill_token_s=60e-6, sequence_s=100e-6, kv_token_s=8e-9)
"""A smaller GPU: 17,000 prompt tokens per second, 12 ms per step."""

SITUATIONS = (
    Situation("starved GPU", "starved_gpu", lambda: [ContinuousWorker(max_sequences=2)], _starved, {}),
    Situation(
        "P2 flood",
        "p2_flood",
        lambda: [ContinuousWorker(max_sequences=24)],
        _flood,
        {"lanes": {"P2": {"reserve": 0.0, "preemptible": False}}},
    ),
    Situation(
        "window too short",
        "window_too_short",
        lambda: [PassWorker(pass_s=0.15)],
        _singles,
        {"lanes": {"P1": {"window": "off"}}},
    ),
    Situation("padding", "padding", lambda: [PassWorker(pass_s=0.1, prompt_token_s=12e-6)], _mixed_lengths, {}),
    Situation("slow tool", "slow_tool", lambda: [ContinuousWorker()], _tools, {}),
    Situation(
        "KV pressure",
        "kv_pressure",
        lambda: [ContinuousWorker(flags=EngineFlags(kv_tokens=40_000), kv_tokens=40_000)],
        _long_contexts,
        {},
    ),
    Situation("slow reader", "slow_reader", lambda: [ContinuousWorker()], _slow_readers, {}),
    Situation("dead worker", "dead_worker", lambda: [ContinuousWorker("a"), ContinuousWorker("b")], _death, {}),
    Situation(
        "small batches",
        "small_batches",
        lambda: [PassWorker(pass_s=0.2, max_sequences=64)],
        _backlog,
        {"lanes": {"P1": {"max_batch": 2}}},
    ),
    Situation(
        "engine flags",
        "engine_flags",
        lambda: [ContinuousWorker(costs=SLOWER, flags=EngineFlags(max_num_batched_tokens=16_384))],
        _long_prompts_beside_streams,
        {},
    ),
    Situation(
        "quota too tight",
        "quota_too_tight",
        lambda: [ContinuousWorker()],
        _bursts_of_one_tenant,
        {"tenants": {"acme": {"requests_per_minute": 60}}},
    ),
    Situation("healthy", None, lambda: [ContinuousWorker(), ContinuousWorker("second")], _steady, {}),
)


async def _too_many(stage: Stage) -> None:
    await stage.arrivals(40, 40, prompt=(500, 1500), output=(100, 200))


async def _held(stage: Stage) -> None:
    await stage.arrivals(5, 60, lane="P0", prompt=(200, 300), output=20)


async def _same_prefix(stage: Stage) -> None:
    await stage.arrivals(1, 90, lane="P0", prompt=(10_200, 10_400), output=20, template="t", shared_prompt=10_000)


async def _unlike_prompts(stage: Stage) -> None:
    await stage.arrivals(0.6, 90, lane="P0", prompt=(15_000, 20_000), output=20)


async def _long_answers(stage: Stage) -> None:
    await stage.arrivals(2, 60, prompt=(200, 400), output=(200, 300))


async def _short_answers(stage: Stage) -> None:
    await stage.arrivals(6, 60, prompt=(200, 400), output=(40, 60))


async def _crowds(stage: Stage) -> None:
    await stage.arrivals(100, 40, burst=90, prompt=(200, 400), output=(40, 60))


async def _impatient(stage: Stage) -> None:
    await stage.arrivals(5, 60, prompt=(200, 400), output=(200, 300), leaves_after_s=0.5)


async def _batch_only(stage: Stage) -> None:
    await stage.arrivals(12, 60, lane="P2", prompt=(200, 600), output=(40, 80))


async def _batch_backlog(stage: Stage) -> None:
    await stage.arrivals(40, 60, lane="P2", prompt=(500, 1500), output=(100, 200))


SLOW = CostModel(base_s=0.08, prefill_token_s=200e-6, sequence_s=400e-6, kv_token_s=4e-9)
_LAX_ITL = {"lanes": {"P0": {"itl_ms": 200}}}

MORE_SITUATIONS = (
    Situation("overload", "overload", lambda: [ContinuousWorker(costs=SLOWER, max_sequences=32)], _too_many, {}),
    Situation(
        "window too long",
        "window_too_long",
        lambda: [ContinuousWorker()],
        _held,
        {"lanes": {"P0": {"window": "fixed", "coalesce_ms": 900, "max_wait_ms": 1000}}},
    ),
    Situation(
        "cold cache",
        "cold_cache",
        lambda: [ContinuousWorker(costs=SLOWER, flags=EngineFlags(prefix_caching=False))],
        _same_prefix,
        _LAX_ITL,
    ),
    Situation("warm cache", None, lambda: [ContinuousWorker(costs=SLOWER)], _same_prefix, _LAX_ITL),
    Situation("long prompts", "prefill_bound", lambda: [ContinuousWorker(costs=SLOWER)], _unlike_prompts, _LAX_ITL),
    Situation("slow engine", "decode_bound", lambda: [ContinuousWorker(costs=SLOW)], _long_answers, {}),
    Situation(
        "one slow worker",
        "slow_worker",
        lambda: [ContinuousWorker("a"), ContinuousWorker("b", costs=SLOW)],
        _short_answers,
        {},
    ),
    Situation(
        "queue limit",
        "queue_full",
        lambda: [ContinuousWorker(max_sequences=64)],
        _crowds,
        {"lanes": {"P1": {"queue_limit": 4}}},
    ),
    Situation("impatient clients", "cancelled_calls", lambda: [ContinuousWorker()], _impatient, {}),
    Situation("starved by batch work", "starved_gpu", lambda: [ContinuousWorker(max_sequences=2)], _batch_only, {}),
    Situation(
        "limit of the engine",
        "engine_flags",
        lambda: [ContinuousWorker(flags=EngineFlags(max_num_seqs=4))],
        _starved,
        {},
    ),
    Situation(
        "KV cache of the engine",
        "kv_pressure",
        lambda: [ContinuousWorker(flags=EngineFlags(kv_tokens=40_000))],
        _long_contexts,
        {},
    ),
    Situation(
        "concurrency quota",
        "quota_too_tight",
        lambda: [ContinuousWorker()],
        _bursts_of_one_tenant,
        {"tenants": {"acme": {"max_concurrent": 1}, "other": {"max_concurrent": 9}}},
    ),
    Situation("batch work waits", None, lambda: [ContinuousWorker(costs=SLOWER, max_sequences=64)], _batch_backlog, {}),
)
"""Further causes, variants of the first twelve, and situations that only look like a problem."""
