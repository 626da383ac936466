"""Rules about time outside the gateway: tools between calls, and clients that read slowly."""

from inferry.observe.diagnosis.facts import MIN_CALLS, Facts
from inferry.observe.diagnosis.findings import Evidence, Finding, Setting
from inferry.observe.diagnosis.latency import fleet_parts
from inferry.observe.diagnosis.pressure import ratio

TOOL_SHARE = 0.5
MERGED_RATIO = 0.1


def slow_tool(facts: Facts) -> Finding | None:
    """Runs spend most of their time between model calls: faster inference would not help."""
    parts = {part.stage: part for part in fleet_parts(facts)}
    tool = parts.get("tool")
    calls = sum(lane.traffic.tool_calls for lane in facts.lanes if lane.traffic is not None)
    if tool is None or tool.share < TOOL_SHARE or calls < MIN_CALLS:
        return None
    model_ms = sum(part.mean_ms for part in parts.values()) - tool.mean_ms
    return Finding(
        cause="slow_tool",
        stage="tool",
        where="runs",
        summary="Runs spend most of their time between model calls, in tools. Batching is not the problem.",
        evidence=(
            Evidence("part of a run's time between its calls", tool.share, "ratio", TOOL_SHARE),
            Evidence("mean time before a call of a run", tool.mean_ms, "ms"),
            Evidence("mean time of a call itself", model_ms, "ms"),
        ),
        setting=Setting("action", "call independent tools in parallel", "and shorten the slowest tool"),
    )


def slow_reader(facts: Facts) -> Finding | None:
    """Clients take tokens later than they are produced."""
    merged = ratio(facts.merged_deltas, facts.output_tokens + facts.merged_deltas)
    if facts.merged_deltas < MIN_CALLS or merged < MERGED_RATIO:
        return None
    return Finding(
        cause="slow_reader",
        stage="client",
        where="clients",
        summary="Clients read their streams more slowly than tokens are produced. Other streams are not affected.",
        evidence=(
            Evidence("deltas merged because a reader was behind", facts.merged_deltas, "deltas"),
            Evidence("part of all output", merged, "ratio", MERGED_RATIO),
            Evidence("streams that are behind now", facts.slow_streams, "streams"),
        ),
        setting=Setting("action", "read streams in a task of their own in the client", "or call without `stream`"),
    )
