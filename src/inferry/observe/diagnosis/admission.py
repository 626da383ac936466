"""Rules about calls that are refused or end before they are served."""

from math import ceil

from inferry.observe.diagnosis.facts import MIN_CALLS, Facts, LimitedTenant
from inferry.observe.diagnosis.findings import Evidence, Finding, Setting, Stage
from inferry.observe.diagnosis.latency import fleet_parts
from inferry.observe.diagnosis.pressure import ratio

REFUSED_RATIO = 0.05
MIN_REFUSED = 5
LIMITS_OF_CODE = {
    "rate_limited": ("requests_per_minute", "tokens_per_minute"),
    "tenant_concurrency": ("max_concurrent", "max_concurrent_runs"),
    "kv_quota_exceeded": ("max_kv_tokens", "run_max_kv_tokens"),
    "kv_quota_too_small": ("max_kv_tokens", "run_max_kv_tokens"),
    "run_budget_exhausted": ("run_token_ceiling", "run_money_ceiling"),
    "tenant_budget_exhausted": (
        *("day_token_ceiling", "day_money_ceiling", "month_token_ceiling", "month_money_ceiling"),
    ),
}
"""The limits that a call may be refused for, by the code of the refusal."""
_INSTEAD: dict[Stage, str] = {
    "queue": "send them in a higher lane",
    "batching": "shorten the window of their lane",
    "prefill": "shorten their prompts",
    "decode": "lower max_tokens of these calls",
}
"""What else helps calls that miss their deadline, by the stage in which they spend most of their time."""
_EXPIRED = ("queue_timeout", "deadline_exceeded", "deadline_infeasible", "request_timeout")


def quota_too_tight(facts: Facts) -> Finding | None:
    """Tenants' limits refuse calls."""
    counts = {code: number for code in LIMITS_OF_CODE if (number := facts.errors.get(code, 0))}
    refused = sum(counts.values())
    if refused < MIN_REFUSED or ratio(refused, facts.calls + refused) < REFUSED_RATIO:
        return None
    code = max(counts, key=counts.__getitem__)
    names = LIMITS_OF_CODE[code]
    bound = _bound_tenant(facts, names)
    known = {name: number for name in names if (number := facts.refusals.get(name, 0))}
    limit = bound.limit if bound is not None else max(known, key=known.__getitem__) if known else names[0]
    tenant = "NAME" if bound is None else bound.tenant
    demand = (facts.calls + refused) / max(1, facts.calls)
    value = "a higher value" if bound is None else _raised(bound.value, demand)
    evidence = [
        Evidence(f"calls refused with {code}", counts[code], "calls"),
        Evidence("part of all calls", ratio(refused, facts.calls + refused), "ratio", REFUSED_RATIO),
    ]
    if bound is not None:
        evidence.append(Evidence(f"{limit} of tenant {tenant} in use", bound.used_ratio, "ratio", 1.0))
    return Finding(
        cause="quota_too_tight",
        stage="admission",
        where=f"tenant {tenant}" if bound is not None else "tenants",
        summary=f"A limit of {'a tenant' if bound is None else f'tenant {tenant}'} refuses calls: {limit}.",
        evidence=tuple(evidence),
        setting=Setting("config", f"tenants.{tenant}.{limit}", value, None if bound is None else f"{bound.value:g}"),
    )


def queue_full(facts: Facts) -> Finding | None:
    """Queues are at their limit while workers have capacity left: the limit is too small for the bursts."""
    refused = facts.errors.get("queue_full", 0)
    if refused < MIN_REFUSED or ratio(refused, facts.calls + refused) < REFUSED_RATIO:
        return None
    # A short queue may be empty in every sample: then the limit that is smallest for its traffic is the one.
    lane = max(
        facts.lanes,
        key=lambda one: (ratio(max(one.depth, one.depth_now), one.queue_limit), one.calls_per_s / one.queue_limit),
    )
    return Finding(
        cause="queue_full",
        stage="admission",
        where=f"lane {lane.lane}",
        summary=f"The queue of lane {lane.lane} is at its limit and refuses calls.",
        evidence=(
            Evidence("calls refused with queue_full", refused, "calls"),
            Evidence(f"mean queue depth of lane {lane.lane}", lane.depth, "jobs", lane.queue_limit),
        ),
        setting=Setting("config", f"lanes.{lane.lane}.queue_limit", str(4 * lane.queue_limit), str(lane.queue_limit)),
    )


def expired_calls(facts: Facts) -> Finding | None:
    """Calls end because their deadline passes."""
    expired = sum(facts.errors.get(code, 0) for code in _EXPIRED)
    # Some of them were sent before their deadline passed, and are among the calls.
    share = ratio(expired, max(facts.calls, expired))
    if expired < MIN_REFUSED or share < REFUSED_RATIO:
        return None
    times = [(part.mean_ms, part.stage) for part in fleet_parts(facts) if part.stage in _INSTEAD]
    longest_ms, stage = max(times, default=(0.0, "queue"))
    return Finding(
        cause="deadlines_missed",
        stage=stage,
        where="callers",
        summary="Calls end at their deadline before they are complete.",
        evidence=(
            Evidence("calls that ended at a deadline or a timeout", expired, "calls"),
            Evidence("part of all calls", share, "ratio", REFUSED_RATIO),
            Evidence(f"mean time per call in the longest stage, {stage}", longest_ms, "ms"),
        ),
        setting=Setting("action", "raise x-inferry-deadline-ms of these calls", f"or {_INSTEAD[stage]}"),
    )


def cancelled_calls(facts: Facts) -> Finding | None:
    """Clients leave before their answer is complete."""
    lanes = [lane.traffic for lane in facts.lanes if lane.traffic is not None]
    cancelled, attempts = sum(one.cancelled for one in lanes), sum(one.attempts for one in lanes)
    if attempts < MIN_CALLS or ratio(cancelled, attempts) < 0.25:
        return None
    return Finding(
        cause="cancelled_calls",
        stage="client",
        where="clients",
        summary="Clients cancel a large part of their calls; the tokens computed for them are lost.",
        evidence=(
            Evidence("cancelled calls", cancelled, "calls"),
            Evidence("part of all calls", ratio(cancelled, attempts), "ratio", 0.25),
        ),
        setting=Setting("action", "raise the clients' timeouts", "or send such calls with x-inferry-deadline-ms"),
    )


def _bound_tenant(facts: Facts, limits: tuple[str, ...]) -> LimitedTenant | None:
    found = [one for one in facts.limited if one.limit in limits]
    return max(found, key=lambda one: one.used_ratio, default=None)


def _raised(value: float, demand: float) -> str:
    """The limit that would have admitted the demand, with a margin of a quarter."""
    return f"{ceil(value * max(1.25, 1.25 * demand)):g}"
