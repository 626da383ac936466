"""Harbor on two or four engines, one of which is lost in the middle: attainment over the whole run, and what is missed.

The load is that of all engines, so one that is left of two has twice what it can serve, and three that are left of four
have a third more. `alone` is Harbor at the load
of one engine, with chunks of 8,192 tokens, as it was played on two vLLM servers that share a GPU; here they do not.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from inferry.cli.simulate_setup import Arm, direct_arms, gateway_arm, simulated_workers
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.sim.calls import CallRow, Run
from inferry.sim.costs import EngineModel, load_model
from inferry.sim.harbor import harbor
from inferry.sim.report import HARBOR_TTFT_S, attains
from inferry.sim.simulation import Simulation

SEEDS = range(1, 11)
ENGINES = (2, 4)
LOST = 0
LOST_AT_S = 20.0
GPU_SEED = 4202
GPU_CHUNK_TOKENS = 8192


def measure(seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    model = load_model()
    result: dict[str, Any] = {"lost_at_s": LOST_AT_S, "engines": {}}
    for engines in ENGINES:
        result["engines"][str(engines)] = of_engines(engines, model, seeds)
    result["alone"] = {"engines": 2, "seed": GPU_SEED, **figures(play(_large_chunks(model), model, harbor(GPU_SEED)))}
    return result


def of_engines(engines: int, model: EngineModel, seeds: Sequence[int]) -> dict[str, Any]:
    """The figures of both arms by seed, and the means of the gateway's attainment."""
    arms = (
        gateway_arm("gateway", DEFAULT_LANES, simulated_workers(None, model, engines)),
        direct_arms(model, engines)[1],
    )
    found: dict[str, Any] = {}
    for seed in seeds:
        runs = harbor(seed, scale=float(engines))
        found[str(seed)] = {arm.name: figures(play(arm, model, runs)) for arm in arms}
        print(engines, seed, found[str(seed)], flush=True)
    mean = {
        arm.name: {
            lane.name: round(fmean(one[arm.name]["attainment"][lane.name] for one in found.values()), 4)
            for lane in Lane
        }
        for arm in arms
    }
    return {"mean_attainment": mean, "seeds": found}


def play(arm: Arm, model: EngineModel, runs: Sequence[Run]) -> list[CallRow]:
    """The calls that no agent cancelled."""
    simulation = Simulation(arm.frontend(), model.costs, arm.flags)
    simulation.kill(LOST, LOST_AT_S)
    simulation.play(runs)
    return [row for row in simulation.rows if row.outcome != "cancelled"]


def figures(rows: Sequence[CallRow]) -> dict[str, Any]:
    missed = [row for row in rows if not attains(row, HARBOR_TTFT_S[row.lane])]
    by_lane = {lane: [row for row in rows if row.lane is lane] for lane in Lane}
    misses = Counter(row.lane for row in missed)
    return {
        "failed": sum(row.outcome == "failed" for row in rows),
        "attainment": {lane.name: round(1 - misses[lane] / len(mine), 4) for lane, mine in by_lane.items() if mine},
        "p0_misses": split([row for row in missed if row.lane is Lane.P0]),
    }


def split(missed: Sequence[CallRow]) -> dict[str, int]:
    """Misses of the first token and of later ones; those that came before the loss, and those on the engines left."""
    late_first = [row for row in missed if row.ttft_s is None or row.ttft_s > HARBOR_TTFT_S[row.lane]]
    return {
        "first_token": len(late_first),
        "token_gaps": len(missed) - len(late_first),
        "before_the_loss": sum(row.at + row.end_s < LOST_AT_S for row in missed),
        "on_the_engines_left": sum(row.worker not in (None, LOST) for row in missed),
    }


def _large_chunks(model: EngineModel) -> Arm:
    flags = replace(model.flags, max_num_batched_tokens=GPU_CHUNK_TOKENS)
    return gateway_arm("gateway", DEFAULT_LANES, simulated_workers(None, replace(model, flags=flags), 2))
