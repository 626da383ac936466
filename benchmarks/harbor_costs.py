"""What the gateway would learn of an engine's costs from a recorded contest: its sums again, read at other moments.

Every engine step brings a token to each stream that decodes, so steps are seen from outside as events at one moment; a
prompt counts when its first token comes. A gateway reads such counts twice a second, and at which part of the half
second is chance. So a recording is read at ten phases. That is open loop: rooms do not follow from what is learned, and
what was sent stays what it was.
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
"""What a prompt token cost on the engine of the contest, as learned from the sketch's recordings, where steps vary."""


class Counts(Struct, frozen=True):
    """When steps, output tokens and prompts were done, and how many prompt tokens had been computed by then."""

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
    """The moment of every reading, and what is believed then. It is one object that changes."""
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
    """For how many of the first forty seconds prompts look free, by phase, and how cheap they come to look."""
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
