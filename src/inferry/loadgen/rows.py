"""Calls and runs of a load test as rows: the content of a result file and the source of all figures."""

from collections.abc import Sequence

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.loadgen.load_generator import Call, RunRecord
from inferry.sim.prompts import GrowingPrompt
from inferry.sim.workload import SloTarget

BLOCK_TOKENS = 16


class CallRow(Struct, frozen=True, gc=False, array_like=True):
    """One call. Times are seconds since it was due, `due_s` since the load test began; None: it did not get so far.

    `late_s` is max over tokens i of (time of token i - itl of the lane * i), less what the lane allows for the uncached
    prompt. The call meets its target if `late_s` is at most the lane's ttft. `lag_ms` is the lateness of the generator.
    `cached` is as reported by the server, otherwise the prefix that the same tenant had sent before.
    """

    run: str
    step: str
    tenant: str
    lane: str
    outcome: str
    prompt: int
    requested_tokens: int
    produced: int
    cached: int
    due_s: float
    lag_ms: float
    sent_s: float | None
    ttft_s: float | None
    end_s: float
    late_s: float | None
    resets: int = 0
    refused: int = 0

    @property
    def is_done(self) -> bool:
        return self.outcome == "done"

    @property
    def is_failed(self) -> bool:
        return self.outcome not in ("done", "cancelled")

    @property
    def ended_s(self) -> float:
        return self.due_s + self.end_s


class RunRow(Struct, frozen=True, gc=False, array_like=True):
    """One run. `cancelled`: its agent cancelled it, or the load test was stopped; its calls then have no target."""

    run: str
    tenant: str
    lane: str
    at_s: float
    latency_s: float
    planned: int
    ok: bool
    cancelled: bool


def call_rows(calls: Sequence[Call], began: float, slo_targets: dict[Lane, SloTarget]) -> list[CallRow]:
    """Calls in the order in which they were due."""
    ordered = sorted(calls, key=lambda call: call.due)
    cached_estimate = _cached_prefixes(ordered) if any(call.cached is None for call in ordered) else [0] * len(ordered)
    return [
        _row(call, began, slo_targets[call.run.lane], seen) for call, seen in zip(ordered, cached_estimate, strict=True)
    ]


def run_rows(run_records: Sequence[RunRecord], began: float) -> list[RunRow]:
    rows = [
        RunRow(
            one.run.run_id,
            one.run.tenant,
            one.run.lane.name,
            _rounded(one.run.at),
            _rounded(one.ended - one.began),
            len(one.run.steps),
            one.ok,
            one.cancelled or one.stopped,
        )
        for one in run_records
    ]
    return sorted(rows, key=lambda row: row.at_s)


def _row(call: Call, began: float, slo_target: SloTarget, seen: int) -> CallRow:
    times = call.times
    cached = seen if call.cached is None else call.cached
    uncached = max(0, call.prompt - cached)
    return CallRow(
        call.run.run_id,
        call.step.name,
        call.run.tenant,
        call.run.lane.name,
        call.outcome,
        call.prompt,
        call.requested_tokens,
        call.produced,
        cached,
        _rounded(call.due - began),
        round(call.late_s * 1000, 2),
        None if call.sent is None else _rounded(call.sent - call.due),
        _rounded(times[0] - call.due) if times else None,
        _rounded(call.ended - call.due),
        _rounded(lateness_s(call, slo_target.itl_s) - slo_target.ttft_s_per_1k_tokens * uncached / 1000)
        if times
        else None,
        call.resets,
        call.refused,
    )


def lateness_s(call: Call, itl_s: float) -> float:
    """Lateness of the worst token relative to a stream with one token every `itl_s`.

    If a server puts several tokens into an event, all of them arrive with it.
    """
    itl_s *= tokens_per_event(call)
    return max([moment - itl_s * number for number, moment in enumerate(call.times)]) - call.due


def tokens_per_event(call: Call) -> float:
    return max(1.0, call.produced / len(call.times)) if call.times else 1.0


def _cached_prefixes(calls: Sequence[Call]) -> list[int]:
    """Prompt tokens that the tenant had sent before: the hits of an unbounded cache."""
    known: dict[str, set[int]] = {}
    growing: dict[str, GrowingPrompt] = {}
    seen = []
    for call in calls:
        prompt = growing.setdefault(call.run.run_id, GrowingPrompt(BLOCK_TOKENS))
        hashes = prompt.block_hashes(call.step.prompt)
        warm = known.setdefault(call.run.tenant, set())
        # The last block is always computed, to produce the first token.
        usable = hashes[: (call.prompt - 1) // BLOCK_TOKENS]
        found = next((number for number, one in enumerate(usable) if one not in warm), len(usable))
        seen.append(found * BLOCK_TOKENS)
        warm.update(hashes)
    return seen


def _rounded(seconds: float) -> float:
    return round(seconds, 5)
