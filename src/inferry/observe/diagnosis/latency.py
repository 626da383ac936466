"""The split of latency: queue wait, batching, prefill, decode, and tool time between a run's calls."""

from inferry.observe.diagnosis.facts import Facts, LaneFacts
from inferry.observe.diagnosis.findings import LaneSplit, LatencyPart, Stage

STAGES: tuple[Stage, ...] = ("queue", "batching", "prefill", "decode", "tool")


def lane_splits(facts: Facts) -> tuple[LaneSplit, ...]:
    """One per lane with calls."""
    found = []
    for lane in facts.lanes:
        times = _times_ms(lane)
        total_ms = sum(times.values())
        if lane.calls and total_ms > 0:
            parts = tuple(LatencyPart(stage, ms, ms / total_ms) for stage, ms in times.items())
            found.append(LaneSplit(lane.lane, lane.calls, total_ms, parts))
    return tuple(found)


def fleet_parts(facts: Facts) -> tuple[LatencyPart, ...]:
    """The split over all lanes, weighted by their calls."""
    sums: dict[Stage, float] = {}
    calls = 0
    for lane in facts.lanes:
        number = lane.calls if lane.traffic is None else lane.traffic.attempts
        calls += number
        for stage, ms in _times_ms(lane).items():
            sums[stage] = sums.get(stage, 0.0) + number * ms
    total = sum(sums.values())
    return tuple(LatencyPart(stage, sums[stage] / calls, sums[stage] / total) for stage in sums) if total > 0 else ()


def _times_ms(lane: LaneFacts) -> dict[Stage, float]:
    """Mean time per call by stage, without the stages that are unknown."""
    traffic = lane.traffic
    if traffic is None:
        held_ms = lane.batching_mean_ms
        known = {"queue": None if lane.wait_mean_ms is None else lane.wait_mean_ms - (held_ms or 0.0)}
        known["batching"] = held_ms
        known["prefill"] = None if lane.ttft_p50_ms is None else max(0.0, lane.ttft_p50_ms - (lane.wait_p50_ms or 0.0))
    else:
        tool_ms = None if traffic.tool_ms is None else traffic.tool_ms * traffic.tool_calls / traffic.attempts
        known = {
            "queue": traffic.queue_ms,
            "batching": traffic.batching_ms,
            "prefill": traffic.prefill_ms,
            "decode": traffic.decode_ms,
            "tool": tool_ms,
        }
    return {stage: ms for stage in STAGES if (ms := known.get(stage)) is not None}
