"""The room controller in the twin: steps of load on three engines, and the Harbor burst beside other ways to serve it.

`python -m inferry.bench.controller` prints both tables; `measure` returns the same numbers. Nothing is tuned per engine
but the promises: no room keeps a gap of 30 ms on an engine whose empty step takes 25.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from inferry.domain.jobs import DEFAULT_LANES, Estimate, Footprint, Lane, LanePolicy
from inferry.domain.plans import Load, Room, Tick
from inferry.scheduling.controller import RoomController
from inferry.sim.arrivals import even_lengths, poisson
from inferry.sim.calls import Call, CallRow, Run
from inferry.sim.costs import CostModel, EngineFlags, load_model
from inferry.sim.doors import Direct, Paced
from inferry.sim.engine import Engine
from inferry.sim.gateway import GatewayDoor, as_the_gateway_sees_it
from inferry.sim.harbor import harbor
from inferry.sim.report import report
from inferry.sim.world import Door, World

SEEDS = range(1, 11)
SCALES = (0.5, 0.7)
STEP_SEEDS = range(1, 6)
STEPS = (0.3, 1.5, 0.3)
STEP_S = 20.0
BEAT_S = 0.1
MIX = {
    Lane.P0: (0.2, even_lengths((200, 1200), (20, 120))),
    Lane.P1: (0.3, even_lengths((200, 1600), (20, 200))),
    Lane.P2: (0.5, even_lengths((1000, 5000), (100, 300))),
}
Lanes = dict[Lane, LanePolicy]


class ControlledDoor(GatewayDoor):
    """The gateway with a controller for every worker, fed as dispatch feeds it."""

    def __init__(self, lanes: Lanes, estimate: Callable[[Call], Footprint] = as_the_gateway_sees_it) -> None:
        super().__init__(lanes, Room(), estimate=estimate, controller=self._control, beat_s=BEAT_S)
        self.trims: list[tuple[float, float]] = []

    def open(self, world: World) -> None:
        flags = world.flags
        limits = Room(sequences=flags.max_num_seqs, kv_tokens=flags.kv_tokens)
        self._controllers = [RoomController(self._lanes, limits, flags.max_num_batched_tokens) for _ in world.engines]
        self._decoding = [dict.fromkeys(self._lanes, 0) for _ in world.engines]
        self._seen = [(0.0, 0.0)] * len(world.engines)
        self._room = self._controllers[0].room(0.0)
        super().open(world)

    def first(self, call: Call, now: float) -> None:
        attempt = self._open[call.job_id][1]
        job, sent_at, worker = attempt.job, attempt.sent_at, call.worker or 0
        assert sent_at is not None
        self._decoding[worker][job.lane] += 1
        self._controllers[worker].first_token(job.lane, job.footprint.prefill_tokens, sent_at, now)
        super().first(call, now)

    def ended(self, call: Call, now: float) -> None:
        attempt = self._open[call.job_id][1]
        lane, worker, begun = attempt.job.lane, call.worker or 0, attempt.first_token_at is not None
        self._decoding[worker][lane] -= begun
        self._controllers[worker].ended(lane, now, had_first_token=begun)
        super().ended(call, now)

    def _act(self, tick: Tick, now: float) -> None:
        for plan in tick.plans:
            for job in plan.jobs:
                self._controllers[int(plan.worker)].sent(job.footprint.prefill_tokens, job.lane, now)
        super()._act(tick, now)

    def _control(self, worker: int, engine: Engine, now: float) -> Room:
        controller = self._controllers[worker]
        steps, busy_s = _progress(engine, now)
        steps_before, busy_before = self._seen[worker]
        self._seen[worker] = (steps, busy_s)
        if steps > steps_before:
            gap_s = (busy_s - busy_before) / (steps - steps_before)
            for lane, decoding in self._decoding[worker].items():
                count = round((steps - steps_before) * decoding)
                controller.gaps(lane, count, count * gap_s)
        controller.observe(Load(engine.running, engine.waiting, engine.kv_tokens))
        room = controller.room(now)
        self.trims.append((now, controller.trim))
        return room


def _progress(engine: Engine, now: float) -> tuple[float, float]:
    """Steps and busy seconds so far, those under way in part."""
    under_way, ends_at = engine._under_way, engine.next_at
    if not under_way or ends_at is None:
        return float(engine.steps), engine.busy_s
    gone = now - engine._began_at
    return engine.steps + under_way * gone / max(ends_at - engine._began_at, 1e-9), engine.busy_s + gone


class KnowsItsRuns:
    """What a gateway that remembers runs counts: what a run has sent before is cached."""

    def __init__(self) -> None:
        self._warm: dict[str, int] = {}

    def __call__(self, call: Call) -> Footprint:
        plain = as_the_gateway_sees_it(call)
        warm = self._warm.get(call.run.run_id, 0)
        self._warm[call.run.run_id] = max(warm, call.prompt)
        return Footprint(plain.prompt, Estimate.exactly(min(warm, call.prompt - 1)), plain.output)


# Steps of load.


def engines() -> dict[str, tuple[CostModel, float]]:
    """Cost models, and how much longer than the default the promises are in front of each."""
    gpu = load_model().costs
    slow = CostModel(
        base_s=5 * gpu.base_s,
        prefill_step_s=5 * gpu.prefill_step_s,
        prefill_token_s=5 * gpu.prefill_token_s,
        sequence_s=5 * gpu.sequence_s,
        kv_token_s=5 * gpu.kv_token_s,
        attention_pair_s=5 * gpu.attention_pair_s,
        request_s=gpu.request_s,
        token_s=gpu.token_s,
        reply_s=gpu.reply_s,
    )
    cpu = CostModel(base_s=0.010, prefill_token_s=1e-4, sequence_s=5e-4, kv_token_s=1e-8, reply_s=0.001)
    return {"gpu": (gpu, 1.0), "five times slower": (slow, 5.0), "cpu": (cpu, 2.5)}


def load_steps(
    costs: CostModel, promise_factor: float, seeds: Sequence[int] = STEP_SEEDS
) -> dict[str, dict[str, float]]:
    """P0 attainment in each step of load over all seeds, and the longest that trim took to come to rest after it."""
    lanes = _with_promises(promise_factor)
    ttft_s = (lanes[Lane.P0].ttft_ms or 0.0) / 1000
    gaps_s = {lane: (policy.gap_ms or 500.0) / 1000 for lane, policy in lanes.items()}
    rows: list[CallRow] = []
    trims = []
    for seed in seeds:
        door = ControlledDoor(lanes)
        world = World(door, costs, replace(load_model().flags, policy="fcfs"), gaps_s=gaps_s)
        world.play(list(_stepped(costs, seed)))
        rows += [row for row in world.rows if row.lane is Lane.P0]
        trims.append(door.trims)
    result: dict[str, dict[str, float]] = {}
    for number, load in enumerate(STEPS):
        start = number * STEP_S
        part = [row for row in rows if start <= row.at < start + STEP_S]
        result[f"{load}x, from {start:.0f} s"] = {
            "calls": len(part),
            "attainment": _attainment(part, ttft_s),
            "attainment, first 5 s": _attainment([row for row in part if row.at < start + 5], ttft_s),
            "settles in s": max(_settling(one, start) for one in trims),
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
            name = f"{lane.name}-{number}"
            rate = load * part / _work_s(costs, lane)
            for run in poisson(seed, rate, STEP_S, lengths, lane=lane, name=name):
                yield replace(run, at=run.at + number * STEP_S)


def _work_s(costs: CostModel, lane: Lane, batch: int = 16) -> float:
    """Engine time of a typical call of the lane, in a batch of so many."""
    prompt = {Lane.P0: 700, Lane.P1: 900, Lane.P2: 3000}[lane]
    output = {Lane.P0: 70, Lane.P1: 110, Lane.P2: 200}[lane]
    token_s = costs.base_s / batch + costs.sequence_s + costs.kv_token_s * (prompt + output / 2)
    return costs.prefill_token_s * prompt + token_s * output


def _attainment(rows: Sequence[CallRow], ttft_s: float) -> float:
    kept = sum(row.late_s is not None and row.late_s <= ttft_s for row in rows)
    return round(kept / len(rows), 4) if rows else 1.0


def _settling(trims: Sequence[tuple[float, float]], start: float) -> float:
    """Seconds until the second's mean of trim stays within 0.15 of where it is in the second half of the step."""
    seconds = [[trim for at, trim in trims if start + s <= at < start + s + 1] for s in range(int(STEP_S))]
    means = [statistics.fmean(one) if one else 1.0 for one in seconds]
    rest = statistics.fmean(means[len(means) // 2 :])
    late = [s for s, mean in enumerate(means) if abs(mean - rest) > 0.15]
    return float(late[-1] + 1) if late else 0.0


# The Harbor burst.


def arms() -> dict[str, tuple[Callable[[], Door], EngineFlags]]:
    flags = load_model().flags
    fcfs = replace(flags, policy="fcfs")
    bound = Room(sequences=flags.max_num_seqs, kv_tokens=flags.kv_tokens, prefill_tokens=3072)
    return {
        "direct, first come first served": (Direct, fcfs),
        "direct, engine priority": (Direct, replace(flags, policy="priority")),
        "client-side sketch 3072,128,8": (partial(Paced, 3072, 128, 8), fcfs),
        "lanes, constant bound 3072": (partial(GatewayDoor, DEFAULT_LANES, bound), fcfs),
        "lanes, no room control": (partial(GatewayDoor, DEFAULT_LANES, replace(bound, prefill_tokens=None)), fcfs),
        "lanes, controller": (partial(ControlledDoor, DEFAULT_LANES), fcfs),
        "lanes, controller, cache guessed": (lambda: ControlledDoor(DEFAULT_LANES, KnowsItsRuns()), fcfs),
    }


def harbor_table(scale: float, seeds: Sequence[int] = SEEDS) -> dict[str, dict[str, float]]:
    """Means over the seeds; times and rates also as parts of first come first served."""
    costs = load_model().costs
    table: dict[str, dict[str, float]] = {}
    for name, (make, flags) in arms().items():
        rows = []
        for seed in seeds:
            world = World(make(), costs, flags)
            world.play(harbor(seed, scale=scale))
            one = report(world, name)
            p2_done = max(row.at + row.end_s for row in world.rows if row.lane is Lane.P2)
            kept = [one.lanes[lane.name].attainment for lane in Lane]
            rows.append((*kept, one.wall_s, p2_done, one.output_rate))
        p0, p1, p2, wall_s, p2_done_s, rate = [statistics.fmean(column) for column in zip(*rows, strict=True)]
        worst = min(row[0] for row in rows)
        table[name] = {"P0": p0, "P0 worst": worst, "P1": p1, "P2": p2, "all done s": wall_s}
        table[name] |= {"P2 done s": p2_done_s, "tokens/s": rate}
    first = table["direct, first come first served"]
    for row in table.values():
        row["all done x"] = row["all done s"] / first["all done s"]
        row["tokens/s x"] = row["tokens/s"] / first["tokens/s"]
    return {name: {key: round(value, 4) for key, value in row.items()} for name, row in table.items()}


def measure() -> dict[str, object]:
    return {
        "load steps": {name: load_steps(costs, factor) for name, (costs, factor) in engines().items()},
        **{f"harbor, scale {scale}": harbor_table(scale) for scale in SCALES},
    }


def main() -> None:
    for title, rows in measure().items():
        print(f"\n{title}")
        assert isinstance(rows, dict)
        for name, cells in rows.items():
            print(f"  {name:<34}" + "  ".join(f"{key} {value}" for key, value in cells.items()))


if __name__ == "__main__":
    main()
