"""A decision record as sentences, for timelines and pages."""

from inferry.domain import decisions
from inferry.domain.decisions import Decision, Overflow
from inferry.domain.prices import NANOS_PER_UNIT

_HELD_FOR = {
    decisions.WINDOW: "for the lane's batching window",
    decisions.RUNNING_BATCH: "to share a batch while another one ran",
    decisions.SIBLINGS: "for siblings with the same prefix",
    decisions.SESSION_PAUSE: "because the KV of other runs filled the worker",
}
_WAITED_FOR = {
    decisions.SEQUENCES: "a free sequence",
    decisions.BATCH_SEQUENCES: "the sequence limit of batch work",
    decisions.KV_TOKENS: "free KV tokens",
    decisions.PREFILL_TOKENS: "prefill tokens in flight",
    decisions.PREFILL_RATE: "the prefill rate beside live streams",
    decisions.LANE_RESERVE: "capacity outside the reserve of higher lanes",
    decisions.LANE_SHARE: "a turn of a lower lane's share",
    decisions.JOB_AHEAD: "a job ahead that its workers are reserved for",
    decisions.PADDED_BATCH: "the end of a padded batch",
    decisions.PREEMPTION: "preempted jobs to stop",
    decisions.WORKER_GROUP: "a worker of the lane's groups",
    decisions.WORKER_DOWN: "a worker to come up",
    decisions.BREAKER: "a circuit breaker to close",
    decisions.NO_WORKER: "a worker of the model",
}
_PICKED = {
    "cached_prefix": "has the longest cached prefix",
    "cached_prefix_at_any_load": "has part of the prompt cached and capacity for the rest",
    "affinity": "is the worker of the session or prefix",
    "least_loaded": "is the least loaded",
    "sibling": "took a sibling at the same time",
    "padded_batch": "started a padded batch that the job joined",
    "backfill": "had capacity that a larger job ahead could not use",
    "preemption": "stopped jobs of a lower lane for it",
}
_FILTERED = {
    "serves_model": "serve another model",
    "has_precision": "have another precision",
    "has_adapter": "lack the adapter",
    "is_in_pool": "belong to another tenant pool",
    "is_for_overflow": "take only jobs that overflow, or none of them",
    "has_role": "compute prompts alone, or whole calls",
    decisions.WORKER_GROUP: "are in other groups",
    decisions.WORKER_DOWN: "are down",
    decisions.BREAKER: "have an open circuit breaker",
}


def describe(decision: Decision, worker: str | None) -> str:
    """Why the job was held, what it waited for, and why it went to `worker`."""
    sentences = []
    if decision.held_by is not None:
        purpose = _HELD_FOR.get(decision.held_by, f"by {decision.held_by}")
        sentences.append(f"Held {_ms(decision.held_s)} {purpose}.")
    if decision.waits:
        waits = sorted(decision.waits.items(), key=lambda wait: -wait[1])
        parts = [f"{_ms(waited_s)} for {_WAITED_FOR.get(limit, limit)}" for limit, waited_s in waits]
        sentences.append(f"Waited {', '.join(parts)}.")
    if decision.limit is not None:
        on = "" if decision.limit_worker is None else f" of {decision.limit_worker}"
        sentences.append(f"Bound last by `{decision.limit}`{on}.")
    if decision.overflow is not None:
        sentences.append(_overflowed(decision.overflow))
    if decision.picked_by is not None and worker is not None:
        reason = _PICKED.get(decision.picked_by, f"was picked by {decision.picked_by}")
        if decision.candidates == 1:
            reason = "is the only candidate"
        cached = (
            f", with {decision.cached_tokens} prompt tokens expected in its cache" if decision.cached_tokens else ""
        )
        others = f" of {decision.candidates} candidates" if decision.candidates > 1 else ""
        sentences.append(f"Sent to {worker}, which {reason}{others}{cached}.")
    elif decision.picked_by is None:
        sentences.append("Not sent to a worker.")
    if decision.filtered:
        parts = [f"{count} {_FILTERED.get(reason, reason)}" for reason, count in decision.filtered.items()]
        sentences.append(f"Other workers: {', '.join(parts)}.")
    return " ".join(sentences)


def _overflowed(overflow: Overflow) -> str:
    missed = "its deadline" if overflow.reason == decisions.MISSES_DEADLINE else "its TTFT target"
    wait = "none was up" if overflow.wait_s is None else f"predicted wait {_ms(overflow.wait_s)}"
    cost = "" if overflow.cost_nanos is None else f", for {overflow.cost_nanos / NANOS_PER_UNIT:.6f}"
    return f"Overflowed{cost}: own workers would have missed {missed} ({wait})."


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
