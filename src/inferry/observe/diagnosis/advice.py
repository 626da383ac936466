"""What fits the traffic that was seen: a batching mode, a technique, a scale."""

from inferry.observe.diagnosis.engine import slow_worker
from inferry.observe.diagnosis.facts import MIN_CALLS, Facts, LaneFacts
from inferry.observe.diagnosis.findings import Advice
from inferry.observe.diagnosis.latency import fleet_parts
from inferry.observe.diagnosis.pressure import (
    HIGH_UTILISATION,
    has_slack,
    is_full,
    late_lanes,
    pressed_lanes,
    ratio,
    up_workers,
)

SIMILAR = 0.25
"""Standard deviation over mean of prompt lengths below which a padded pass wastes little."""
TOOL_SHARE = 0.4
PREFILL_SHARE = 0.4
DECODE_SHARE = 0.6
WAITING_SHARE = 0.25
REPEATED = 0.3
WELL_CACHED = 0.5
SHORT_OUTPUT_TOKENS = 64
PROCESS_CALLS_PER_S = 2000.0
"""Half of the streamed calls per second that one process serves at full load, so that bursts of twice the mean fit:
3,930 on a host with 16 cores, and 5,063 whole ones (`benchmarks/results/processes.json`)."""
ENGINES_PER_NODE = 8
"""The usual GPU server has eight GPUs (NVIDIA HGX and DGX), and an engine uses at least one."""


def give_advice(facts: Facts) -> tuple[Advice, ...]:
    """One of each kind; none before there are enough calls."""
    if facts.calls < MIN_CALLS:
        return ()
    return (_batching_mode(facts), _technique(facts), _scale(facts))


def _batching_mode(facts: Facts) -> Advice:
    live = sum(lane.calls for lane in facts.lanes if lane.is_live)
    share = ratio(live, facts.calls)
    stutters = next((lane for lane in facts.lanes if _stutters(lane)), None)
    traffic = max(
        (lane.traffic for lane in facts.lanes if lane.traffic is not None), key=lambda t: t.attempts, default=None
    )
    if stutters is not None and slow_worker(facts) is None and not all(one.pads for one in up_workers(facts)):
        return Advice(
            "batching mode",
            "hybrid",
            f"the p99 inter-token latency of lane {stutters.lane} is {stutters.itl_p99_ms:.0f} ms, beyond its target "
            f"of {stutters.itl_ms:.0f} ms, and the median is within it: prompts should not share the steps of streams.",
        )
    if share >= 0.1:
        return Advice(
            "batching mode",
            "continuous",
            f"{share:.0%} of the calls are live: sequences should join and leave the batch at every step.",
        )
    if traffic is not None and traffic.prompt_tokens_sd <= SIMILAR * traffic.prompt_tokens:
        return Advice(
            "batching mode",
            "static, with a window of 200 to 500 ms",
            f"batch work of similar prompts ({traffic.prompt_tokens:.0f} ± {traffic.prompt_tokens_sd:.0f} tokens): "
            "a padded pass wastes little.",
        )
    return Advice(
        "batching mode",
        "dynamic or continuous",
        "batch work of mixed lengths: slots should be refilled when a sequence ends.",
    )


def _stutters(lane: LaneFacts) -> bool:
    """Whether most of a stream's tokens are in time and single ones are late, as in steps that compute prompts too."""
    target_ms, p50_ms, p99_ms = lane.itl_ms, lane.itl_p50_ms, lane.itl_p99_ms
    if target_ms is None or p50_ms is None or p99_ms is None or lane.calls < MIN_CALLS:
        return False
    return p50_ms <= target_ms < p99_ms


def _technique(facts: Facts) -> Advice:
    shares = {part.stage: part.share for part in fleet_parts(facts)}
    known = [lane.traffic for lane in facts.lanes if lane.traffic is not None]
    attempts = sum(one.attempts for one in known)
    repeated = ratio(sum(one.templated_ratio * one.attempts for one in known), attempts)
    output = ratio(sum(one.output_tokens * one.attempts for one in known), attempts)
    cached = ratio(facts.cached_tokens, facts.prompt_tokens)
    tool, prefill, decode = (shares.get(stage, 0.0) for stage in ("tool", "prefill", "decode"))
    waits = shares.get("queue", 0.0) + shares.get("batching", 0.0)
    if tool >= TOOL_SHARE:
        return Advice("technique", "parallel tools", f"{tool:.0%} of a run's time passes between its model calls.")
    if prefill >= PREFILL_SHARE and repeated >= REPEATED and cached < WELL_CACHED:
        why = (
            f"{prefill:.0%} of the time is prefill, {repeated:.0%} of the calls repeat a template, {cached:.0%} of the "
        )
        return Advice("technique", "caching", f"{why}prompt tokens are cached.")
    if waits >= WAITING_SHARE:
        return Advice("technique", "batching", f"{waits:.0%} of the time is waiting for a worker or a batch.")
    decoding = f"{decode:.0%} of the time is decoding of {output:.0f} tokens per call"
    if not late_lanes(facts):
        cheaper = f"; {decoding}, which a smaller model would make cheaper" if decode >= DECODE_SHARE else ""
        return Advice("technique", "none needed", f"{waits:.0%} of the time is waiting, and no lane is late{cheaper}.")
    if decode >= DECODE_SHARE:
        easy = ": route easy steps to it" if output <= SHORT_OUTPUT_TOKENS else ""
        return Advice("technique", "a smaller model", f"calls are late, and {decoding}, with little queueing{easy}.")
    queued = sum(one.waiting or 0.0 for one in up_workers(facts))
    if queued >= 1.0:
        return Advice("technique", "batching", f"{queued:.0f} sequences at a time wait inside the engines.")
    why = f"calls are late, and {waits:.0%} of the time is waiting: the rest is the computation itself."
    return Advice("technique", "a smaller model", why)


def _scale(facts: Facts) -> Advice:
    calls_per_s = facts.calls_per_s
    workers = up_workers(facts)
    known = [one.utilisation for one in workers if one.utilisation is not None]
    mean = sum(known) / len(known) if known else None
    shown = "" if mean is None else f", GPU utilisation {mean:.0%}"
    has_spare = any(has_slack(facts, one) for one in workers)
    is_busy = all(is_full(one) for one in workers) or (mean or 0.0) > HIGH_UTILISATION
    is_short = bool(pressed_lanes(facts)) and is_busy and not has_spare
    if calls_per_s > PROCESS_CALLS_PER_S or len(workers) + is_short > ENGINES_PER_NODE:
        why = f"{calls_per_s:.0f} calls/s on {len(workers)} engines{shown}."
        return Advice("scale", "several nodes", why)
    if len(workers) > 1 or is_short:
        why = f"{calls_per_s:.1f} calls/s on {len(workers)} engine{'s' if len(workers) != 1 else ''}{shown}; "
        choice = "several engines behind one gateway process"
        return Advice("scale", choice, why + ("lanes wait for capacity." if is_short else "one process is enough."))
    return Advice("scale", "one process", f"{calls_per_s:.1f} calls/s on one engine{shown}.")
