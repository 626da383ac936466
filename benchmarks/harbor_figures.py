"""The figures of the recording load generator, computed again from a recording: attainment, times, tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harbor_record import CANCELLED, Call, Recording, is_abandoned
from inferry.domain.lanes import Lane

SLO_TARGETS_MS = {"P0": (500, 30), "P1": (2_000, 50), "P2": (90_000, 500)}
"""SLO targets of Harbor: TTFT and inter-token latency."""


def lateness_ms(call: Call) -> list[float]:
    """Lateness of each event relative to its token's due time; negative if in time. Events may carry several tokens."""
    first_ms, itl_ms = SLO_TARGETS_MS[call.lane]
    times = call.times_ms
    tokens_each = call.out / len(times) if times else 1.0
    return [time - (first_ms + itl_ms * number * tokens_each) for number, time in enumerate(times)]


def attained(call: Call) -> bool:
    late = lateness_ms(call)
    return call.ok and bool(late) and max(late) <= 0


def figures(recording: Recording) -> dict[str, Any]:
    """The load generator's figures, without run latencies. A cancelled run has no planned calls; one that broke misses
    its later steps.
    """
    calls_of: dict[str, list[Call]] = {}
    for call in recording.calls:
        calls_of.setdefault(call.run, []).append(call)
    planned = dict.fromkeys(SLO_TARGETS_MS, 0)
    left = dict.fromkeys(SLO_TARGETS_MS, 0)
    end_ms = 0.0
    for run in recording.runs().values():
        calls = calls_of.get(run.run_id, [])
        gone = is_abandoned(run, calls)
        left[run.lane.name] += gone
        planned[run.lane.name] += 0 if gone else len(run.steps)
        if calls:
            tool_ms = 0.0 if gone or not calls[-1].ok else 1000 * run.steps[len(calls) - 1].tool_s
            end_ms = max(end_ms, calls[-1].at_ms + calls[-1].end_ms + tool_ms)
    out_tokens = sum(call.out for call in recording.calls)
    return {
        "label": recording.arm,
        "seed": recording.seed,
        "attempt": recording.attempt,
        "calls": len(recording.calls),
        "wall_s": round(end_ms / 1000, 1),
        "out_tokens": out_tokens,
        "out_tok_s": round(1000 * out_tokens / end_ms, 1),
        "failed": sum(not call.ok and call.err != CANCELLED for call in recording.calls),
        "resets": sum(call.resets for call in recording.calls),
    } | {
        lane.name: _of_lane([call for call in recording.calls if call.lane == lane.name], planned[lane.name])
        | {"cancelled": left[lane.name]}
        for lane in Lane
    }


def _of_lane(calls: Sequence[Call], planned: int) -> dict[str, Any]:
    whole = [call for call in calls if call.err != CANCELLED]
    begun = [call for call in whole if call.deltas_ms]
    first = [call.deltas_ms[0] for call in begun]
    itls = [sum(call.deltas_ms[1:]) / max(1, call.out - 1) for call in begun if len(call.deltas_ms) > 1]
    ends = [call.end_ms for call in whole]
    return {
        "planned": planned,
        "slo": round(min(1.0, sum(map(attained, whole)) / max(1, planned)), 4),
        "ttft_p50": _quantile_s(first, 0.5),
        "ttft_p95": _quantile_s(first, 0.95),
        "ttft_p99": _quantile_s(first, 0.99),
        "step_p50": _quantile_s(ends, 0.5),
        "step_p95": _quantile_s(ends, 0.95),
        "gap_p50": _quantile_s(itls, 0.5),
        "gap_p95": _quantile_s(itls, 0.95),
    }


def _quantile_s(values_ms: Sequence[float], part: float) -> float | None:
    ordered = sorted(values_ms)
    return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))] / 1000, 4) if ordered else None


def differences(computed: dict[str, Any], printed: dict[str, Any]) -> list[str]:
    """Differences from the load generator's figures. Counts and attainment must match; times may differ by rounding."""
    wrong = []

    def compare(name: str, here: Any, there: Any, alike: Callable[[Any, Any], bool]) -> None:
        if here != there and not (here is not None and there is not None and alike(here, there)):
            wrong.append(f"{name}: {here} here, {there} printed")

    for name in ("label", "seed", "calls", "out_tokens", "failed", "resets"):
        compare(name, computed[name], printed[name], lambda *_: False)
    compare("wall_s", computed["wall_s"], printed["wall_s"], lambda here, there: abs(here - there) <= 0.2)
    for lane in SLO_TARGETS_MS:
        for name, value in computed[lane].items():
            if name in ("planned", "slo", "cancelled"):
                compare(f"{lane} {name}", value, printed[lane][name], lambda *_: False)
            else:
                compare(f"{lane} {name}", value, printed[lane][name], lambda here, there: abs(here - there) <= 0.0015)
    return wrong
