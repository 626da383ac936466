"""Sessions whose KV does not fit: finished sessions per minute, against the engine alone with sticky routing.

A closed loop in the simulator: a fixed number of sessions at a time, the next one begins when one has ended. The
working set is that number times the mean KV of a session during its calls. The KV cache of the engine has the size that
makes the working set 0.7, 1.5 or 2.5 times as large. With one engine, sticky routing sends every call there at once.

Sessions are those of two traces, in an order drawn by seed. Tool times of coding agents are as recorded, 30 s at most:
some sessions wait for a person for hours. The other trace has none, and gets log-normal ones (median 3 s, mean 4.5 s).

Each call of a session counts from its arrival, pauses included. Calls that had no first token at the end of the time
count with what they had waited, if that is more than a minute. The constants of `scheduling/working_sets.py` were
chosen with seed 1 and are checked with the others.
"""

import statistics
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from benchmarks.trace_files import AGENTS, CODING, trace_file
from inferry.cli.simulate_setup import Arm, direct_arms, gateway_arm, simulated_workers
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.scheduling.sessions import SessionLimits
from inferry.sim.calls import CallRow, Run
from inferry.sim.costs import EngineModel, load_model
from inferry.sim.prompts import length
from inferry.sim.report import quantile
from inferry.sim.rng import named_rng
from inferry.sim.simulation import Simulation
from inferry.sim.traces import read_trace

SEEDS = range(1, 11)
ROWS = [
    *((CODING, 60, working_set) for working_set in (0.7, 1.5, 2.5)),
    *((AGENTS, 80, working_set) for working_set in (0.7, 1.5, 2.5)),
    *((name, 20, 2.5) for name in (CODING, AGENTS)),
]
"""Trace, sessions at a time, and working set over KV cache. With 20 sessions pauses do not pay."""
MAX_TOOL_S = 30.0
WARM_UP_S, SECONDS, RAMP_S = 120.0, 900.0, 20.0
LATE_S = 60.0


def measure(seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    model = load_model()
    result: dict[str, Any] = {"seeds": list(seeds), "seconds": SECONDS, "rows": []}
    for name, sessions, working_set in ROWS:
        runs = read_trace(trace_file(name))
        figures: dict[str, list[dict[str, float]]] = {"direct": [], "sessions": []}
        for seed in seeds:
            ordered = in_order(runs, seed)
            for arm in arms(model, int(sessions * mean_kv_tokens(ordered) / working_set)):
                figures[arm.name].append(play(arm, model, ordered, sessions))
        row = {"trace": name, "sessions_at_a_time": sessions, "working_set": working_set} | compare(figures)
        result["rows"].append(row)
        print(row, flush=True)
    return result


def arms(model: EngineModel, kv_tokens: int) -> tuple[Arm, Arm]:
    sized = replace(model, flags=replace(model.flags, kv_tokens=kv_tokens))
    direct = direct_arms(sized, 1)[0]
    gateway = gateway_arm("sessions", DEFAULT_LANES, simulated_workers(None, sized), SessionLimits())
    return replace(direct, name="direct"), gateway


def in_order(runs: Sequence[Run], seed: int) -> list[Run]:
    """The sessions in an order drawn by seed, with tool times."""
    rng = named_rng(seed, "sessions")
    has_times = any(step.tool_s for run in runs for step in run.steps)
    ordered = []
    for run in runs:
        tool_times = [
            min(step.tool_s, MAX_TOOL_S) if has_times else rng.lognormvariate(1.1, 0.9) for step in run.steps[:-1]
        ]
        steps = tuple(replace(step, tool_s=tool_s) for step, tool_s in zip(run.steps, [*tool_times, 0.0], strict=True))
        ordered.append(replace(run, lane=Lane.P1, steps=steps))
    rng.shuffle(ordered)
    return ordered


def mean_kv_tokens(runs: Sequence[Run]) -> float:
    return statistics.fmean(length(step.prompt) + step.output for run in runs for step in run.steps)


def repeated(runs: Sequence[Run]) -> Iterator[Run]:
    """The sessions again and again, each time as sessions and tenants of their own."""
    for number in count():
        run = runs[number % len(runs)]
        yield replace(run, run_id=f"{run.run_id}-{number}", tenant=f"{run.tenant}-{number}")


def play(arm: Arm, model: EngineModel, runs: Sequence[Run], sessions: int) -> dict[str, float]:
    simulation = Simulation(arm.frontend(), model.costs, arm.flags)
    simulation.play_sessions(repeated(runs), sessions, SECONDS, RAMP_S)
    rows = [row for row in simulation.rows if row.at >= WARM_UP_S]
    finished = [run for run in simulation.runs if run.at + run.latency_s >= WARM_UP_S]
    ttfts_s = [row.ttft_s for row in rows if row.ttft_s is not None]
    ttfts_s += [waited_s for waited_s in simulation.waits_for_first_token(SECONDS) if waited_s > LATE_S]
    return {
        "sessions_per_minute": 60 * len(finished) / (SECONDS - WARM_UP_S),
        "calls_per_second": len(rows) / (SECONDS - WARM_UP_S),
        "cached": _cached(rows),
        "ttft_p50_s": quantile(ttfts_s, 0.5) or 0.0,
        "ttft_p99_s": quantile(ttfts_s, 0.99) or 0.0,
        "ttft_max_s": max(ttfts_s),
        "slowest_session_s": max(run.latency_s for run in finished),
    }


def _cached(rows: Sequence[CallRow]) -> float:
    return sum([row.cached for row in rows]) / sum([row.prompt for row in rows])


def compare(figures: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Means over the seeds, the ratio of the rates, its least value, and the worst waits of any seed."""
    ratios = [
        ours["sessions_per_minute"] / theirs["sessions_per_minute"]
        for ours, theirs in zip(figures["sessions"], figures["direct"], strict=True)
    ]
    row: dict[str, Any] = {"ratio": round(statistics.fmean(ratios), 3), "least_ratio": round(min(ratios), 3)}
    for arm, seeds in figures.items():
        row[arm] = {
            name: round((max if name.startswith(("ttft_max", "ttft_p99", "slowest")) else statistics.fmean)(values), 3)
            for name in seeds[0]
            if (values := [one[name] for one in seeds])
        }
    return row
