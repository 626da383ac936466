"""The scale of the simulator: up to two million jobs over a thousand simulated workers, on one core.

`python -m benchmarks scale` plays four sizes, each in its own process, for its peak memory. It uses the real scheduler
and the simulated engine with the shipped cost model, and counts every job. Runs are generated while they are played and
rows are counted and dropped, so memory is for calls in progress, prefix caches and a few numbers per job. One thing is
coarser than the shipped model: KV blocks have 64 tokens instead of 16, since 200 prefix caches of 50,000 blocks each
take most of the memory and a third of the time.
"""

import gc
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import Random
from typing import Any

from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.sim.calls import Run, Step
from inferry.sim.costs import EngineModel, load_model
from inferry.sim.gateway import GatewayFrontend
from inferry.sim.prompts import Piece
from inferry.sim.report import Tally, unloaded_seconds
from inferry.sim.rng import named_rng
from inferry.sim.simulation import Simulation

WORKERS = 200
"""The rates below are for this number of workers, and are scaled with it."""
SIZES = ((10_000, WORKERS), (100_000, WORKERS), (1_000_000, WORKERS), (2_000_000, 5 * WORKERS))
"""Jobs and workers."""
RUNS_PER_S = 360.0
BATCHES_PER_S = 3.0
TENANTS = 60
SEED = 1
BLOCK_TOKENS = 64
CAPACITY_SEQUENCES, CAPACITY_PREFILL_TOKENS = 256, 4096


def fleet(
    seed: int, jobs: int, runs_per_s: float = RUNS_PER_S, batches_per_s: float = BATCHES_PER_S, tenants: int = TENANTS
) -> Iterator[Run]:
    """Agent runs of three to eight steps with growing context, and groups of simultaneous batch calls.

    In order of time, generated on demand, exactly `jobs` jobs. A few tenants send most of it; each has a system prompt
    shared by all its runs. Prompts are of hundreds to thousands of tokens, outputs of tens to hundreds.
    """
    rng = named_rng(seed, "fleet")
    segments = tenants
    systems = [(number + 1, 0, rng.randint(200, 1500)) for number in range(tenants)]
    now, remaining, number = 0.0, jobs, 0
    while remaining:
        now += rng.expovariate(runs_per_s + batches_per_s)
        tenant = int(tenants * rng.random() ** 2)
        if rng.random() * (runs_per_s + batches_per_s) < batches_per_s:
            kinds = [(Lane.P2, 1)] * min(remaining, rng.randint(20, 300))
        else:
            kinds = [(rng.choice((Lane.P0, Lane.P1, Lane.P1)), min(remaining, rng.randint(3, 8)))]
        for lane, count in kinds:
            steps, segments = _steps(rng, count, systems[tenant], segments)
            yield Run(run_id=f"run-{number}", tenant=f"tenant-{tenant}", lane=lane, at=now, steps=steps)
            number += 1
            remaining -= count


def _steps(rng: Random, count: int, system: Piece, segments: int) -> tuple[tuple[Step, ...], int]:
    context: tuple[Piece, ...] = (system, (segments + 1, 0, rng.randint(50, 1000)))
    segments += 1
    steps = []
    for _ in range(count):
        output = rng.randint(10, 200)
        steps.append(Step("step", context, output, rng.uniform(0.05, 0.5)))
        segments += 1
        context = (*context, (segments, 0, output + rng.randint(20, 400)))
    return tuple(steps), segments


def play(
    jobs: int,
    workers: int = WORKERS,
    *,
    runs: Iterator[Run] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Cost and figures of one size. Rates are per second of CPU time: there is one thread, and on a shared machine wall
    time depends on others.
    """
    model: EngineModel = load_model()
    tally = Tally(work=unloaded_seconds(model.costs))
    flags = replace(model.flags, block_tokens=BLOCK_TOKENS)
    capacity = Capacity(CAPACITY_SEQUENCES, flags.kv_tokens, CAPACITY_PREFILL_TOKENS)
    simulation = Simulation(
        GatewayFrontend(DEFAULT_LANES, capacity),
        model.costs,
        flags,
        workers=workers,
        on_call=tally.call,
        on_run=tally.run,
    )
    began, cpu = time.perf_counter(), time.process_time()
    share = workers / WORKERS
    simulation.play_stream(runs or fleet(SEED, jobs, RUNS_PER_S * share, BATCHES_PER_S * share), on_progress)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    outcome = tally.report(f"{jobs} jobs", simulation.engines)
    return {
        "jobs": outcome.calls,
        "workers": workers,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "us_per_job": cpu_s / jobs * 1e6,
        "jobs_per_s": jobs / cpu_s,
        "simulated_s": outcome.wall_s,
        "simulated_s_per_s": outcome.wall_s / cpu_s,
        "events": simulation.events.scheduled,
        "engine_steps": sum(engine.steps for engine in simulation.engines),
        "output_tokens": outcome.output_tokens,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "utilisation": outcome.utilisation,
        "cache_hit_share": outcome.cache_hit_share,
        "failed": outcome.failed,
        "lanes": {
            name: {
                "calls": lane.calls,
                "attainment": lane.attainment,
                "ttft_p50": lane.ttft_p50,
                "ttft_p95": lane.ttft_p95,
                "ttft_p99": lane.ttft_p99,
                "itl_p95": lane.itl_p95,
                "fairness": lane.fairness,
            }
            for name, lane in outcome.lanes.items()
        },
    }


def play_in_own_process(jobs: int, workers: int) -> dict[str, Any]:
    """`play` in its own process. Reference cycles are few, so rarer garbage collection saves a tenth."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    return play(jobs, workers)


def measure(sizes: tuple[tuple[int, int], ...] = SIZES) -> dict[str, Any]:
    rows = []
    heads = ("jobs", 9), ("workers", 7), ("CPU s", 7), ("wall s", 7), ("µs/job", 7), ("jobs/s", 7), ("sim s / s", 9)
    print(*(f"{word:>{width}}" for word, width in (*heads, ("events", 11), ("peak MB", 8))))
    for jobs, workers in sizes:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            row = alone.submit(play_in_own_process, jobs, workers).result()
        rows.append(row)
        print(
            f"{row['jobs']:>9,} {workers:>7,} {row['cpu_s']:>7.1f} {row['wall_s']:>7.1f} {row['us_per_job']:>7.0f} "
            f"{row['jobs_per_s']:>7,.0f} {row['simulated_s_per_s']:>9.2f} {row['events']:>11,} "
            f"{row['peak_memory_mb']:>8,.0f}",
            flush=True,
        )
    return {
        "model": load_model().name,
        "seed": SEED,
        "block_tokens": BLOCK_TOKENS,
        "capacity": {"sequences": CAPACITY_SEQUENCES, "prefill_tokens": CAPACITY_PREFILL_TOKENS},
        "sizes": rows,
    }
