"""Step costs that the gateway would learn from a recorded benchmark, with counters read at other phases.

Every engine step produces a token for each decoding stream, so steps are visible from outside as simultaneous events; a
prompt counts with its first token. A gateway reads such counters twice a second, at a random phase. So a recording is
read at ten phases. This is open loop: capacity does not follow from the learned costs, and the recorded calls are
fixed.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from statistics import mean
from typing import Any

from msgspec import Struct

from benchmarks.harbor_misses import DIP_RATIO, Prompts
from benchmarks.harbor_record import Recording
from inferry.scheduling.capacity.step_costs import StepCostModel

READ_EVERY_S = 0.5
PHASES = 10
UNTIL_S = 40.0
SAME_STEP_S = 0.003
PROMPT_S = 23.2e-6
"""Cost of a prompt token on the recorded engine, learned from the paced client's recordings, where steps vary."""


class Counts(Struct, frozen=True):
    """Times of steps, output tokens and prompts, and cumulative prompt tokens."""

    steps_s: Sequence[float]
    tokens_s: Sequence[float]
    prompts_s: Sequence[float]
    prompt_tokens: Sequence[int]

    def by(self, moment_s: float) -> tuple[int, int, int]:
        prompts = bisect_right(self.prompts_s, moment_s)
        return (
            bisect_right(self.steps_s, moment_s),
            bisect_right(self.tokens_s, moment_s),
            self.prompt_tokens[prompts],
        )


def counts(recording: Recording) -> Counts:
    tokens_s = sorted((call.at_ms + time) / 1000 for call in recording.calls for time in call.times_ms)
    steps_s = tokens_s[:1] + [later for earlier, later in pairwise(tokens_s) if later - earlier > SAME_STEP_S]
    computed = sorted((at_s, tokens) for at_s, _, tokens in Prompts(recording).computed)
    return Counts(
        steps_s,
        tokens_s,
        [at_s for at_s, _ in computed],
        [0, *accumulate(tokens for _, tokens in computed)],
    )


def learned_costs(seen: Counts, phase_s: float, until_s: float = UNTIL_S) -> Iterator[tuple[float, StepCostModel]]:
    """The time of every reading, and the cost model then (one object that changes)."""
    costs = StepCostModel()
    last_s, last = 0.0, (0, 0, 0)
    moment_s = phase_s or READ_EVERY_S
    while moment_s <= until_s:
        now = seen.by(moment_s)
        steps, tokens, prompt_tokens = (after - before for after, before in zip(now, last, strict=True))
        costs.add(moment_s - last_s, moment_s - last_s, steps, tokens, prompt_tokens)
        yield moment_s, costs
        last_s, last = moment_s, now
        moment_s += READ_EVERY_S


def underestimated_prompt_cost(recording: Recording) -> dict[str, Any]:
    """Seconds of the first 40 in which prompts appear free, by phase, and their lowest estimated cost."""
    seen = counts(recording)
    seconds, least_us = [], []
    for phase in range(PHASES):
        prompt_s = [
            costs.prompt_s
            for at_s, costs in learned_costs(seen, phase * READ_EVERY_S / PHASES)
            if at_s >= 2 * READ_EVERY_S
        ]
        seconds.append(READ_EVERY_S * sum(one < DIP_RATIO * PROMPT_S for one in prompt_s))
        least_us.append(round(1e6 * min(prompt_s), 1))
    return {
        "arm": recording.arm,
        "seed": recording.seed,
        "attempt": recording.attempt,
        "mean_s": round(mean(seconds), 2),
        "seconds": seconds,
        "least_prompt_us": min(least_us),
    }
