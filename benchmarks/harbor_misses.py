"""Why calls of the strictest lane missed their SLO target behind the gateway: when, by how much, and the cause.

A missed call is compared with the capacity controller's estimates between its arrival and its first late token, and
with the prompts computed while it lost its slack: from its maximum slack (or from its arrival, if its first token was
late) to the first late token. Causes are checked in this order, and the first counts:

prompts looked free      the estimated cost of prompts was below two thirds of its usual value, so too many were
admitted costs not yet known      the first ten seconds: costs are priors, and the first burst arrives left over from
that      within ten seconds after prompts looked free: delayed calls are served live prompts alone       hardly any
batch prompt was computed in that time: prompts of live calls filled the engine batch prompts            batch prompts
were computed beside it
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from msgspec import Struct

from benchmarks.harbor_figures import attained, lateness_ms
from benchmarks.harbor_record import CANCELLED, Belief, Call, Recording
from inferry.domain.lanes import Lane
from inferry.sim.prompts import block_hashes, length

PROMPT_COST_DIP = "prompts looked free"
COSTS_UNKNOWN = "costs not yet known"
RECOVERY = "left over from that"
LIVE_PROMPTS = "live prompts alone"
BATCH_PROMPTS = "batch prompts"
CAUSES = (PROMPT_COST_DIP, COSTS_UNKNOWN, RECOVERY, LIVE_PROMPTS, BATCH_PROMPTS)
DIP_RATIO = 2 / 3
RECOVERY_S = 10.0
BLOCK_TOKENS = 16
MIN_BATCH_FRACTION = 0.1
"""Fraction of all prompt tokens up to which batch prompts do not count."""


class Miss(Struct, frozen=True, kw_only=True):
    """A call that missed. Seconds since the benchmark began; `late_token` is the first late token."""

    run: str
    step: str
    at_s: float
    late_at_s: float
    late_token: int
    first_token_ms: int
    worst_ms: float
    most_slack_ms: float
    losing_s: float
    batch_part: float
    cause: str


class Prompts:
    """Computed prompt tokens over time, by lane: those not in a prefix of an earlier prompt of the tenant. Derived from
    the workload, since engines do not report it per call; counted at the first token.
    """

    def __init__(self, recording: Recording) -> None:
        runs = recording.runs()
        steps: Counter[str] = Counter()
        begun: list[tuple[float, Call, int]] = []
        for call in recording.calls:
            index = steps[call.run]
            steps[call.run] += 1
            if call.deltas_ms:
                begun.append(((call.at_ms + call.deltas_ms[0]) / 1000, call, index))
        known: set[tuple[str, int]] = set()
        self.computed: list[tuple[float, str, int]] = []
        for at_s, call, index in sorted(begun, key=lambda one: one[0]):
            prompt = runs[call.run].steps[index].prompt
            blocks = [(call.tenant, block) for block in block_hashes(prompt, BLOCK_TOKENS)]
            cached = next((i for i, block in enumerate(blocks) if block not in known), len(blocks))
            known.update(blocks)
            self.computed.append((at_s, call.lane, length(prompt) - BLOCK_TOKENS * cached))

    def between(self, start_s: float, stop_s: float) -> Counter[str]:
        found: Counter[str] = Counter()
        for at_s, lane, tokens in self.computed:
            if start_s <= at_s <= stop_s:
                found[lane] += tokens
        return found


def misses(recording: Recording, lane: Lane = Lane.P0) -> Iterator[Miss]:
    """Completed calls of the lane with at least one late token."""
    prompts = Prompts(recording)
    dips = _prompt_cost_dips(recording.beliefs)
    for call in recording.calls:
        if call.lane != lane.name or call.err == CANCELLED or not call.ok or attained(call):
            continue
        late = lateness_ms(call)
        token = next(number for number, ms in enumerate(late) if ms > 0)
        at_s = call.at_ms / 1000
        late_at_s = at_s + call.times_ms[token] / 1000
        most_slack = min(range(token + 1), key=lambda number: late[number])
        losing_from_s = at_s + (call.times_ms[most_slack] / 1000 if token else 0.0)
        computed = prompts.between(losing_from_s, late_at_s)
        batch_part = computed[Lane.P2.name] / max(1, computed.total())
        yield Miss(
            run=call.run,
            step=call.step,
            at_s=at_s,
            late_at_s=late_at_s,
            late_token=token,
            first_token_ms=call.deltas_ms[0],
            worst_ms=max(late),
            most_slack_ms=-min(late[: token + 1]),
            losing_s=late_at_s - losing_from_s,
            batch_part=batch_part,
            cause=_cause(at_s, late_at_s, batch_part, dips),
        )


def _prompt_cost_dips(beliefs: Sequence[Belief]) -> list[float]:
    known = [belief for belief in beliefs if belief.prompt_us > 0]
    usual_us = median([belief.prompt_us for belief in known]) if known else 0.0
    return [belief.at_s for belief in known if belief.prompt_us < DIP_RATIO * usual_us]


def _cause(at_s: float, late_at_s: float, batch_part: float, dips: Sequence[float]) -> str:
    # A log line also covers the second before it.
    if any(at_s - 1 <= second <= late_at_s + 1 for second in dips):
        return PROMPT_COST_DIP
    if late_at_s < RECOVERY_S:
        return COSTS_UNKNOWN
    if dips and 0 <= late_at_s - max(dips) <= RECOVERY_S:
        return RECOVERY
    return LIVE_PROMPTS if batch_part <= MIN_BATCH_FRACTION else BATCH_PROMPTS


def missed_by_lane(recording: Recording) -> dict[str, dict[str, int]]:
    """The number of calls of runs that were not cancelled, and how many of them missed."""
    found: dict[str, dict[str, int]] = {lane.name: {"calls": 0, "missed": 0} for lane in Lane}
    for call in recording.calls:
        if call.err != CANCELLED:
            found[call.lane]["calls"] += 1
            found[call.lane]["missed"] += not (call.ok and attained(call))
    return found


def summary(recording: Recording) -> dict[str, Any]:
    """All misses of an arm, counted."""
    all_misses = list(misses(recording))
    worst = sorted(miss.worst_ms for miss in all_misses)
    return {
        "seed": recording.seed,
        "attempt": recording.attempt,
        "calls": sum(call.lane == "P0" and call.err != CANCELLED for call in recording.calls),
        "missed": len(all_misses),
        "first_token_late": sum(miss.late_token == 0 for miss in all_misses),
        "causes": {cause: n for cause in CAUSES if (n := sum(miss.cause == cause for miss in all_misses))},
        "seconds_prompts_looked_free": len(_prompt_cost_dips(recording.beliefs)),
        "missed_by_second": dict(sorted(Counter(int(miss.late_at_s) for miss in all_misses).items())),
        "first_token_ms_p50": median([miss.first_token_ms for miss in all_misses]) if worst else None,
        "late_token_p50": median([miss.late_token for miss in all_misses]) if worst else None,
        "most_slack_ms_p50": round(median([miss.most_slack_ms for miss in all_misses])) if worst else None,
        "losing_s_p50": round(median([miss.losing_s for miss in all_misses]), 2) if worst else None,
        "worst_late_ms": {
            "p50": round(median(worst)),
            "p90": round(worst[int(0.9 * len(worst))]),
            "max": round(worst[-1]),
            "at_most_30": sum(ms <= 30 for ms in worst),
            "at_most_100": sum(ms <= 100 for ms in worst),
        }
        if worst
        else {},
    }
