"""The room controller in the twin: steps of load on three engines, with the same defaults on each.

Load goes from 0.3 of what the engine can do to 1.5 and back, where what it can do is measured: what it serves when
there is always more. P0 has to keep its promise throughout, and what the controller steers, the length of the engine's
steps, has to come to rest. Nothing is tuned per engine but the promises: no room keeps a gap of 30 ms on an engine
whose empty step takes 25.

Not all of the time that takes is the controller's. Sequences that were let in stay until they are done, so an engine is
filling for as long as a call stays in it, whatever the room; and what was queued under overload has to be served before
a load of 0.3 looks like one. So the same arrivals are played again before an oracle, which has from the first moment of
a step of load the rooms that the controller came to in its last seconds, and before a door that keeps no promise and
always lets in all that the engine holds. What all take is the engine's. The figures:

- `settles_in_s`: from the step of load until steps stay as long as they are in the end.
- `oracle_settles_in_s`: the same with the oracle.
- `apart_from_oracle_s`: until steps stay as long as the oracle's. That is the controller's own part.
- `open_settles_in_s`: the same as the first without any room: as soon as this engine can be rid of what has come.
- `backlog_gone_s`: until on average over seeds less than one batch job waits, where one did. While there is a backlog
  the oracle is reckless: it has the wide rooms of a quiet engine. `settles_after_backlog_s`: from then on.
- `stays_s`: how long a P1 call is in the engine, in the end.

Backlogs of different seeds are gone at different moments, seconds apart, so a mean over seeds at one moment after the
step mixes engines that still serve theirs with others that are at rest. `after_backlog` looks at every seed from its
own moment on, the first at which no batch job waits, and beside it stands an oracle that takes over from the controller
at that moment: until then both are one and the same, so it finds the same engine, with the same sequences in it.

- `gone_s`: when that moment is, after the step; the middle one of the seeds.
- `settles_in_s`, `oracle_settles_in_s`, `apart_from_oracle_s`: as above, from that moment on.
- `empties_in_s`: until the last sequence has ended that was in the engine then; the middle one of the seeds.
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
"""Parts of what the engine can do, and for how many seconds. The last is longer: there is a backlog to be served."""
STEADY_S = 10.0
"""The end of every step of load, in which everything is taken to be at rest."""
SETTLED = 0.15
NOISE_FACTOR = 3.0
"""Differences up to so many times the error of a mean over seeds may be chance: many seconds are looked at."""
MIX = {
    Lane.P0: (0.2, uniform_lengths((200, 1200), (20, 120))),
    Lane.P1: (0.3, uniform_lengths((200, 1600), (20, 200))),
    Lane.P2: (0.5, uniform_lengths((1000, 5000), (100, 300))),
}
TYPICAL = {Lane.P0: (700, 70), Lane.P1: (900, 110), Lane.P2: (3000, 200)}
OVERLOAD_INTENSITY = 4.0
CapacitySample = tuple[float, int, float, Capacity]
"""When a door looked at the engine, what steps and busy seconds that had behind it, and what room it was given."""
Second = tuple[float, float]
"""The mean length of the engine's steps in one second, over seeds, and what may be chance in it."""
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


class Oracle(ControlledFrontend):
    """Has what a controller granted in the end of each step of load, from its beginning on; before `since` it is that
    controller itself.
    """

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
    """What came of each seed with one kind of door."""

    rows: list[list[CallRow]]
    capacity_samples: list[list[CapacitySample]]
    queued: list[list[tuple[float, float]]]
    """When each batch job came and when it was sent."""

    def of_lane(self, lane: Lane, begin: float, end: float) -> list[CallRow]:
        """Calls of all seeds that came in that time."""
        return [row for rows in self.rows for row in rows if row.lane is lane and begin <= row.at < end]


def full_load(costs: CostModel) -> float:
    """The intensity at which as much comes as the engine serves when there is always more."""
    seconds = 20.0
    simulation = Simulation(Direct(), costs, _flags())
    simulation.play(run for lane in MIX for run in _calls(costs, lane, 1, OVERLOAD_INTENSITY, seconds, lane.name))
    return OVERLOAD_INTENSITY * seconds / max(row.at + row.end_s for row in simulation.rows)


def load_steps(costs: CostModel, slo_factor: float, seeds: Sequence[int] = SEEDS) -> dict[str, dict[str, Any]]:
    """P0 attainment in each step of load over all seeds, and how long the engine's steps take to come to rest."""
    lanes = _scaled_slo(slo_factor)
    ttft_s = (lanes[Lane.P0].ttft_ms or 0.0) / 1000
    full = full_load(costs)
    workloads = [list(_stepped(costs, full, seed)) for seed in seeds]
    ours = _play(workloads, lanes, costs, [ControlledFrontend(lanes) for _ in seeds])
    oracle = _play(workloads, lanes, costs, [Oracle(lanes, granted) for granted in ours.capacity_samples])
    # All that the engine holds, always: what limits the gateway has, and nothing computed.
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
    """Every seed from the moment on at which its own backlog was gone, beside an oracle that takes over there."""
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
    """Load, beginning and length of every step of load."""
    start = 0.0
    for load, seconds in STEPS:
        yield load, start, seconds
        start += seconds


def _steady_time(now: float) -> float:
    """A time in the end of the same step of load: its last seconds again and again, and themselves at last."""
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
    """Engine time of a typical call of the lane, in a batch of so many."""
    prompt, output = TYPICAL[lane]
    token_s = costs.base_s / batch + costs.sequence_s + costs.kv_token_s * (prompt + output / 2)
    return costs.prefill_token_s * prompt + token_s * output


def _attainment(rows: Sequence[CallRow], ttft_s: float) -> float:
    attained = sum(row.late_s is not None and row.late_s <= ttft_s for row in rows)
    return round(attained / len(rows), 4) if rows else 1.0


def _trajectory(
    capacity_samples: Sequence[Sequence[CapacitySample]], starts: Sequence[float], seconds: float
) -> list[Second]:
    """How long steps are, second by second, each seed from its own start on."""
    found = []
    for second in range(int(seconds)):
        done: list[tuple[int, float]] = []
        for one, start in zip(capacity_samples, starts, strict=True):
            part = [sample for sample in one if second <= sample[0] - start < second + 1]
            if len(part) > 1 and part[-1][1] > part[0][1]:
                done.append((part[-1][1] - part[0][1], part[-1][2] - part[0][2]))
        steps = sum(count for count, _ in done)
        mean = sum(busy_s for _, busy_s in done) / max(1, steps)
        # Of a ratio of sums over seeds: what each seed adds to its error.
        error = math.sqrt(sum((busy_s - mean * count) ** 2 for count, busy_s in done)) / max(1, steps)
        found.append((mean, NOISE_FACTOR * error if len(done) > 1 else math.inf))
    return found


def _steady_mean(trajectory: Sequence[Second]) -> Second:
    return statistics.fmean(mean for mean, _ in trajectory[-int(STEADY_S) :]), 0.0


def _settling(trajectory: Sequence[Second], target: Sequence[Second]) -> float:
    """Seconds until steps stay within `SETTLED` of what is wanted, or within what may be chance: where few calls come,
    seconds differ by that.
    """
    late = [
        second
        for second, ((mean, noise), (steady, steady_noise)) in enumerate(zip(trajectory, target, strict=True))
        if abs(mean - steady) > max(SETTLED * steady, math.hypot(noise, steady_noise))
    ]
    return float(late[-1] + 1) if late else 0.0


def _backlog_gone(queued: Sequence[Sequence[tuple[float, float]]], start: float, seconds: float) -> float | None:
    """Seconds until on average less than one batch job waits; None where that is so all the time, or never."""
    waiting = [
        sum(arrived_at <= at < sent for one in queued for arrived_at, sent in one) / len(queued)
        for at in (start + second for second in range(int(seconds) + 1))
    ]
    some = [second for second, count in enumerate(waiting) if count >= 1]
    return None if not some or some[-1] == int(seconds) else float(some[-1] + 1)


def _backlog_end(queue: Sequence[tuple[float, float]], start: float) -> float:
    """The first moment from `start` on at which nobody of the queue waits."""
    at = start
    for arrived_at, sent in sorted(queue):
        if arrived_at > at:
            break
        at = max(at, sent)
    return at


def _drain_s(rows: Sequence[CallRow], at: float) -> float:
    """From that moment until the last call has ended that had been sent by then."""
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
