"""Whether the simulator's Harbor workloads equal those of the load generator that recorded the runs on the H200.

The reference is kept as one digest per workload and seed. A digest covers every run (its name, tenant, lane, start and
cancellation), every step (name, prompt and output tokens, tool time), and how many prompt tokens each step shares with
the step before it.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from inferry.sim.calls import Run, Step
from inferry.sim.harbor import harbor, simple_harbor
from inferry.sim.prompts import length

REFERENCE = {
    "newer": (
        *("bd1588fae8180145", "79ec03165829270e", "794f49a97a804791", "a359ae48bd8ea7be"),
        *("a9279cb8629d76e3", "e05e703cc4cfd55f", "054ef08f44296d3b", "6c595f5d93a4292e"),
        *("1ccf8ba7a7bfa9fe", "ed5c62189dcc0df6"),
    ),
    "simpler": (
        *("0fc42bcf46811cf1", "2ad41d2b09991cc4", "3278efa9b7bc0c63", "5fc792469b594de7"),
        *("a002bcebe729234a", "bed0d0ce4e5d60e5", "2630edaa64e73873", "d91cda41e7a6bdad"),
        *("afdaf061afc2ec0b", "2cb8e4311d544738"),
    ),
}
"""Digests of the reference workloads with seeds 0 to 9."""


def matches_reference(seed: int) -> dict[str, Any]:
    """Whether both workloads of a seed equal the reference."""
    return {
        "seed": seed,
        "newer": workload_digest(harbor(seed)) == REFERENCE["newer"][seed],
        "simpler": workload_digest(simple_harbor(seed)) == REFERENCE["simpler"][seed],
    }


def workload_digest(runs: Sequence[Run]) -> str:
    shapes = [
        (
            *(run.run_id, run.tenant, run.lane.name, run.at, run.cancel_after_s),
            [(step.name, length(step.prompt), step.output, step.tool_s) for step in run.steps],
            [_shared_tokens(step, following) for step, following in pairwise(run.steps)],
        )
        for run in runs
    ]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def _shared_tokens(step: Step, following: Step) -> int:
    """Tokens at the start of both prompts that are the same."""
    shared = 0
    for piece, other in zip(step.prompt, following.prompt, strict=False):
        if piece[:2] != other[:2]:
            break
        shared += min(piece[2], other[2])
        if piece[2] != other[2]:
            break
    return shared
