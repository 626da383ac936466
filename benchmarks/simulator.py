"""The simulator against measured runs, and the Harbor burst in the simulator.

The costs of the engine model were measured on one H200: every engine step was logged with its contents, and the CPU
time of the server process was sampled beside it, on a grid of loads and on the Harbor workload. None of those runs is
predicted here. The recorded runs use the simpler workload (`results/simple-harbor-h200.jsonl`, vLLM 0.26.0). One
parameter was fitted to them: in how many parts the server process handles a request. Four rows were used for it (two
and three parts explain them equally well, one and four worse; three was chosen). The other four rows are held out.

Each recorded client is part of its arm. Direct arms lose the calls whose connections were reset, as many per lane as in
the recording. Capped arms start the clock of a batch job when the cap releases it. Paced arms retry. Near saturation
a millisecond changes which calls wait, so each row is played five times, four of them with arrivals jittered by about
10 ms; the median counts.

Then the newer workload, ten seeds, through every arm, all with the same engine flags.
"""

import json
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from benchmarks.harbor_reference import matches_reference
from benchmarks.harbor_simulator import PromptMemoryFrontend
from benchmarks.result_files import RESULTS
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.sim.baselines import Capped, Direct, Paced
from inferry.sim.calls import Call
from inferry.sim.controlled_gateway import MAX_SEQUENCES, ControlledFrontend
from inferry.sim.costs import MODELS, CostModel, EngineFlags, EngineModel, load_model
from inferry.sim.gateway import GatewayFrontend
from inferry.sim.harbor import harbor, simple_harbor
from inferry.sim.prompt_memory import PrefixAwareEstimator
from inferry.sim.report import Report, report
from inferry.sim.rng import named_rng
from inferry.sim.simulation import Frontend, HashMemo, Simulation

RECORDED_ROWS = RESULTS / "simple-harbor-h200.jsonl"
RECORDED_MODEL = MODELS / "h200-vllm-8b-mute.json"
"""The recorded runs used random weights, whose output cannot be detokenized."""
USED_FOR_TURNS = ("live-only", "vllm-priority-x1.0", "cap-p2-32", "pace-8192,192,24")
REPLAYS = 5
JITTER_S = 0.01
SEEDS = range(10)
LIMITS = {"wall_s": 0.15, "output_rate": 0.15, "p0_ttft_p50": 0.25, "p0_ttft_p95": 0.25}


def measure() -> dict[str, Any]:
    model = load_model(RECORDED_MODEL)
    predictions = [predict(row, model.costs) for row in recordings()]
    for one in predictions:
        print(_line(one), flush=True)
    held_out = [one for one in predictions if not one["used_for_turns"]]
    return {
        "recorded": {
            "model": msgspec.to_builtins(model),
            "used_for_turns": list(USED_FOR_TURNS),
            "limits": LIMITS,
            "held_out_within_limits": all(one["within_limits"] for one in held_out),
            "rows": predictions,
        },
        "measured_live": [live(row, load_model()) for row in live_rows(DIRECT)],
        "measured_live_paced": [live(row, load_model()) for row in live_rows(PACED)],
        "generator_equals_the_original": [matches_reference(seed) for seed in SEEDS],
        "comparison": compare_arms(load_model()),
    }


# -- recorded runs ---------------------------------------------------------------------------------------------------


def recordings() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDED_ROWS.read_text().splitlines()]


def frontend_of(label: str) -> Frontend:
    """The arm of a recorded row. Of the paced arms only the last lifted its batch limit while no live call ran."""
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
    """Resets that the client did not retry: the recorded share of each lane, drawn at random over its calls."""
    lost = {lane: row[lane.name]["failed"] / row[lane.name]["calls"] for lane in Lane if lane.name in row}
    if not any(lost.values()):
        return None
    rng = named_rng(7, f"resets/{row['label']}")
    return lambda call: rng.random() < lost[call.run.lane]


_HASHES: HashMemo = {}


def replays(row: dict[str, Any], costs: CostModel) -> Iterator[Report]:
    runs = [run for run in simple_harbor(7) if "P2" in row or run.lane is not Lane.P2]
    for number in range(REPLAYS):
        rng = named_rng(number, "arrivals")
        jittered = [replace(run, at=max(0.0, run.at + rng.gauss(0.0, JITTER_S))) for run in runs] if number else runs
        simulation = Simulation(frontend_of(row["label"]), costs, flags_of(row), is_lost=losses(row), hashes=_HASHES)
        simulation.play(jittered)
        yield report(simulation, row["label"])


def figures(result: Report) -> dict[str, float]:
    p0 = result.lanes["P0"]
    return {
        "wall_s": result.wall_s,
        "output_rate": result.output_rate,
        "p0_ttft_p50": p0.ttft_p50 or 0.0,
        "p0_ttft_p95": p0.ttft_p95 or 0.0,
        "p0_itl_p50": p0.itl_p50 or 0.0,
    }


def recorded_figures(row: dict[str, Any]) -> dict[str, float]:
    p0 = row["P0"]
    return {
        "wall_s": row["wall_s"],
        "output_rate": row["out_tok_s"],
        "p0_ttft_p50": p0["ttft_p50"],
        "p0_ttft_p95": p0["ttft_p95"],
        "p0_itl_p50": p0["itl_p50"],
    }


def predict(row: dict[str, Any], costs: CostModel) -> dict[str, Any]:
    played, real = [figures(one) for one in replays(row, costs)], recorded_figures(row)
    predicted = {name: statistics.median(one[name] for one in played) for name in real}
    error = {name: predicted[name] / real[name] - 1 for name in real}
    return {
        "row": row["label"],
        "used_for_turns": row["label"] in USED_FOR_TURNS,
        "recorded": real,
        "predicted": {name: round(value, 4) for name, value in predicted.items()},
        "range": {name: [round(end(one[name] for one in played), 4) for end in (min, max)] for name in real},
        "error": {name: round(value, 4) for name, value in error.items()},
        "within_limits": all(abs(error[name]) <= limit for name, limit in LIMITS.items()),
    }


def _line(one: dict[str, Any]) -> str:
    marks = "  ".join(f"{name} {100 * one['error'][name]:+.0f} %" for name in LIMITS)
    return f"{one['row']:20s} {'used' if one['used_for_turns'] else 'held out':9s} {marks}"


# -- later runs on the GPU -------------------------------------------------------------------------------------------


DIRECT: dict[str, Callable[[], Frontend]] = {"direct": Direct, "priority": Direct}
"""Direct to the engine, without a gateway."""
PACED: dict[str, Callable[[], Frontend]] = {
    "sketch": partial(Paced, 3072, 128, 8, opens=True),
    "inferry": PromptMemoryFrontend,
}
"""Arms whose client or gateway decides; these rows are played with the scheduler of today."""


def live_rows(frontends: Collection[str]) -> list[dict[str, Any]]:
    """Rows of the newer workload through one of the front ends, the first of each seed."""
    stored = json.loads((RESULTS / "harbor-h200.json").read_text())["result"]
    return [row for row in stored if row["label"] in frontends and row["attempt"] == 1]


def live(row: dict[str, Any], model: EngineModel) -> dict[str, Any]:
    """A measured row beside its prediction."""
    policy = "fcfs" if row["label"] == "direct" else "priority"
    flags = msgspec.convert({**msgspec.to_builtins(model.flags), "policy": policy}, EngineFlags)
    simulation = Simulation((DIRECT | PACED)[row["label"]](), model.costs, flags)
    simulation.play(harbor(row["seed"]))
    predicted = figures(report(simulation, row["label"]))
    measured = {
        "wall_s": row["wall_s"],
        "output_rate": row["out_tok_s"],
        "p0_ttft_p50": row["P0"]["ttft_p50"],
        "p0_ttft_p95": row["P0"]["ttft_p95"],
    }
    off = {name: round(predicted[name] / measured[name] - 1, 4) for name in measured}
    within = all(abs(off[name]) <= LIMITS[name] for name in off)
    print(f"{row['label']:16s} seed {row['seed']:<3d} " + "  ".join(f"{n} {100 * e:+.0f} %" for n, e in off.items()))
    return {
        "label": row["label"],
        "seed": row["seed"],
        "engine_start": row["engine_start"],
        "measured": measured,
        "predicted": {name: round(predicted[name], 4) for name in measured},
        "off": off,
        "within_limits": within,
    }


# -- the comparison --------------------------------------------------------------------------------------------------


def arms(flags: EngineFlags) -> dict[str, tuple[Callable[[], Frontend], str]]:
    """By arm: how calls reach the engine, and the order of the engine's queue."""
    unbounded = Capacity(MAX_SEQUENCES, flags.kv_tokens)
    bound = replace(unbounded, prefill_tokens=3072)
    windows = {lane: replace(policy, window="fixed") for lane, policy in DEFAULT_LANES.items()}
    gateway = partial(GatewayFrontend, DEFAULT_LANES)
    return {
        "direct (FCFS)": (Direct, "fcfs"),
        "direct with priorities": (Direct, "priority"),
        "sketch, pace 3072,128,8": (lambda: Paced(3072, 128, 8), "priority"),
        "fixed windows, no capacity control": (
            lambda: GatewayFrontend(windows, unbounded, estimate=PrefixAwareEstimator()),
            "fcfs",
        ),
        "lanes, no capacity control": (lambda: gateway(unbounded, estimate=PrefixAwareEstimator()), "fcfs"),
        "lanes, prefill bound 3072": (lambda: gateway(bound, estimate=PrefixAwareEstimator()), "fcfs"),
        "inferry": (lambda: ControlledFrontend(DEFAULT_LANES), "fcfs"),
        "inferry, engine priority": (lambda: ControlledFrontend(DEFAULT_LANES), "priority"),
    }


BASELINE = "direct (FCFS)"


def compare_arms(model: EngineModel, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Every arm with every seed. Figures per seed, and the median, best and worst over seeds."""
    table: dict[str, Any] = {"engine": msgspec.to_builtins(model.flags), "seeds": list(seeds), "arms": {}}
    workloads = {seed: harbor(seed) for seed in seeds}
    for name, (frontend, policy) in arms(model.flags).items():
        flags = msgspec.convert({**msgspec.to_builtins(model.flags), "policy": policy}, EngineFlags)
        rows = []
        for seed in seeds:
            simulation = Simulation(frontend(), model.costs, flags)
            simulation.play(workloads[seed])
            rows.append({"seed": seed, **_comparison_figures(simulation, report(simulation, name))})
        for row, first in zip(rows, table["arms"].get(BASELINE, {"per_seed": rows})["per_seed"], strict=True):
            for part in ("wall_s", "p2_done_s", "output_rate"):
                row[f"{part}_x"] = round(row[part] / first[part], 4)
        table["arms"][name] = {"per_seed": rows, "over_seeds": _over_seeds(rows)}
        print(f"{name:34s} {_comparison_line(table['arms'][name]['over_seeds'])}", flush=True)
    return table


def _comparison_figures(simulation: Simulation, result: Report) -> dict[str, float]:
    figures: dict[str, float] = {
        "wall_s": round(result.wall_s, 1),
        "live_done_s": round(result.live_done_s, 1),
        "p2_done_s": round(max(row.at + row.end_s for row in simulation.rows if row.lane is Lane.P2), 1),
        "output_rate": round(result.output_rate, 1),
        "goodput": round(result.goodput, 1),
        "utilisation": round(result.utilisation, 3),
        "server_utilisation": round(result.server_utilisation, 3),
    }
    for lane, one in result.lanes.items():
        figures[f"{lane}_attainment"] = round(one.attainment, 4)
        for part in ("ttft_p50", "ttft_p95", "itl_p95", "step_p95"):
            figures[f"{lane}_{part}"] = round(getattr(one, part) or 0.0, 4)
    return figures


def _over_seeds(rows: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    names = [name for name in rows[0] if name != "seed"]
    return {
        name: {
            "mean": round(statistics.fmean(row[name] for row in rows), 4),
            "median": statistics.median(row[name] for row in rows),
            "min": min(row[name] for row in rows),
            "max": max(row[name] for row in rows),
        }
        for name in names
    }


def _comparison_line(over: dict[str, dict[str, float]]) -> str:
    stored = "  ".join(f"{lane} {100 * over[f'{lane}_attainment']['mean']:.1f} %" for lane in ("P0", "P1", "P2"))
    parts = "  ".join(f"{part} {over[part]['mean']:.3f}" for part in ("wall_s_x", "p2_done_s_x", "output_rate_x"))
    return f"{stored}  P0 first token p95 {over['P0_ttft_p95']['median']:.2f} s  {parts}"


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
