"""Lower bounds for any schedule that meets the SLO targets, on the Harbor burst in the simulator's cost model.

How soon could the batch jobs, and everything, be done by *any* schedule that meets the targets of 99 % of the P0 calls
and of 99 % of the P1 calls? The schedule may know all arrivals in advance, place every token freely, and use an engine
whose steps are limited only by their contents. Three things bound it:

**Work.** Every distinct prompt block is computed once and stays cached for all later calls; an incomplete block is
computed by each call. Every token after a call's first reads the context before it. Nothing is computed twice; requests
and cancelled runs cost nothing.

**Steps.** Every step takes at least `base_s`, and a call produces one token per step. A call of n tokens that meets its
target produces them between its arrival a and a + ttft + (n - 1) * itl, so n steps lie in that window. Calls of a run
are sequential: calls i to j take as many steps as they have tokens together, between the earliest arrival of i
(everything before it took only its steps and tool times) and the latest end of j (every call before it ended at its
limit). These windows are the same for every schedule. Windows that do not overlap share no step, so any family of such
windows gives a lower bound on the number of steps.

**Misses.** One call in a hundred may be late, and after a late call the rest of its run may be late. So a whole run is
removed from the sums for each miss, those with the largest effect first. For steps, several families that share no run
are taken: m misses cannot invalidate all of them, and the best family after the worst m removals counts.

Work and steps up to a time T take at most T:

    T >= work of all batch jobs + work of live tokens due by T + base_s * steps forced by T     batch jobs done at T
    T >= work of everything + base_s * all forced steps                                         everything done at T

The first is solved by raising T from zero while the right side is larger: it only grows with T, so no smaller T is
possible. Every approximation favours the schedule. A target above its bound is not excluded, which does not prove that
it is possible.
"""

import json
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import floor
from typing import Any, NamedTuple

from msgspec import Struct

from benchmarks.simulator import SEEDS
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.sim.baselines import Direct
from inferry.sim.calls import Run
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.costs import CostModel, EngineModel, load_model
from inferry.sim.harbor import harbor
from inferry.sim.prompts import block_hashes, length
from inferry.sim.report import HARBOR_TTFT_S, report
from inferry.sim.simulation import HARBOR_ITL_S, Frontend, Simulation

LIVE = (Lane.P0, Lane.P1)
MIN_ATTAINMENT = 0.99
P2_DONE_X, RATE_X = 1.05, 0.98
"""Targets relative to direct (FCFS): time until the batch jobs are done, and output rate."""
SPARE_SETS = 6
"""Families beyond those that misses could invalidate. More of them never make the bound wrong."""


class Window(NamedTuple):
    """Between the two times there are at least `steps` steps, if the run meets its targets."""

    begins: float
    ends: float
    steps: int
    run: str


class _Call(Struct, frozen=True, gc=False):
    """A call and its minimum work. `own_s` is for prompt tokens that no other run shares."""

    at_latest: float
    prompt: int
    output: int
    own_s: float
    shared: frozenset[tuple[int, int]]
    """Blocks shared with other runs: hash and position in the prompt."""


class _Run(Struct, frozen=True):
    run_id: str
    lane: Lane
    calls: tuple[_Call, ...]


class Bounds(Struct, frozen=True, kw_only=True):
    """Seconds. No schedule that meets the targets is done sooner."""

    work_s: float
    steps: int
    wall_s: float
    p2_done_s: float
    misses: dict[str, int]
    max_output_tokens: int
    """Output tokens of all calls, cancelled runs in full."""


# -- steps -----------------------------------------------------------------------------------------------------------


def windows(runs: Iterable[Run], costs: CostModel) -> list[Window]:
    """For every live run and any consecutive calls of it: the steps that produce their tokens."""
    found = []
    for run in runs:
        if run.lane not in LIVE or run.cancel_after_s is not None:
            continue
        ttft_s, itl_s = HARBOR_TTFT_S[run.lane], HARBOR_ITL_S[run.lane]
        begins, ends = [], []
        earliest = latest = run.at
        for step in run.steps:
            begins.append(earliest)
            earliest += step.output * costs.base_s + costs.reply_s + step.tool_s
            latest += ttft_s + itl_s * (step.output - 1)
            ends.append(latest - costs.reply_s)
            latest += step.tool_s
        for first, begin in enumerate(begins):
            steps = 0
            for step, end in zip(run.steps[first:], ends[first:], strict=True):
                steps += step.output
                found.append(Window(begin, end, steps, run.run_id))
    return found


def max_disjoint_windows(among: Iterable[Window]) -> list[Window]:
    """Windows that do not overlap and hold the most steps together."""
    ordered = sorted(among, key=lambda window: window.ends)
    ends = [window.ends for window in ordered]
    most = [0]
    before: list[int | None] = [None]
    for number, window in enumerate(ordered):
        place = bisect_right(ends, window.begins, 0, number)
        taken = most[place] + window.steps
        most.append(max(taken, most[-1]))
        before.append(place if taken > most[-2] else None)
    disjoint, place = [], len(ordered)
    while place:
        then = before[place]
        if then is None:
            place -= 1
        else:
            disjoint.append(ordered[place - 1])
            place = then
    return disjoint[::-1]


def min_steps(among: Sequence[Window], misses: int) -> int:
    """Minimum number of steps, whichever runs are removed for misses."""
    disjoint_sets: list[list[int]] = []
    left = list(among)
    while left and len(disjoint_sets) <= misses + SPARE_SETS:
        of_run: Counter[str] = Counter()
        for window in max_disjoint_windows(left):
            of_run[window.run] += window.steps
        disjoint_sets.append(sorted(of_run.values(), reverse=True))
        left = [window for window in left if window.run not in of_run]
    low, high = 0, max(map(sum, disjoint_sets), default=0)
    while low < high:
        middle = (low + high) // 2
        if sum(_dropped_until(disjoint, middle) for disjoint in disjoint_sets) <= misses:
            high = middle
        else:
            low = middle + 1
    return low


def _dropped_until(disjoint: Sequence[int], steps: int) -> int:
    """How many runs, largest first, must be removed until at most this many steps are left."""
    left, dropped = sum(disjoint), 0
    while left > steps:
        left -= disjoint[dropped]
        dropped += 1
    return dropped


# -- work ------------------------------------------------------------------------------------------------------------


class Work:
    """The minimum work of a workload's runs, for any schedule."""

    def __init__(self, runs: Sequence[Run], model: EngineModel) -> None:
        self._costs, self._block = model.costs, model.flags.block_tokens
        self._reply_s = model.costs.reply_s
        min_attainment = [run for run in runs if run.cancel_after_s is None]
        self._salts = {tenant: salt for salt, tenant in enumerate(sorted({run.tenant for run in min_attainment}))}
        blocks = {run.run_id: self._blocks(run) for run in min_attainment}
        self._users = Counter(name for of_run in blocks.values() for name in set().union(*of_run))
        self._runs = [self._needs(run, blocks[run.run_id]) for run in min_attainment]

    def _blocks(self, run: Run) -> list[set[tuple[int, int]]]:
        """For each call, the prompt blocks that could be cached; the last token is always computed."""
        found = []
        for step in run.steps:
            names = block_hashes(step.prompt, self._block, self._salts[run.tenant])
            most = (length(step.prompt) - 1) // self._block
            found.append({(name, place) for place, name in enumerate(names[:most])})
        return found

    def _needs(self, run: Run, blocks: Sequence[set[tuple[int, int]]]) -> _Run:
        calls: list[_Call] = []
        latest = run.at
        known: set[tuple[int, int]] = set()
        for step, names in zip(run.steps, blocks, strict=True):
            prompt = length(step.prompt)
            rest = prompt - len(names) * self._block
            own = [name for name in names - known if self._users[name] == 1]
            own_s = self._prompt_s(prompt - rest, rest) + sum(self._block_s(name) for name in own)
            known |= names
            shared = frozenset(name for name in names if self._users[name] > 1)
            calls.append(_Call(latest, prompt, step.output, own_s, shared))
            latest += HARBOR_TTFT_S[run.lane] + HARBOR_ITL_S[run.lane] * (step.output - 1) + step.tool_s
        return _Run(run.run_id, run.lane, tuple(calls))

    def _block_s(self, name: tuple[int, int]) -> float:
        return self._prompt_s(name[1] * self._block, self._block)

    def _prompt_s(self, before: int, tokens: int) -> float:
        costs = self._costs
        return costs.prefill_token_s * tokens + costs.attention_pair_s * tokens * (before + tokens / 2)

    def _decode_s(self, call: _Call, tokens: int) -> float:
        """Work of the first tokens of a call. The first one needs the prompt."""
        costs, after = self._costs, tokens - 1
        return costs.sequence_s * after + costs.kv_token_s * (after * call.prompt + after * tokens / 2)

    def total_s(self) -> float:
        return self._sum(((run, run.calls, [call.output for call in run.calls]) for run in self._runs), {})

    def min_work_s(self, until: float, misses: Mapping[Lane, int]) -> float:
        """All of P2 and the live work due by this time, without the runs whose removal has the largest effect."""
        return self._sum((self._due(run, until) for run in self._runs), misses)

    def _due(self, run: _Run, until: float) -> tuple[_Run, Sequence[_Call], Sequence[int]]:
        """The calls of a run that must have begun by this time, and their minimum number of tokens."""
        if run.lane not in LIVE:
            return run, run.calls, [call.output for call in run.calls]
        ttft_s, itl_s = HARBOR_TTFT_S[run.lane], HARBOR_ITL_S[run.lane]
        calls, tokens = [], []
        for call in run.calls:
            gone = until + self._reply_s - call.at_latest - ttft_s
            if gone >= 0:
                calls.append(call)
                tokens.append(min(call.output, 1 + floor(gone / itl_s)))
        return run, calls, tokens

    def _sum(self, needed: Iterable[tuple[_Run, Sequence[_Call], Sequence[int]]], misses: Mapping[Lane, int]) -> float:
        own: dict[Lane, list[float]] = {lane: [] for lane in Lane}
        shared: list[tuple[Lane, set[tuple[int, int]]]] = []
        users: Counter[tuple[int, int]] = Counter()
        for run, calls, tokens in needed:
            names = set().union(*(call.shared for call in calls))
            users.update(names)
            shared.append((run.lane, names))
            own[run.lane].append(
                sum(call.own_s + self._decode_s(call, n) for call, n in zip(calls, tokens, strict=True))
            )
        total = sum(map(sum, own.values())) + sum(map(self._block_s, users))
        # A block shared by more runs than may be removed must be computed anyway.
        few = sum(misses.values())
        droppable: dict[Lane, list[float]] = {lane: [] for lane in Lane}
        places = dict.fromkeys(Lane, 0)
        for lane, names in shared:
            alone_s = own[lane][places[lane]]
            places[lane] += 1
            droppable[lane].append(alone_s + sum(self._block_s(name) for name in names if users[name] <= few))
        return total - sum(sum(sorted(droppable[lane])[-count:]) for lane, count in misses.items() if count)


# -- bounds ----------------------------------------------------------------------------------------------------------


def bounds(runs: Sequence[Run], model: EngineModel, min_attainment: float = MIN_ATTAINMENT) -> Bounds:
    """The bounds for any schedule that meets the targets of these fractions of P0 and P1 calls."""
    planned = Counter({run.lane: 0 for run in runs})
    for run in runs:
        planned[run.lane] += len(run.steps)
    misses = {lane: floor((1 - min_attainment) * planned[lane] + 1e-9) for lane in LIVE}
    work, base_s = Work(runs, model), model.costs.base_s
    # P1's inter-token target is so long that its windows hold few steps.
    of_p0 = {run.run_id for run in runs if run.lane is Lane.P0}
    crowded = [window for window in windows(runs, model.costs) if window.run in of_p0]
    steps, work_s = min_steps(crowded, misses[Lane.P0]), work.total_s()
    until = 0.0
    while True:
        due = [window for window in crowded if window.ends <= until]
        needed = work.min_work_s(until, misses) + base_s * min_steps(due, misses[Lane.P0])
        if needed <= until + 0.001:
            break
        until = needed
    return Bounds(
        work_s=work_s,
        steps=steps,
        wall_s=work_s + base_s * steps,
        p2_done_s=until,
        misses={lane.name: count for lane, count in misses.items()},
        max_output_tokens=sum(_max_output_tokens(run, base_s) for run in runs),
    )


def _max_output_tokens(run: Run, base_s: float) -> int:
    tokens = sum(step.output for step in run.steps)
    return tokens if run.cancel_after_s is None else min(tokens, floor(run.cancel_after_s / base_s))


def simulate(runs: Sequence[Run], frontend: Frontend, model: EngineModel) -> dict[str, float]:
    simulation = Simulation(frontend, model.costs, replace(model.flags, policy="fcfs"))
    simulation.play(runs)
    result = report(simulation, "")
    return {
        "wall_s": result.wall_s,
        "p2_done_s": max(row.at + row.end_s for row in simulation.rows if row.lane is Lane.P2),
        "output_rate": result.output_rate,
        "steps": simulation.engines[0].steps,
        **{f"{lane}_attainment": one.attainment for lane, one in result.lanes.items()},
    }


def one_seed(seed: int, model: EngineModel) -> dict[str, Any]:
    runs = harbor(seed)
    first, ours = simulate(runs, Direct(), model), simulate(runs, ControlledFrontend(DEFAULT_LANES), model)
    bound, unforgiving = bounds(runs, model), bounds(runs, model, min_attainment=1.0)
    least = {"wall_s": bound.wall_s, "p2_done_s": bound.p2_done_s}
    row: dict[str, Any] = {
        "seed": seed,
        "first_come_first_served": _rounded(first),
        "inferry": _rounded(ours),
        "bound": {
            **_rounded(least),
            "output_rate": round(bound.max_output_tokens / bound.wall_s, 1),
            "work_s": round(bound.work_s, 2),
            "steps": bound.steps,
            "misses": bound.misses,
        },
        "bound_without_misses": {"wall_s": round(unforgiving.wall_s, 2), "p2_done_s": round(unforgiving.p2_done_s, 2)},
        "bound_x": {name: round(value / first[name], 4) for name, value in least.items()},
        "inferry_x": {name: round(ours[name] / first[name], 4) for name in (*least, "output_rate")},
        "inferry_over_bound": {name: round(ours[name] / value, 4) for name, value in least.items()},
    }
    row["bound_x"]["output_rate"] = round(row["bound"]["output_rate"] / first["output_rate"], 4)
    row["excludes"] = {
        "p2_done_s": row["bound_x"]["p2_done_s"] > P2_DONE_X,
        "output_rate": row["bound_x"]["output_rate"] < RATE_X,
    }
    return row


def measure() -> dict[str, Any]:
    model = load_model()
    rows = []
    for seed in SEEDS:
        rows.append(row := one_seed(seed, model))
        print(
            f"seed {seed}  digests done: bound {row['bound_x']['p2_done_s']:.3f}, inferry "
            f"{row['inferry_x']['p2_done_s']:.3f}  all done: bound {row['bound_x']['wall_s']:.3f}, inferry "
            f"{row['inferry_x']['wall_s']:.3f}  output rate: bound {row['bound_x']['output_rate']:.3f}, inferry "
            f"{row['inferry_x']['output_rate']:.3f}  of first come first served",
            flush=True,
        )
    return {
        "kept": MIN_ATTAINMENT,
        "asked_for": {"p2_done_s_x": P2_DONE_X, "output_rate_x": RATE_X},
        "excluded_in_seeds": {name: sum(row["excludes"][name] for row in rows) for name in rows[0]["excludes"]},
        "over_seeds": {
            part: {name: _spread([row[part][name] for row in rows]) for name in rows[0][part]}
            for part in ("bound_x", "inferry_x", "inferry_over_bound")
        },
        "per_seed": rows,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": round(statistics.fmean(values), 4), "min": min(values), "max": max(values)}


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4 if name.endswith("attainment") else 2) for name, value in figures.items()}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
