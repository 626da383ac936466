"""The room controller in the twin: steps of load on three engines, with the same defaults on each.

Load goes from 0.3 of what the engine can do to 1.5 and back. P0 has to keep its promise throughout, and what the
controller grants has to come to rest. Nothing is tuned per engine but the promises: no room keeps a gap of 30 ms on an
engine whose empty step takes 25.
"""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from inferry.domain.jobs import DEFAULT_LANES, Lane, LanePolicy
from inferry.sim.arrivals import even_lengths, poisson
from inferry.sim.calls import CallRow, Run
from inferry.sim.controlled import ControlledDoor
from inferry.sim.costs import CostModel, load_model
from inferry.sim.world import World

SEEDS = range(20)
STEPS = (0.3, 1.5, 0.3)
STEP_S = 20.0
SETTLED = 0.15
MIX = {
    Lane.P0: (0.2, even_lengths((200, 1200), (20, 120))),
    Lane.P1: (0.3, even_lengths((200, 1600), (20, 200))),
    Lane.P2: (0.5, even_lengths((1000, 5000), (100, 300))),
}
TYPICAL = {Lane.P0: (700, 70), Lane.P1: (900, 110), Lane.P2: (3000, 200)}
Lanes = dict[Lane, LanePolicy]


def engines() -> dict[str, tuple[CostModel, float]]:
    """Cost models, and how much longer than the default the promises are in front of each."""
    gpu = load_model().costs
    slow = replace(
        gpu,
        base_s=5 * gpu.base_s,
        prefill_step_s=5 * gpu.prefill_step_s,
        prefill_token_s=5 * gpu.prefill_token_s,
        sequence_s=5 * gpu.sequence_s,
        kv_token_s=5 * gpu.kv_token_s,
        attention_pair_s=5 * gpu.attention_pair_s,
    )
    cpu = CostModel(base_s=0.010, prefill_token_s=1e-4, sequence_s=5e-4, kv_token_s=1e-8, reply_s=0.001)
    return {"gpu": (gpu, 1.0), "five times slower": (slow, 5.0), "cpu": (cpu, 2.5)}


def load_steps(costs: CostModel, promise_factor: float, seeds: Sequence[int] = SEEDS) -> dict[str, dict[str, float]]:
    """P0 attainment in each step of load over all seeds, and how long the engine's steps take to come to rest.

    How long a step takes is what the controller steers. It is a mean over each second and over the seeds.
    """
    lanes = _with_promises(promise_factor)
    ttft_s = (lanes[Lane.P0].ttft_ms or 0.0) / 1000
    gaps_s = {lane: (policy.gap_ms or 500.0) / 1000 for lane, policy in lanes.items()}
    rows: list[CallRow] = []
    looks: list[list[tuple[float, int, float]]] = []
    for seed in seeds:
        door = ControlledDoor(lanes)
        world = World(door, costs, replace(load_model().flags, policy="fcfs"), gaps_s=gaps_s)
        world.play(list(_stepped(costs, seed)))
        rows += [row for row in world.rows if row.lane is Lane.P0]
        looks.append([(at, steps, busy_s) for at, steps, busy_s, _ in door.looks])
    result: dict[str, dict[str, float]] = {}
    for number, load in enumerate(STEPS):
        start = number * STEP_S
        part = [row for row in rows if start <= row.at < start + STEP_S]
        result[f"{load}x, from {start:.0f} s"] = {
            "calls": len(part),
            "attainment": _attainment(part, ttft_s),
            "attainment_first_5_s": _attainment([row for row in part if row.at < start + 5], ttft_s),
            "settles_in_s": _settling(looks, start),
        }
    return result


def _with_promises(factor: float) -> Lanes:
    return {
        lane: replace(
            policy,
            ttft_ms=None if policy.ttft_ms is None else policy.ttft_ms * factor,
            gap_ms=None if policy.gap_ms is None else policy.gap_ms * factor,
        )
        for lane, policy in DEFAULT_LANES.items()
    }


def _stepped(costs: CostModel, seed: int) -> Iterator[Run]:
    for number, load in enumerate(STEPS):
        for lane, (part, lengths) in MIX.items():
            rate = load * part / _work_s(costs, lane)
            for run in poisson(seed, rate, STEP_S, lengths, lane=lane, name=f"{lane.name}-{number}"):
                yield replace(run, at=run.at + number * STEP_S)


def _work_s(costs: CostModel, lane: Lane, batch: int = 16) -> float:
    """Engine time of a typical call of the lane, in a batch of so many."""
    prompt, output = TYPICAL[lane]
    token_s = costs.base_s / batch + costs.sequence_s + costs.kv_token_s * (prompt + output / 2)
    return costs.prefill_token_s * prompt + token_s * output


def _attainment(rows: Sequence[CallRow], ttft_s: float) -> float:
    kept = sum(row.late_s is not None and row.late_s <= ttft_s for row in rows)
    return round(kept / len(rows), 4) if rows else 1.0


def _settling(looks: Sequence[Sequence[tuple[float, int, float]]], start: float) -> float:
    """Seconds until steps stay about as long as they are in the second half of the load's step.

    That is within `SETTLED` of it, or within what the mean over seeds is uncertain by: where few calls come, seconds
    differ by chance.
    """
    means, uncertain = [], []
    for second in range(int(STEP_S)):
        begin = start + second
        done: list[tuple[int, float]] = []
        for one in looks:
            part = [look for look in one if begin <= look[0] < begin + 1]
            if len(part) > 1 and part[-1][1] > part[0][1]:
                done.append((part[-1][1] - part[0][1], part[-1][2] - part[0][2]))
        steps = sum(count for count, _ in done)
        mean = sum(busy_s for _, busy_s in done) / max(1, steps)
        means.append(mean)
        # Of a ratio of sums over seeds: what each seed adds to its error.
        spread = math.sqrt(sum((busy_s - mean * count) ** 2 for count, busy_s in done)) / max(1, steps)
        uncertain.append(2 * spread if len(done) > 1 else math.inf)
    rest = statistics.fmean(means[len(means) // 2 :])
    late = [second for second, mean in enumerate(means) if abs(mean - rest) > max(SETTLED * rest, uncertain[second])]
    return float(late[-1] + 1) if late else 0.0


def measure() -> dict[str, Any]:
    table = {}
    for name, (costs, factor) in engines().items():
        table[name] = load_steps(costs, factor)
        for step, cells in table[name].items():
            print(f"{name:<20} {step:<16}" + "  ".join(f"{key} {value}" for key, value in cells.items()), flush=True)
    return {"seeds": list(SEEDS), "settled_within": SETTLED, "load_steps": table}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
