"""The twin against reality, and the Harbor burst in the twin.

The cost model is fitted on some of the recorded runs of the simpler Harbor workload on one H200 and then predicts the
others, which it has not seen. What each recorded client did is part of its arm: direct arms lose the calls whose
connections were reset (as many per lane as were lost then), capped ones start a digest's clock when the cap lets it go,
paced ones retry. The fitted model then plays the newer workload with ten seeds through every arm, all with the same
engine flags.

What the model must explain, as the rows show it: live calls wait as long in P0 as in P1 although the engine orders its
queue by priority, so most of the wait is before that queue, in the server process (or in the client, which is one
process too). Its cost per token has to grow with the number of open calls. That form, and where the search starts, were
chosen with all eight rows in view; only the numbers are fitted on the four.

Reads the recordings from the directory named in RULER, or from ../shared/ruler beside the repository.
"""

import importlib.util
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from inferry.domain.jobs import DEFAULT_LANES, Lane
from inferry.domain.plans import Room
from inferry.sim.calls import Call, Run
from inferry.sim.costs import DEFAULT_MODEL, CostModel, EngineFlags, EngineModel, load_model
from inferry.sim.doors import Capped, Direct, Paced
from inferry.sim.draws import stream
from inferry.sim.gateway import GatewayDoor
from inferry.sim.harbor import harbor, simple_harbor
from inferry.sim.prompts import length
from inferry.sim.report import Report, report
from inferry.sim.world import Door, HashMemo, World

RULER = Path(os.environ.get("RULER", Path(__file__).parents[4] / "shared" / "ruler"))
FITTED = ("live-only", "vllm-priority-x1.0", "cap-p2-32", "pace-8192,192,24")
EVALUATIONS = 130
SEEDS = range(10)
LIMITS = {"wall_s": 0.15, "output_rate": 0.15, "p0_ttft_p50": 0.25, "p0_ttft_p95": 0.25}
# What one standard error is worth in the search: half of what is allowed, and gaps only as a hint.
TOLERANCES = {"wall_s": 0.05, "output_rate": 0.05, "p0_ttft_p50": 0.10, "p0_ttft_p95": 0.10, "p0_gap_p50": 0.6}
START = {
    "base_s": 4.8e-3,
    "prefill_step_s": 3e-3,
    "prefill_token_s": 20e-6,
    "sequence_s": 13e-6,
    "kv_token_s": 30e-9,
    "attention_pair_s": 6e-9,
    "request_s": 1.6e-3,
    "token_s": 165e-6,
    "crowded_token_s": 165e-6,
    "computed_token_s": 2e-6,
}
FIXED = {"request_token_s": 5e-7, "reply_s": 3e-3}

Errors = dict[str, float]


def measure() -> dict[str, Any]:
    recorded = recordings()
    costs = fit(recorded)
    predictions = [predict(row, costs) for row in recorded]
    for one in predictions:
        print(_line(one), flush=True)
    return {
        "costs": msgspec.to_builtins(costs),
        "equals_the_shipped_model": DEFAULT_MODEL.exists() and load_model().costs == costs,
        "fitted_on": list(FITTED),
        "evaluations": EVALUATIONS,
        "limits": LIMITS,
        "held_out_within_limits": all(one["within_limits"] for one in predictions if not one["fitted"]),
        "rows": predictions,
        "generator_equals_the_original": [same_as_the_original(seed) for seed in SEEDS],
        "contest": contest(costs),
    }


# -- recorded runs ---------------------------------------------------------------------------------------------------


def recordings() -> list[dict[str, Any]]:
    path = RULER / "recorded-h200.jsonl"
    if not path.exists():
        raise SystemExit(f"there are no recordings at {path}; name their directory with RULER=…")
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def door_of(label: str) -> Door:
    """The arm of a recorded row. Of the paced ones only the last opened up for digests while nothing live ran."""
    if label.startswith("cap-p2-"):
        return Capped(int(label.removeprefix("cap-p2-")))
    if label.startswith("pace-"):
        prefill, calls, batch = map(int, label.removeprefix("pace-").split(","))
        return Paced(prefill, calls, batch, opens=label == "pace-3072,128,8")
    return Direct()


def flags_of(row: dict[str, Any]) -> EngineFlags:
    engine = row["engine"]
    return EngineFlags(
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        kv_tokens=engine["kv_tokens"],
        policy=engine["scheduling_policy"],
    )


def losses(row: dict[str, Any]) -> Callable[[Call], bool] | None:
    """Resets that the client did not retry: the share that was lost then, drawn by chance over the calls of a lane."""
    lost = {lane: row[lane.name]["failed"] / row[lane.name]["calls"] for lane in Lane if lane.name in row}
    if not any(lost.values()):
        return None
    draw = stream(7, f"resets/{row['label']}")
    return lambda call: draw.random() < lost[call.run.lane]


_RUNS: dict[bool, list[Run]] = {}
_HASHES: HashMemo = {}


def replay(row: dict[str, Any], costs: CostModel) -> Report:
    live_only = "P2" not in row
    if live_only not in _RUNS:
        runs = simple_harbor(7)
        _RUNS[live_only] = [run for run in runs if not live_only or run.lane is not Lane.P2]
    world = World(door_of(row["label"]), costs, flags_of(row), loses=losses(row), hashes=_HASHES)
    world.play(_RUNS[live_only])
    return report(world, row["label"])


def figures(result: Report) -> dict[str, float]:
    p0 = result.lanes["P0"]
    return {
        "wall_s": result.wall_s,
        "output_rate": result.output_rate,
        "p0_ttft_p50": p0.ttft_p50 or 0.0,
        "p0_ttft_p95": p0.ttft_p95 or 0.0,
        "p0_gap_p50": p0.gap_p50 or 0.0,
    }


def recorded_figures(row: dict[str, Any]) -> dict[str, float]:
    p0 = row["P0"]
    return {
        "wall_s": row["wall_s"],
        "output_rate": row["out_tok_s"],
        "p0_ttft_p50": p0["ttft_p50"],
        "p0_ttft_p95": p0["ttft_p95"],
        "p0_gap_p50": p0["itl_p50"],
    }


def predict(row: dict[str, Any], costs: CostModel) -> dict[str, Any]:
    predicted, real = figures(replay(row, costs)), recorded_figures(row)
    error = {name: predicted[name] / real[name] - 1 for name in real}
    return {
        "row": row["label"],
        "fitted": row["label"] in FITTED,
        "recorded": real,
        "predicted": {name: round(value, 4) for name, value in predicted.items()},
        "error": {name: round(value, 4) for name, value in error.items()},
        "within_limits": all(abs(error[name]) <= limit for name, limit in LIMITS.items()),
    }


# -- the fit ---------------------------------------------------------------------------------------------------------


def fit(recorded: Sequence[dict[str, Any]], evaluations: int = EVALUATIONS) -> CostModel:
    """The costs that explain the fitted rows best. Deterministic: a simplex over the logarithms of the costs."""
    rows = [row for row in recorded if row["label"] in FITTED]
    names = list(START)

    def costs_at(point: Sequence[float]) -> CostModel:
        return CostModel(**FIXED, **{name: math.exp(x) for name, x in zip(names, point, strict=True)})

    def loss(point: Sequence[float]) -> float:
        costs = costs_at(point)
        total = 0.0
        for row in rows:
            predicted, real = figures(replay(row, costs)), recorded_figures(row)
            for name, tolerance in TOLERANCES.items():
                error = math.log(max(predicted[name], 1e-6) / real[name]) / tolerance
                total += _huber(error)
        # Weak pull towards the start: what these rows say nothing about stays where other measurements put it.
        return total + sum(((x - math.log(START[name])) / 1.0) ** 2 for name, x in zip(names, point, strict=True))

    best = nelder_mead(loss, [math.log(value) for value in START.values()], evaluations)
    return CostModel(**FIXED, **{name: float(f"{math.exp(x):.4g}") for name, x in zip(names, best, strict=True)})


def _huber(error: float, knee: float = 3.0) -> float:
    size = abs(error)
    return size * size if size <= knee else 2 * knee * size - knee * knee


def nelder_mead(
    loss: Callable[[Sequence[float]], float], start: Sequence[float], evaluations: int, spread: float = 0.25
) -> list[float]:
    """The best point found with about so many evaluations."""
    size = len(start)
    spent = 0

    def at(point: list[float]) -> tuple[float, list[float]]:
        nonlocal spent
        spent += 1
        return loss(point), point

    simplex = [at(list(start))]
    for axis in range(size):
        point = list(start)
        point[axis] += spread
        simplex.append(at(point))
    while spent < evaluations:
        simplex.sort()
        worst = simplex[-1]
        middle = [sum(point[axis] for _, point in simplex[:-1]) / size for axis in range(size)]

        def along(reach: float, middle: list[float] = middle, worst: list[float] = worst[1]) -> list[float]:
            return [m + reach * (m - w) for m, w in zip(middle, worst, strict=True)]

        reflected = at(along(1.0))
        if reflected[0] < simplex[0][0]:
            simplex[-1] = min(reflected, at(along(2.0)))
        elif reflected[0] < simplex[-2][0]:
            simplex[-1] = reflected
        else:
            contracted = at(along(0.5 if reflected[0] < worst[0] else -0.5))
            if contracted[0] < min(worst[0], reflected[0]):
                simplex[-1] = contracted
            else:
                best = simplex[0][1]
                simplex = [
                    simplex[0],
                    *(at([b + 0.5 * (x - b) for b, x in zip(best, point, strict=True)]) for _, point in simplex[1:]),
                ]
    return min(simplex)[1]


# -- the generator ---------------------------------------------------------------------------------------------------


def same_as_the_original(seed: int) -> dict[str, Any]:
    """Whether both workloads of the seed equal the load generator's: times, lengths, tools, cancels, beginnings."""
    spec = importlib.util.spec_from_file_location("harbor_original", RULER / "harbor.py")
    assert spec is not None
    assert spec.loader is not None
    original = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(original)
    return {
        "seed": seed,
        "newer": _alike(harbor(seed), original.workload(seed, 60, 1.0, 300, 4000, 16_000)),
        "simpler": _alike(simple_harbor(seed), original.workload_v1(seed, 60, 1.0, 300, 4000, 16_000)),
    }


def _alike(ours: Sequence[Run], theirs: Sequence[dict[str, Any]]) -> bool:
    shapes = [
        (
            r.run_id,
            r.tenant,
            r.lane.name,
            r.at,
            r.cancel_after_s,
            [(s.name, length(s.prompt), s.output, s.tool_s) for s in r.steps],
        )
        for r in ours
    ]
    wanted = [
        (r["run"], r["tenant"], r["lane"], r["at"], r["cancel_at"], [(n, len(p), o, t) for n, p, o, t in r["steps"]])
        for r in theirs
    ]
    return shapes == wanted and all(_begin_alike(a, b) for a, b in zip(ours, theirs, strict=True))


def _begin_alike(ours: Run, theirs: dict[str, Any]) -> bool:
    """Whether consecutive steps share as long a beginning here as there; a chance token more is none."""
    for (a, b), (p, q) in zip(
        zip(ours.steps, ours.steps[1:], strict=False),
        zip(theirs["steps"], theirs["steps"][1:], strict=False),
        strict=True,
    ):
        here = 0
        for x, y in zip(a.prompt, b.prompt, strict=False):
            if x[:2] != y[:2]:
                break
            here += min(x[2], y[2])
            if x[2] != y[2]:
                break
        there = next((i for i, (x, y) in enumerate(zip(p[1], q[1], strict=False)) if x != y), min(len(p[1]), len(q[1])))
        if not here <= there <= here + 2:
            return False
    return True


# -- the contest -----------------------------------------------------------------------------------------------------

CONTEST_FLAGS = {"max_num_seqs": 1024, "max_num_batched_tokens": 2048}
WHOLE_KV = EngineFlags().kv_tokens


def arms() -> dict[str, tuple[Callable[[], Door], str]]:
    """What is compared: how calls reach the engine, and the order of its own queue."""
    return {
        "direct, first come first served": (Direct, "fcfs"),
        "direct, engine priority": (Direct, "priority"),
        "sketch, pace 3072,128,8": (lambda: Paced(3072, 128, 8), "priority"),
        "inferry, prefill bound 3072": (lambda: GatewayDoor(DEFAULT_LANES, Room(1024, WHOLE_KV, 3072)), "priority"),
        "inferry, prefill bound 6144": (lambda: GatewayDoor(DEFAULT_LANES, Room(1024, WHOLE_KV, 6144)), "priority"),
        "inferry, no prefill bound": (lambda: GatewayDoor(DEFAULT_LANES, Room(1024, WHOLE_KV, None)), "priority"),
    }


def contest(costs: CostModel, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Every arm with every seed. Figures per seed, and the median, best and worst over seeds."""
    table: dict[str, Any] = {"engine": CONTEST_FLAGS, "seeds": list(seeds), "arms": {}}
    for name, (door, policy) in arms().items():
        flags = msgspec.convert({**CONTEST_FLAGS, "policy": policy}, EngineFlags)
        rows = []
        for seed in seeds:
            world = World(door(), costs, flags)
            world.play(harbor(seed))
            rows.append({"seed": seed, **_contest_figures(report(world, name))})
        table["arms"][name] = {"per_seed": rows, "over_seeds": _over_seeds(rows)}
        print(f"{name:34s} {_contest_line(table['arms'][name]['over_seeds'])}", flush=True)
    return table


def _contest_figures(result: Report) -> dict[str, float]:
    figures: dict[str, float] = {
        "wall_s": round(result.wall_s, 1),
        "live_done_s": round(result.live_done_s, 1),
        "output_rate": round(result.output_rate, 1),
        "goodput": round(result.goodput, 1),
        "utilisation": round(result.utilisation, 3),
        "server_utilisation": round(result.server_utilisation, 3),
    }
    for lane, one in result.lanes.items():
        figures[f"{lane}_attainment"] = round(one.attainment, 4)
        for part in ("ttft_p50", "ttft_p95", "gap_p95", "step_p95"):
            figures[f"{lane}_{part}"] = round(getattr(one, part) or 0.0, 4)
    return figures


def _over_seeds(rows: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    names = [name for name in rows[0] if name != "seed"]
    return {
        name: {
            "median": statistics.median(row[name] for row in rows),
            "min": min(row[name] for row in rows),
            "max": max(row[name] for row in rows),
        }
        for name in names
    }


def _contest_line(over: dict[str, dict[str, float]]) -> str:
    shown = (
        "P0_attainment",
        "P1_attainment",
        "P2_attainment",
        "P0_ttft_p50",
        "P0_ttft_p95",
        "P1_ttft_p95",
        "P2_ttft_p95",
    )
    return "  ".join(f"{name} {over[name]['median']:.3g}" for name in (*shown, "wall_s", "output_rate"))


def _line(one: dict[str, Any]) -> str:
    marks = "  ".join(f"{name} {100 * one['error'][name]:+.0f} %" for name in LIMITS)
    return f"{one['row']:20s} {'fitted' if one['fitted'] else 'held out':9s} {marks}"


def write_model(path: Path = DEFAULT_MODEL) -> EngineModel:
    """Fit and ship: the model file with the rows it was fitted on and every row's error."""
    recorded = recordings()
    costs = fit(recorded)
    predictions = [predict(row, costs) for row in recorded]
    model = EngineModel(
        name="vLLM 0.26.0, Llama-3.1-8B shape in bfloat16, one H200",
        costs=costs,
        flags=EngineFlags(max_num_seqs=1024, max_num_batched_tokens=2048, policy="priority"),
        fitted_on=FITTED,
        residuals={one["row"]: one["error"] for one in predictions},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n")
    for one in predictions:
        print(_line(one), flush=True)
    return model


if __name__ == "__main__":
    if sys.argv[1:] == ["--write-model"]:
        write_model()
    else:
        print(json.dumps(measure(), indent=2))
