"""Do jobs that write far more than predicted make way for short ones of their lane?

One lane on an engine with few sequences, with and without the lane in its own `may_preempt`: outputs with a heavy tail,
outputs that are nearly all longer than 256 tokens, and Harbor, where sequences are not scarce. The expected lengths are
the true ones up to 256 tokens (`capped`), or those that the gateway predicts (`predicted`).
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.sim.calls import CallRow, Run, Step
from inferry.sim.controlled_gateway import ControlledFrontend
from inferry.sim.costs import load_model
from inferry.sim.harbor import harbor
from inferry.sim.length_predictor import LengthPredictor
from inferry.sim.report import HARBOR_TTFT_S, attains
from inferry.sim.rng import named_rng
from inferry.sim.simulation import Simulation

SEQUENCES = 16
SEEDS = (1, 2, 3)
LOADS = (0.8, 1.0, 1.3)
SHORT_TOKENS = 60
LONG_TOKENS = (2_000, 6_000)
LONG_SHARE = 0.05
UNIFORM_TOKENS = (300, 900)
HARBOR_SEQUENCES = 256
SOURCES: dict[str, Callable[[], LengthPredictor | None]] = {"capped": lambda: None, "predicted": LengthPredictor}


def heavy_tail(seed: int, lane: Lane, load: float, calls: int = 1_500) -> list[Run]:
    """Exponential outputs, one in twenty of thousands of tokens."""
    rng = named_rng(seed, "heavy tail")
    mean = (1 - LONG_SHARE) * SHORT_TOKENS + LONG_SHARE * sum(LONG_TOKENS) / 2
    outputs = [
        rng.randint(*LONG_TOKENS) if rng.random() < LONG_SHARE else max(1, int(rng.expovariate(1 / SHORT_TOKENS)))
        for _ in range(calls)
    ]
    return list(_arriving(seed, lane, load, outputs, mean))


def all_long(seed: int, lane: Lane, load: float) -> list[Run]:
    """Nearly all outputs are longer than 256 tokens, by a factor of two in the mean."""
    rng = named_rng(seed, "all long")
    outputs = [rng.randint(*UNIFORM_TOKENS) for _ in range(400)]
    return list(_arriving(seed, lane, load, outputs, sum(UNIFORM_TOKENS) / 2))


def _arriving(seed: int, lane: Lane, load: float, outputs: Sequence[int], mean_tokens: float) -> Iterator[Run]:
    """Poisson arrivals of this part of what the engine can decode with all its sequences."""
    rng, at = named_rng(seed, "arrivals"), 0.0
    step_s = load_model().costs.decode_s(SEQUENCES, SEQUENCES * 1_500)
    for number, output in enumerate(outputs):
        at += rng.expovariate(load * SEQUENCES / (mean_tokens * step_s))
        step = Step("call", ((number + 1, 0, rng.randint(200, 1_500)),), output)
        yield Run(run_id=f"run-{number}", tenant="t", lane=lane, at=at, steps=(step,))


def play(
    runs: Sequence[Run], *own: Lane, sequences: int = SEQUENCES, predictor: LengthPredictor | None = None
) -> Simulation:
    """`own` are the lanes that may preempt themselves."""
    lanes = dict(DEFAULT_LANES)
    for lane in own:
        lanes[lane] = replace(lanes[lane], may_preempt=(*lanes[lane].may_preempt, lane), preemptible=True)
    model = load_model()
    flags = replace(model.flags, max_num_seqs=sequences, policy="priority")
    simulation = Simulation(ControlledFrontend(lanes, predictor=predictor), model.costs, flags)
    simulation.play(runs)
    return simulation


def figures(simulation: Simulation) -> dict[str, Any]:
    rows, ends = simulation.rows, [row.at + row.end_s for row in simulation.rows]
    short = [row.end_s for row in rows if row.output < LONG_TOKENS[0]]
    long = [row.end_s for row in rows if row.output >= LONG_TOKENS[0]]
    return {
        "short_s": round(statistics.fmean(short), 2),
        "long_s": round(statistics.fmean(long), 1) if long else None,
        "attained": {lane.name: attainment(rows, lane) for lane in Lane if any(row.lane is lane for row in rows)},
        "done_s": round(max(ends), 1),
    }


def attainment(rows: Sequence[CallRow], lane: Lane) -> float:
    mine = [row for row in rows if row.lane is lane]
    return round(sum(attains(row, HARBOR_TTFT_S[lane]) for row in mine) / len(mine), 4)


def measure(seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    result: dict[str, Any] = {"seeds": list(seeds), "sequences": SEQUENCES}
    for source, predictor_of in SOURCES.items():
        rows = [row for seed in seeds for row in rows_of(seed, predictor_of)]
        result[source] = {"ratios": ratios(rows), "rows": rows}
        print(source, result[source]["ratios"], flush=True)
    return result


def rows_of(seed: int, predictor_of: Callable[[], LengthPredictor | None]) -> Iterator[dict[str, Any]]:
    for lane in (Lane.P1, Lane.P2):
        for load in LOADS:
            for make in (heavy_tail, all_long):
                runs = make(seed, lane, load)
                without, own = (play(runs, *lanes, predictor=predictor_of()) for lanes in ((), (lane,)))
                labels = {"workload": make.__name__, "lane": lane.name, "load": load, "seed": seed}
                yield {**labels, "without": figures(without), "with": figures(own)}
    runs = harbor(seed)
    without, own = (
        play(runs, *lanes, sequences=HARBOR_SEQUENCES, predictor=predictor_of()) for lanes in ((), (Lane.P1, Lane.P2))
    )
    yield {"workload": "harbor", "seed": seed, "without": figures(without), "with": figures(own)}


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """By workload and time: the least and the greatest of with to without."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        by_time = found.setdefault(row["workload"], {})
        for name in ("short_s", "long_s", "done_s"):
            if row["without"][name] is not None:
                by_time.setdefault(name, []).append(round(row["with"][name] / row["without"][name], 2))
    return {
        workload: {name: [min(all_of), max(all_of)] for name, all_of in by_time.items()}
        for workload, by_time in found.items()
    }
