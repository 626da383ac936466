"""The gateway against the engine alone with priorities: no lane may pay for what no other lane gains.

Every workload is played twice with the same arrivals, and calls are paired by id. 3 % of the runs are cancelled at
random. A lane keeps the rule if its 95th percentile of the TTFT is at most 1.1 times that of the engine alone, or less
than twice that while the other lanes gain more attained calls than it loses. The open-loop workloads are played at 0.5,
0.9 and 1.3 of what the engine can serve: the arrival rate is scaled so that the time the engine needs for all calls at
once is that part of the time in which they arrive. Coding agents are sessions, whose load is their number.

The constants of `scheduling/hold_bound.py` were chosen with seeds 1 to 3 and checked with the others.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from benchmarks.ablation_loads import LANES
from benchmarks.trace_files import AZURE, CODING, MOONCAKE, trace_file
from inferry.cli.simulate_setup import Arm, direct_arms, drop_oversized, gateway_arm, simulated_workers
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.sim.arrivals import assign_lanes, poisson, scale_rate, uniform_lengths
from inferry.sim.calls import CallRow, Run
from inferry.sim.costs import EngineModel, load_model
from inferry.sim.harbor import harbor
from inferry.sim.report import attains, quantile
from inferry.sim.rng import named_rng
from inferry.sim.simulation import Simulation
from inferry.sim.traces import read_trace
from inferry.sim.workload import slo_targets_for

SEEDS = range(1, 11)
LOADS = (0.5, 0.9, 1.3)
CANCELLED = 0.03
SLO = slo_targets_for(DEFAULT_LANES)
CallId = tuple[int, str, str, int]
Rows = dict[CallId, CallRow]
"""Calls by seed, run, step and prompt tokens."""


def measure(seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    model = load_model()
    gateway = gateway_arm("gateway", DEFAULT_LANES, simulated_workers(None, model))
    direct = direct_arms(model, 1)[1]
    result: dict[str, Any] = {"seeds": list(seeds), "workloads": {}}
    for name, runs_of in workloads(model).items():
        ours: Rows = {}
        theirs: Rows = {}
        throughput = []
        kept = 0
        for seed in seeds:
            runs = cancel_some(drop_oversized(runs_of(seed), (gateway, direct)), seed)
            rows, wall_s = play(gateway, model, runs, seed)
            direct_rows, direct_wall_s = play(direct, model, runs, seed)
            throughput.append(direct_wall_s / wall_s)
            kept += all(lane["kept"] for lane in compare(rows, direct_rows).values())
            ours |= rows
            theirs |= direct_rows
        lanes = compare(ours, theirs)
        result["workloads"][name] = {
            "lanes": lanes,
            "kept": all(lane["kept"] for lane in lanes.values()),
            "seeds_kept": kept,
            "throughput": round(sum(throughput) / len(throughput), 3),
        }
        print(name, result["workloads"][name], flush=True)
    return result


# -- what is played --------------------------------------------------------------------------------------------------


def workloads(model: EngineModel) -> dict[str, Callable[[int], list[Run]]]:
    made: dict[str, Callable[[int], list[Run]]] = {"harbor": harbor}
    for load in LOADS:
        made[f"harbor {load}"] = partial(harbor_at, load, model)
        made[f"azure {load}"] = partial(trace_at, AZURE, 240.0, load, model)
        made[f"mooncake {load}"] = partial(trace_at, MOONCAKE, 60.0, load, model)
    for scale in (2.1, 3.5):
        made[f"azure x{scale}, 60 batch jobs"] = partial(azure_beside_batch, scale)
    made["coding, first minute"] = lambda seed: in_lanes([run for run in _trace(CODING) if run.at < 60.0], seed)
    made["coding, any minute"] = lambda seed: in_lanes(trace_window(CODING, 60.0, seed, 199.0), seed)
    return made


def harbor_at(load: float, model: EngineModel, seed: int) -> list[Run]:
    return at_load(harbor(seed, digests=150), load, model)


def trace_at(name: str, seconds: float, load: float, model: EngineModel, seed: int) -> list[Run]:
    return in_lanes(at_load(trace_window(name, seconds, seed), load, model), seed)


def azure_beside_batch(scale: float, seed: int) -> list[Run]:
    live = scale_rate(trace_window(AZURE, 60.0 * scale, seed), scale)
    return [*in_lanes(live, seed), *batch_jobs(seed)]


@cache
def _trace(name: str) -> list[Run]:
    return sorted(read_trace(trace_file(name)), key=lambda run: run.at)


def trace_window(name: str, seconds: float, seed: int, until_s: float | None = None) -> list[Run]:
    """The runs that begin within a window of the trace, at a place drawn by seed."""
    runs = _trace(name)
    begin = named_rng(seed, "place").uniform(0.0, (until_s or runs[-1].at) - seconds)
    return [replace(run, at=run.at - begin) for run in runs if begin <= run.at < begin + seconds]


def in_lanes(runs: Sequence[Run], seed: int) -> list[Run]:
    return assign_lanes(runs, LANES, seed)


def batch_jobs(seed: int) -> list[Run]:
    lengths = uniform_lengths((1500, 8000), (150, 400))
    return list(poisson(seed, 20.0, 3.0, lengths, lane=Lane.P2, tenants=("batch",), name="batch"))


def at_load(runs: Sequence[Run], load: float, model: EngineModel) -> list[Run]:
    """The same runs, `load` times as dense as the engine alone can serve them."""
    _, wall_s = play(direct_arms(model, 1)[1], model, [replace(run, at=0.0) for run in runs], 0)
    return scale_rate(runs, load * max(run.at for run in runs) / wall_s)


def cancel_some(runs: Sequence[Run], seed: int) -> list[Run]:
    rng = named_rng(seed, "cancel")
    return [replace(run, cancel_after_s=rng.uniform(0.2, 4.0)) if rng.random() < CANCELLED else run for run in runs]


# -- how it went -----------------------------------------------------------------------------------------------------


def play(arm: Arm, model: EngineModel, runs: Sequence[Run], seed: int) -> tuple[Rows, float]:
    """The calls, and when the last one ended."""
    itl_s = {lane: target.itl_s for lane, target in SLO.items()}
    simulation = Simulation(arm.frontend(), model.costs, arm.flags, itl_s=itl_s)
    simulation.play(runs)
    rows = {(seed, row.run, row.step, row.prompt): row for row in simulation.rows}
    return rows, max(row.at + row.end_s for row in simulation.rows)


def compare(ours: Rows, theirs: Rows) -> dict[str, dict[str, Any]]:
    """By lane: calls that were not cancelled in either arm, and whether the rule is kept."""
    pairs: dict[Lane, list[tuple[CallRow, CallRow]]] = {}
    for name, row in theirs.items():
        other = ours.get(name)
        if other is not None and "cancelled" not in (row.outcome, other.outcome):
            pairs.setdefault(row.lane, []).append((other, row))
    gains = {
        lane: sum([attains(a, SLO[lane].ttft_s) - attains(b, SLO[lane].ttft_s) for a, b in both])
        for lane, both in pairs.items()
    }
    lanes: dict[str, dict[str, Any]] = {}
    for lane, both in sorted(pairs.items()):
        p95 = quantile([a.ttft_s for a, _ in both if a.ttft_s is not None], 0.95) or 0.0
        direct_p95 = quantile([b.ttft_s for _, b in both if b.ttft_s is not None], 0.95) or 0.0
        ratio = p95 / direct_p95 if direct_p95 else 1.0
        others = sum(gains.values()) - gains[lane]
        lanes[lane.name] = {
            "calls": len(both),
            "attainment": round(sum([attains(a, SLO[lane].ttft_s) for a, _ in both]) / len(both), 4),
            "direct_attainment": round(sum([attains(b, SLO[lane].ttft_s) for _, b in both]) / len(both), 4),
            "ttft_p95_s": round(p95, 3),
            "direct_ttft_p95_s": round(direct_p95, 3),
            "ratio": round(ratio, 3),
            "kept": ratio <= 1.1 or (ratio < 2.0 and others > max(0, -gains[lane])),
        }
    return lanes
