"""The capacity controller in the simulator: steps of load on three engines, with the same defaults on each.

Load goes from 0.3 of the engine's service rate to 1.5 and back; that rate is measured under a permanent backlog. P0
must meet its target throughout, and the controlled value, the duration of engine steps, must settle. Only the SLO
targets differ per engine: no capacity meets an inter-token target of 30 ms on an engine whose empty step takes 25 ms.

Part of the settling time is the engine's own. Admitted sequences stay until they are done, so an engine fills up for as
long as a call stays in it; and a backlog from overload must be served before a load of 0.3 has an effect. So the same
arrivals are played with an oracle, which has the controller's final capacity of a load step from its beginning, and
with a front end that always admits all that the engine holds. Time that all of them need is the engine's. The figures:

- `settles_in_s`: from the step of load until the step duration stays at its final value.
- `oracle_settles_in_s`: the same with the oracle.
- `apart_from_oracle_s`: until the step duration stays at the oracle's. That is the controller's own part.
- `open_settles_in_s`: the same as the first without capacity control: the engine's own time.
- `backlog_gone_s`: until fewer than one batch job is queued, on average over seeds, where there was a backlog. During a
  backlog the oracle admits too much: it has the capacity of a quiet engine. `settles_after_backlog_s`: after that time.
- `stays_s`: how long a P1 call stays in the engine, at the end.

Backlogs of different seeds end seconds apart, so a mean over seeds at one time mixes busy engines with settled ones.
`after_backlog` aligns every seed at the end of its own backlog. There an oracle takes over from the controller, on the
same engine with the same sequences.

- `gone_s`: the end of the backlog after the load step; median over seeds.
- `settles_in_s`, `oracle_settles_in_s`, `apart_from_oracle_s`: as above, from that time on.
- `empties_in_s`: until the last sequence that was in the engine then has ended; median over seeds.
"""

import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.sim.arrivals import poisson, uniform_lengths
from inferry.sim.baselines import Direct
from inferry.sim.calls import CallRow, Run
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.costs import CostModel, EngineFlags, load_model
from inferry.sim.engine import Engine
from inferry.sim.simulation import Simulation

SEEDS = range(20)
STEPS = ((0.3, 20.0), (1.5, 20.0), (0.3, 40.0))
"""Fractions of the engine's service rate, and seconds. The last is longer: it has a backlog to serve."""
STEADY_S = 10.0
"""Seconds at the end of every load step that count as settled."""
SETTLED = 0.15
NOISE_FACTOR = 3.0
"""Differences up to this multiple of the standard error over seeds count as noise: many seconds are compared."""
MIX = {
    Lane.P0: (0.2, uniform_lengths((200, 1200), (20, 120))),
    Lane.P1: (0.3, uniform_lengths((200, 1600), (20, 200))),
    Lane.P2: (0.5, uniform_lengths((1000, 5000), (100, 300))),
}
TYPICAL = {Lane.P0: (700, 70), Lane.P1: (900, 110), Lane.P2: (3000, 200)}
OVERLOAD_INTENSITY = 4.0
CapacitySample = tuple[float, int, float, Capacity]
"""Time of an observation, steps and busy seconds of the engine so far, and the capacity granted."""
Second = tuple[float, float]
"""Mean duration of the engine's steps in one second, over seeds, and its standard error."""
Lanes = dict[Lane, LanePolicy]


def engines() -> dict[str, tuple[CostModel, float]]:
    """Cost models, and the factor on the default targets for each."""
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


class Oracle(ControlledFrontend):
    """Grants the final capacity of each load step from its beginning; before `since` it is the controller itself."""

    def __init__(self, lanes: Lanes, granted: Sequence[CapacitySample], since: float = 0.0) -> None:
        super().__init__(lanes)
        self._granted = granted
        self._times = [at for at, *_ in granted]
        self._since = since

    def _compute_capacity(self, worker: int, engine: Engine, now: float) -> Capacity:
        capacity = super()._compute_capacity(worker, engine, now)
        if now < self._since:
            return capacity
        place = bisect_right(self._times, _steady_time(now)) - 1
        return self._granted[max(0, place)][3]


class SeedResults(Struct):
    """The results of each seed with one kind of front end."""

    rows: list[list[CallRow]]
    capacity_samples: list[list[CapacitySample]]
    queued: list[list[tuple[float, float]]]
    """When each batch job arrived and was sent."""

    def of_lane(self, lane: Lane, begin: float, end: float) -> list[CallRow]:
        """Calls of all seeds that arrived in this time."""
        return [row for rows in self.rows for row in rows if row.lane is lane and begin <= row.at < end]


def full_load(costs: CostModel) -> float:
    """The intensity at which arrivals equal the engine's service rate under a permanent backlog."""
    seconds = 20.0
    simulation = Simulation(Direct(), costs, _flags())
    simulation.play(run for lane in MIX for run in _calls(costs, lane, 1, OVERLOAD_INTENSITY, seconds, lane.name))
    return OVERLOAD_INTENSITY * seconds / max(row.at + row.end_s for row in simulation.rows)


def load_steps(costs: CostModel, slo_factor: float, seeds: Sequence[int] = SEEDS) -> dict[str, dict[str, Any]]:
    """P0 attainment in each load step over all seeds, and the settling times of the step duration."""
    lanes = _scaled_slo(slo_factor)
    ttft_s = (lanes[Lane.P0].ttft_ms or 0.0) / 1000
    full = full_load(costs)
    workloads = [list(_stepped(costs, full, seed)) for seed in seeds]
    ours = _play(workloads, lanes, costs, [ControlledFrontend(lanes) for _ in seeds])
    oracle = _play(workloads, lanes, costs, [Oracle(lanes, granted) for granted in ours.capacity_samples])
    # Always the full capacity of the engine: only the gateway's limits, no control.
    without_control = _play(workloads, lanes, costs, [ControlledFrontend(lanes, fixed=(0,)) for _ in seeds])
    result: dict[str, dict[str, Any]] = {}
    for load, start, seconds in _spans():
        part = ours.of_lane(Lane.P0, start, start + seconds)
        late = ours.of_lane(Lane.P1, start + seconds - STEADY_S, start + seconds)
        with_ours, with_oracle, with_all = (
            _trajectory(one.capacity_samples, [start] * len(seeds), seconds) for one in (ours, oracle, without_control)
        )
        settles_in_s = _settling(with_ours, [_steady_mean(with_ours)] * len(with_ours))
        backlog_gone_s = _backlog_gone(ours.queued, start, seconds)
        result[f"{load}x, from {start:.0f} s"] = {
            "calls": len(part),
            "attainment": _attainment(part, ttft_s),
            "attainment_first_5_s": _attainment([row for row in part if row.at < start + 5], ttft_s),
            "settles_in_s": settles_in_s,
            "oracle_settles_in_s": _settling(with_oracle, [_steady_mean(with_oracle)] * len(with_oracle)),
            "apart_from_oracle_s": _settling(with_ours, with_oracle),
            "open_settles_in_s": _settling(with_all, [_steady_mean(with_all)] * len(with_all)),
            "backlog_gone_s": backlog_gone_s,
            "settles_after_backlog_s": None if backlog_gone_s is None else max(0.0, settles_in_s - backlog_gone_s),
            "after_backlog": None
            if backlog_gone_s is None
            else _after_backlog(workloads, lanes, costs, ours, (start, seconds)),
            "stays_s": round(statistics.median(row.end_s - (row.sent_s or 0.0) for row in late), 1),
            "step_ms": [round(1000 * mean, 1) for mean, _ in with_ours],
            "oracle_step_ms": [round(1000 * mean, 1) for mean, _ in with_oracle],
            "open_step_ms": [round(1000 * mean, 1) for mean, _ in with_all],
        }
    return result


def _after_backlog(
    workloads: Sequence[Sequence[Run]], lanes: Lanes, costs: CostModel, ours: SeedResults, span: tuple[float, float]
) -> dict[str, Any]:
    """Every seed from the end of its own backlog, beside an oracle that takes over there."""
    start, seconds = span
    backlog_ends = [_backlog_end(queue, start) for queue in ours.queued]
    frontends = [
        Oracle(lanes, granted, since) for granted, since in zip(ours.capacity_samples, backlog_ends, strict=True)
    ]
    oracle = _play(workloads, lanes, costs, frontends)
    remaining_s = float(int(start + seconds - max(backlog_ends)))
    with_ours, with_oracle = (_trajectory(one.capacity_samples, backlog_ends, remaining_s) for one in (ours, oracle))
    steady, oracle_steady = (
        _steady_mean(_trajectory(one.capacity_samples, [start] * len(backlog_ends), seconds)) for one in (ours, oracle)
    )
    return {
        "gone_s": round(statistics.median(backlog_ends) - start, 1),
        "settles_in_s": _settling(with_ours, [steady] * len(with_ours)),
        "oracle_settles_in_s": _settling(with_oracle, [oracle_steady] * len(with_oracle)),
        "apart_from_oracle_s": _settling(with_ours, with_oracle),
        "empties_in_s": round(statistics.median(map(_drain_s, ours.rows, backlog_ends)), 1),
        "step_ms": [round(1000 * mean, 1) for mean, _ in with_ours],
        "oracle_step_ms": [round(1000 * mean, 1) for mean, _ in with_oracle],
    }


def _play(
    workloads: Sequence[Sequence[Run]], lanes: Lanes, costs: CostModel, frontends: Sequence[ControlledFrontend]
) -> SeedResults:
    itl_s = {lane: (policy.itl_ms or 500.0) / 1000 for lane, policy in lanes.items()}
    played = SeedResults([], [], [])
    for runs, frontend in zip(workloads, frontends, strict=True):
        simulation = Simulation(frontend, costs, _flags(), itl_s=itl_s)
        simulation.play(runs)
        played.rows.append(simulation.rows)
        played.capacity_samples.append(frontend.capacity_samples)
        batch = [row for row in simulation.rows if row.lane is Lane.P2]
        played.queued.append([(row.at, row.at + (row.sent_s or 0.0)) for row in batch])
    return played


def _flags() -> EngineFlags:
    return replace(load_model().flags, policy="fcfs")


def _spans() -> Iterator[tuple[float, float, float]]:
    """Load, start and duration of every load step."""
    start = 0.0
    for load, seconds in STEPS:
        yield load, start, seconds
        start += seconds


def _steady_time(now: float) -> float:
    """A time within the settled end of the same load step, repeated over the step."""
    for _, start, seconds in _spans():
        if now < start + seconds:
            steady = start + seconds - STEADY_S
            return steady + (now - steady) % STEADY_S
    return now


def _scaled_slo(factor: float) -> Lanes:
    return {
        lane: replace(
            policy,
            ttft_ms=None if policy.ttft_ms is None else policy.ttft_ms * factor,
            itl_ms=None if policy.itl_ms is None else policy.itl_ms * factor,
        )
        for lane, policy in DEFAULT_LANES.items()
    }


def _stepped(costs: CostModel, full: float, seed: int) -> Iterator[Run]:
    for number, (load, start, seconds) in enumerate(_spans()):
        for lane in MIX:
            for run in _calls(costs, lane, seed, load * full, seconds, f"{lane.name}-{number}"):
                yield replace(run, at=run.at + start)


def _calls(costs: CostModel, lane: Lane, seed: int, intensity: float, seconds: float, name: str) -> Iterator[Run]:
    part, lengths = MIX[lane]
    return poisson(seed, intensity * part / _work_s(costs, lane), seconds, lengths, lane=lane, name=name)


def _work_s(costs: CostModel, lane: Lane, batch: int = 16) -> float:
    """Engine time of a typical call of the lane in a batch of this size."""
    prompt, output = TYPICAL[lane]
    token_s = costs.base_s / batch + costs.sequence_s + costs.kv_token_s * (prompt + output / 2)
    return costs.prefill_token_s * prompt + token_s * output


def _attainment(rows: Sequence[CallRow], ttft_s: float) -> float:
    attained = sum(row.late_s is not None and row.late_s <= ttft_s for row in rows)
    return round(attained / len(rows), 4) if rows else 1.0


def _trajectory(
    capacity_samples: Sequence[Sequence[CapacitySample]], starts: Sequence[float], seconds: float
) -> list[Second]:
    """Step durations by second, each seed from its own start."""
    found = []
    for second in range(int(seconds)):
        done: list[tuple[int, float]] = []
        for one, start in zip(capacity_samples, starts, strict=True):
            part = [sample for sample in one if second <= sample[0] - start < second + 1]
            if len(part) > 1 and part[-1][1] > part[0][1]:
                done.append((part[-1][1] - part[0][1], part[-1][2] - part[0][2]))
        steps = sum(count for count, _ in done)
        mean = sum(busy_s for _, busy_s in done) / max(1, steps)
        # Standard error of a ratio of sums over seeds.
        error = math.sqrt(sum((busy_s - mean * count) ** 2 for count, busy_s in done)) / max(1, steps)
        found.append((mean, NOISE_FACTOR * error if len(done) > 1 else math.inf))
    return found


def _steady_mean(trajectory: Sequence[Second]) -> Second:
    return statistics.fmean(mean for mean, _ in trajectory[-int(STEADY_S) :]), 0.0


def _settling(trajectory: Sequence[Second], target: Sequence[Second]) -> float:
    """Seconds until step durations stay within `SETTLED` of the wanted value, or within the noise."""
    late = [
        second
        for second, ((mean, noise), (steady, steady_noise)) in enumerate(zip(trajectory, target, strict=True))
        if abs(mean - steady) > max(SETTLED * steady, math.hypot(noise, steady_noise))
    ]
    return float(late[-1] + 1) if late else 0.0


def _backlog_gone(queued: Sequence[Sequence[tuple[float, float]]], start: float, seconds: float) -> float | None:
    """Seconds until on average less than one batch job is queued; None if that is always or never so."""
    waiting = [
        sum(arrived_at <= at < sent for one in queued for arrived_at, sent in one) / len(queued)
        for at in (start + second for second in range(int(seconds) + 1))
    ]
    some = [second for second, count in enumerate(waiting) if count >= 1]
    return None if not some or some[-1] == int(seconds) else float(some[-1] + 1)


def _backlog_end(queue: Sequence[tuple[float, float]], start: float) -> float:
    """The first time from `start` on at which the queue is empty."""
    at = start
    for arrived_at, sent in sorted(queue):
        if arrived_at > at:
            break
        at = max(at, sent)
    return at


def _drain_s(rows: Sequence[CallRow], at: float) -> float:
    """From this time until the last call that was sent before it has ended."""
    ends = [row.at + row.end_s for row in rows if row.sent_s is not None and row.at + row.sent_s <= at]
    return max([at, *ends]) - at


def measure() -> dict[str, Any]:
    table = {}
    for name, (costs, factor) in engines().items():
        table[name] = load_steps(costs, factor)
        for step, cells in table[name].items():
            print(f"{name:<18} {step:<16}" + _line(cells), flush=True)
    return {"seeds": list(SEEDS), "settled_within": SETTLED, "load_steps": table}


def _line(cells: dict[str, Any]) -> str:
    shown = {key: value for key, value in cells.items() if not key.endswith("step_ms")}
    return "  ".join(f"{key} {_line(value) if isinstance(value, dict) else value}" for key, value in shown.items())


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
