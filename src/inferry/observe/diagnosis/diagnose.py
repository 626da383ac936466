"""The order in which causes of latency are named: overload only if no other cause explains the wait."""

from collections.abc import Callable, Sequence

from inferry.observe.diagnosis.admission import cancelled_calls, expired_calls, queue_full, quota_too_tight
from inferry.observe.diagnosis.advice import give_advice
from inferry.observe.diagnosis.availability import dead_worker, drained_workers, gateway_busy, ledger_lost
from inferry.observe.diagnosis.batching import padding, small_batches, window_too_long, window_too_short
from inferry.observe.diagnosis.clients import slow_reader, slow_tool
from inferry.observe.diagnosis.engine import chunk_too_large, cold_cache, decode_bound, prefill_bound, slow_worker
from inferry.observe.diagnosis.facts import MIN_CALLS, Facts
from inferry.observe.diagnosis.findings import Diagnosis, Finding, Verdict
from inferry.observe.diagnosis.latency import lane_splits
from inferry.observe.diagnosis.pressure import held_by_reserve, pressed_lanes, up_workers
from inferry.observe.diagnosis.waiting import (
    batch_flood,
    bursts,
    engine_queue,
    idle_group,
    kv_pressure,
    overload,
    starved_gpu,
)

Rule = Callable[[Facts], Finding | None]

MIN_OBSERVED_S = 20.0

BROKEN: Sequence[Rule] = (dead_worker, drained_workers, ledger_lost, gateway_busy)
"""Rules that need no traffic."""
WAITING: Sequence[Rule] = (
    quota_too_tight,
    window_too_long,
    padding,
    small_batches,
    window_too_short,
    idle_group,
    kv_pressure,
    batch_flood,
    engine_queue,
    starved_gpu,
    slow_worker,
    chunk_too_large,
    bursts,
    overload,
)
"""Rules about calls that are refused or wait. The more specific one is before the one that would also hold."""
IN_ENGINE: Sequence[Rule] = (decode_bound, cold_cache, prefill_bound)
"""Rules that divide the time inside the engine: the one that explains most of the lateness is first."""
OTHERS: Sequence[Rule] = (
    queue_full,
    expired_calls,
    slow_reader,
    slow_tool,
    cancelled_calls,
)


def diagnose(facts: Facts, at: float, alerts: int | None = None) -> Diagnosis:
    """The verdict, the first cause that the facts show, and the others. `at` is Unix seconds."""
    is_enough = _has_data(facts)
    found = _found(BROKEN, facts)
    if is_enough:
        in_engine = sorted(_found(IN_ENGINE, facts), key=lambda one: one.late_ms or 0.0, reverse=True)
        found += [*_found(WAITING, facts), *in_engine, *_found(OTHERS, facts)]
    # Too little capacity is what is left when no other cause explains the wait.
    findings = tuple(one for one in found if one is found[0] or one.cause != "overload")
    verdict: Verdict
    if findings:
        verdict, summary = "problem", findings[0].summary
    elif is_enough:
        verdict, summary = "healthy", _healthy_summary(facts)
    else:
        verdict, summary = "not_enough_data", _missing(facts)
    return Diagnosis(
        at=at,
        window_s=facts.window_s,
        observed_s=facts.observed_s,
        verdict=verdict,
        cause=findings[0].cause if findings else None,
        summary=summary,
        findings=findings,
        split=lane_splits(facts),
        advice=give_advice(facts) if is_enough else (),
        lanes=facts.lanes,
        workers=facts.workers,
        tenants=facts.tenants,
        alerts=alerts,
    )


def _found(rules: Sequence[Rule], facts: Facts) -> list[Finding]:
    return [finding for rule in rules if (finding := rule(facts)) is not None]


def _has_data(facts: Facts) -> bool:
    refused = sum(facts.errors.values())
    waiting = sum(lane.depth_now for lane in facts.lanes)
    return facts.observed_s >= MIN_OBSERVED_S and facts.calls + refused + waiting >= MIN_CALLS


def _missing(facts: Facts) -> str:
    return (
        f"Not enough data: {facts.calls} calls in {facts.observed_s:.0f} s. At least {MIN_CALLS} calls in "
        f"{MIN_OBSERVED_S:.0f} s are needed."
    )


def _healthy_summary(facts: Facts) -> str:
    rates = [lane.attainment for lane in facts.lanes if lane.attainment is not None]
    met = f" {min(rates):.1%} of the calls met their target in the lane where fewest did." if rates else ""
    reserved = [
        f" Calls of lane {lane.lane} wait: it leaves {lane.reserve:.0%} of worker {worker.worker} to higher lanes."
        for lane in pressed_lanes(facts)
        for worker in up_workers(facts)
        if held_by_reserve(worker, lane)
    ]
    return f"No cause of latency stands out in {facts.calls} calls.{met}{''.join(reserved[:1])}"
