"""How many prompts of recorded traffic cannot meet a TTFT target even alone, by `ttft_ms_per_1k_tokens`.

A prompt alone on an idle engine needs the time of its uncached tokens, their attention, and the request and reply
outside the engine; blocks that an earlier call of the trace had are cached. If that is more than the target, no
schedule can meet it, and a lane's attainment counts a miss that says nothing about the gateway. Harbor's prompts are
counted as well: a default that changes what they are measured against would change every figure of Harbor.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.never_worse import SLO
from benchmarks.trace_files import AGENTS, AZURE, CODING, MOONCAKE, trace_file
from inferry.domain.lanes import Lane
from inferry.sim.calls import Run
from inferry.sim.costs import EngineModel, load_model
from inferry.sim.harbor import harbor
from inferry.sim.prompts import block_hashes, length
from inferry.sim.report import quantile
from inferry.sim.traces import read_trace

MS_PER_1K_TOKENS = (0, 20, 30, 40, 60)
LIVE = (Lane.P0, Lane.P1)


def measure() -> dict[str, Any]:
    model = load_model()
    traffic = {"harbor": [run for run in harbor(1) if run.lane in LIVE]}
    traffic |= {name: list(read_trace(trace_file(name))) for name in (AZURE, MOONCAKE, CODING, AGENTS)}
    result = {name: compare(list(alone(runs, model))) for name, runs in traffic.items()}
    for name, row in result.items():
        print(name, row, flush=True)
    return {"ms_per_1k_tokens": list(MS_PER_1K_TOKENS), "traffic": result}


def alone(runs: Iterable[Run], model: EngineModel) -> Iterator[tuple[int, float]]:
    """Uncached prompt tokens of each call, and its TTFT on an idle engine."""
    costs, flags = model.costs, model.flags
    step_s = (costs.base_s + costs.prefill_step_s) / flags.max_num_batched_tokens
    cached: set[int] = set()
    for run in sorted(runs, key=lambda run: run.at):
        for step in run.steps:
            tokens = length(step.prompt)
            blocks = block_hashes(step.prompt, flags.block_tokens)
            new = tokens - flags.block_tokens * sum([block in cached for block in blocks])
            cached.update(blocks)
            pairs = new * (2 * tokens - new) / 2
            work_s = new * (costs.prefill_token_s + step_s) + pairs * costs.attention_pair_s
            yield new, work_s + costs.request_cost_s(tokens) + costs.reply_s


def compare(calls: list[tuple[int, float]]) -> dict[str, Any]:
    tokens = [new for new, _ in calls]
    return {
        "calls": len(calls),
        "uncached_tokens_p50": quantile(tokens, 0.5),
        "uncached_tokens_p99": quantile(tokens, 0.99),
        "hopeless": {
            lane.name: {str(ms): round(hopeless(calls, SLO[lane].ttft_s, ms), 4) for ms in MS_PER_1K_TOKENS}
            for lane in LIVE
        },
    }


def hopeless(calls: list[tuple[int, float]], ttft_s: float, ms_per_1k_tokens: float) -> float:
    """Part of the calls that are late even alone."""
    return sum([alone_s > ttft_s + new * ms_per_1k_tokens / 1e6 for new, alone_s in calls]) / len(calls)
