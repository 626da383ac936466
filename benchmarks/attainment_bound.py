"""How many targets of recorded traffic and Harbor any schedule could meet, beside what the gateway meets: P0, then P1.

A schedule that knows all arrivals in advance chooses which calls get their first token in time. The engine is one
machine, and a call needs the time of its own prompt on it:

- a prompt token costs `prefill_token_s`, its attention, and its part of `base_s`: a step has at most a chunk of tokens;
- blocks that an earlier call had are cached; decodes, P2 and cancelled calls cost nothing; token gaps are not bounded;
- a first token is due `ttft` after the arrival, less the time of the request and of the reply outside the engine.

Within a lane, calls are due in the order in which they arrive. Then the calls in time can be served in that order, and
the largest set of them is found by adding one call after another: if the last one would be late, the call is removed
without which the others are done soonest (Kise, Ibaraki and Mine, 1978). For P0 this is an upper bound of every
schedule. P1 is given the time that this set of P0 leaves, each call of P0 served as soon as possible. That is a
reference rather than a bound: another set of P0 calls of the same size, or one served later, might leave more.

When a later step of a run arrives depends on the schedule, which the bound must not. So the steps of Harbor's runs are
calls of their own, at the times at which they would come from an idle engine.

The gateway is played with output lengths as it predicts them, learning from the calls that have ended, and again with
true lengths. That splits the loss, in parts of the bound: `prediction` is what true lengths attain more, `rest` what
they do not attain either. `capped`: true lengths up to 256 tokens, as in `never_worse`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.never_worse import CANCELLED, LOADS, SLO, Rows, cancel_some, harbor_at, play, trace_at
from benchmarks.trace_files import AZURE, MOONCAKE
from inferry.cli.simulate_setup import Arm, direct_arms, drop_oversized, gateway_arm, simulated_workers
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.sim.calls import Run
from inferry.sim.costs import EngineModel, load_model
from inferry.sim.gateway import GatewayFrontend
from inferry.sim.length_predictor import LengthSource
from inferry.sim.prompts import block_hashes, length
from inferry.sim.report import attains
from inferry.sim.simulation import Frontend

SEEDS = range(1, 11)
LIVE = (Lane.P0, Lane.P1)
GOALS = {0.5: 0.97, 0.9: 0.97, 1.3: 0.90}
SOURCES: tuple[LengthSource, ...] = ("predicted", "true", "capped")
TRACES = {"azure": (AZURE, 240.0), "mooncake": (MOONCAKE, 60.0)}


class Prompt(NamedTuple):
    """A prompt that arrives, takes `work_s` of the engine, and is due."""

    at: float
    work_s: float
    due: float


def measure(seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    model = load_model()
    result: dict[str, Any] = {"seeds": list(seeds), "cancelled": CANCELLED, "workloads": {}}
    for load in LOADS:
        workloads = {
            name: partial(trace_at, trace, seconds, load, model) for name, (trace, seconds) in TRACES.items()
        } | {"harbor": partial(harbor_calls, load, model)}
        for name, runs_of in workloads.items():
            row = one_workload(model, seeds, runs_of)
            for lane in LIVE:
                row[lane.name]["goal"] = GOALS[load]
            result["workloads"][f"{name} {load}"] = row
            print(name, load, row, flush=True)
    return result


def arms_of(model: EngineModel, made: list[Frontend]) -> dict[str, Arm]:
    """The frontends of the gateway that predicts are added to `made` as they are made."""
    workers = simulated_workers(None, model)
    arms = {source: gateway_arm(source, DEFAULT_LANES, workers, output_source=source) for source in SOURCES}
    predicting = arms["predicted"]

    def frontend() -> Frontend:
        made.append(predicting.frontend())
        return made[-1]

    return {
        "gateway": replace(predicting, frontend=frontend),
        "true_lengths": arms["true"],
        "capped": arms["capped"],
        "direct": direct_arms(model, 1)[1],
    }


def one_workload(
    model: EngineModel, seeds: Sequence[int], runs_of: Callable[[int], list[Run]]
) -> dict[str, dict[str, Any]]:
    made: list[Frontend] = []
    arms = arms_of(model, made)
    planned = dict.fromkeys(LIVE, 0)
    most = dict.fromkeys(LIVE, 0)
    attained = {arm: dict.fromkeys(LIVE, 0) for arm in arms}
    for seed in seeds:
        runs = cancel_some(drop_oversized(runs_of(seed), list(arms.values())), seed)
        for lane, (calls, in_time) in most_in_time(runs, model).items():
            planned[lane] += calls
            most[lane] += in_time
        for name, arm in arms.items():
            for lane, count in _attained(play(arm, model, runs, seed)[0], runs).items():
                attained[name][lane] += count
    rows = {
        lane.name: {
            "calls": planned[lane],
            "bound": round(most[lane] / planned[lane], 4),
            **{name: round(counts[lane] / planned[lane], 4) for name, counts in attained.items()},
            **split_loss(most[lane], attained["gateway"][lane], attained["true_lengths"][lane]),
        }
        for lane in LIVE
    }
    return {**rows, "predictions": _accuracy(made)}


def split_loss(most: int, predicted: int, true: int) -> dict[str, Any]:
    """The parts of the bound that are attained, and what the rest of it is lost to."""
    return {
        "of_bound": round(predicted / most, 4),
        "of_bound_true_lengths": round(true / most, 4),
        "loss": {"prediction": round((true - predicted) / most, 4), "rest": round((most - true) / most, 4)},
    }


def _accuracy(made: Sequence[Frontend]) -> dict[str, float]:
    """Of the gateways that predict, when they had served everything: the mean of their own figures."""
    found = [one.predictor.accuracy for one in made if isinstance(one, GatewayFrontend) and one.predictor is not None]
    return {
        "mean_abs_log_error": round(fmean(one.mean_abs_log_error for one in found), 3),
        "within_p10_to_p90": round(fmean(one.coverage for one in found), 3),
    }


def harbor_calls(load: float, model: EngineModel, seed: int) -> list[Run]:
    return list(single_calls(harbor_at(load, model, seed), model))


def single_calls(runs: Sequence[Run], model: EngineModel) -> Iterator[Run]:
    """Every step as a run of its own, at the time at which it would come from an idle engine."""
    for run in runs:
        at, cached = run.at, 0
        for number, step in enumerate(run.steps):
            yield replace(run, run_id=f"{run.run_id}/{number}", at=at, steps=(step,), cancel_after_s=None)
            tokens = length(step.prompt)
            prefill_s = model.costs.prefill_s(tokens - cached, (tokens - cached) * (tokens + cached) / 2)
            at += prefill_s + step.output * model.costs.decode_s(1, tokens) + step.tool_s
            cached = tokens


def _attained(rows: Rows, runs: Sequence[Run]) -> dict[Lane, int]:
    """Calls that met their target, of the runs that are not cancelled."""
    cancelled = {run.run_id for run in runs if run.cancel_after_s is not None}
    counts = dict.fromkeys(LIVE, 0)
    for row in rows.values():
        if row.lane in counts and row.run not in cancelled:
            counts[row.lane] += attains(row, SLO[row.lane].ttft_s)
    return counts


# -- the bound -------------------------------------------------------------------------------------------------------


def most_in_time(runs: Sequence[Run], model: EngineModel) -> dict[Lane, tuple[int, int]]:
    """By lane: calls that are not cancelled, and how many of them can have their first token in time."""
    prompts: dict[Lane, list[Prompt]] = {lane: [] for lane in LIVE}
    costs, flags = model.costs, model.flags
    step_s = (costs.base_s + costs.prefill_step_s) / flags.max_num_batched_tokens
    cached: set[int] = set()
    for run in sorted(runs, key=lambda run: run.at):
        (step,) = run.steps  # calls of recorded traffic are independent
        tokens = length(step.prompt)
        blocks = block_hashes(step.prompt, flags.block_tokens)
        new = tokens - flags.block_tokens * sum([block in cached for block in blocks])
        cached.update(blocks)
        if run.lane in prompts and run.cancel_after_s is None:
            pairs = new * (2 * tokens - new) / 2
            work_s = new * (costs.prefill_token_s + step_s) + pairs * costs.attention_pair_s
            at = run.at + costs.request_cost_s(tokens)
            prompts[run.lane].append(Prompt(at, work_s, run.at + SLO[run.lane].ttft_s - costs.reply_s))
    busy: list[tuple[float, float]] = []
    found = {}
    for lane in LIVE:
        chosen = largest_set(_without(busy, prompts[lane]))
        found[lane] = (len(prompts[lane]), len(chosen))
        busy = _served(chosen)
    return found


def largest_set(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The most prompts that one machine can finish by the time they are due, in order of arrival.

    Both arrivals and due times must be in the same order.
    """
    chosen: list[Prompt] = []
    starts: list[float] = []
    done_at = 0.0
    for prompt in sorted(prompts, key=lambda prompt: prompt.due):
        if prompt.at + prompt.work_s > prompt.due:
            continue  # late even alone
        chosen.append(prompt)
        starts.append(max(done_at, prompt.at))
        done_at = starts[-1] + prompt.work_s
        if done_at <= prompt.due:
            continue
        # Without prompt k, those behind it begin sooner by its work, but not before they arrive.
        slack, best_s, best = float("inf"), -1.0, 0
        for k in range(len(chosen) - 1, -1, -1):
            sooner_s = min(chosen[k].work_s, slack)
            if sooner_s > best_s:
                best_s, best = sooner_s, k
            slack = min(slack, starts[k] - chosen[k].at)
            if slack <= 0.0:
                break
        del chosen[best], starts[best]
        done_at = starts[best - 1] + chosen[best - 1].work_s if best else 0.0
        for k in range(best, len(chosen)):
            starts[k] = max(done_at, chosen[k].at)
            done_at = starts[k] + chosen[k].work_s
    return chosen


def _served(prompts: Sequence[Prompt]) -> list[tuple[float, float]]:
    """When the machine is busy with these prompts: begin and end of each, in order."""
    spans: list[tuple[float, float]] = []
    for prompt in prompts:
        begin = max(spans[-1][1] if spans else 0.0, prompt.at)
        spans.append((begin, begin + prompt.work_s))
    return spans


def _without(busy: Sequence[tuple[float, float]], prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts on a clock that stands still while the machine is busy."""
    taken = list(accumulate([end - begin for begin, end in busy], initial=0.0))
    found, place = {}, 0
    for at in sorted({time for prompt in prompts for time in (prompt.at, prompt.due)}):
        while place < len(busy) and busy[place][1] <= at:
            place += 1
        current_s = max(0.0, at - busy[place][0]) if place < len(busy) else 0.0
        found[at] = at - taken[place] - current_s
    return [Prompt(found[prompt.at], prompt.work_s, found[prompt.due]) for prompt in prompts]
