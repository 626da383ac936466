"""Which lanes wait or are late, and what the workers do meanwhile: shared by the rules."""

from inferry.observe.diagnosis.facts import MIN_CALLS, Facts, LaneFacts, WorkerFacts
from inferry.observe.diagnosis.findings import Evidence

LOW_ATTAINMENT = 0.95
WAIT_FRACTION = 0.8
"""Part of the TTFT target from which a wait in the queue endangers the target."""
BATCH_WAIT_MS = 1000.0
"""Wait from which a lane without a target counts as backlogged, beyond what it may be held."""
FULL = 0.85
"""Part of a limit from which it counts as reached, as a mean over the time in which jobs were queued."""
RESOURCE_LIMITS = ("sequences", "batch_sequences", "kv_tokens", "prefill_tokens", "prefill_rate", "padded_batch")
LOW_UTILISATION = 0.4
HIGH_UTILISATION = 0.7
SLACK_ITL = 0.5
"""Part of the ITL target below which the median leaves an engine capacity for more sequences."""
DEFAULT_ITL_MS = 50.0
TOP_TENANT = 0.5
"""Part of a lane's time on workers from which one tenant is named."""


def misses_target(lane: LaneFacts) -> bool:
    """Whether calls of a lane with a target are late, or about to be."""
    if not lane.is_live:
        return False
    late = lane.attainment is not None and lane.measured >= MIN_CALLS and lane.attainment < LOW_ATTAINMENT
    return late or waits_long(lane)


def waits_long(lane: LaneFacts) -> bool:
    """Whether the lane's calls wait long for a worker."""
    if is_stuck(lane):
        return True
    if lane.wait_p95_ms is None or lane.calls < MIN_CALLS:
        return False
    limit_ms = BATCH_WAIT_MS if lane.ttft_ms is None else WAIT_FRACTION * lane.ttft_ms
    return lane.wait_p95_ms > limit_ms


def is_stuck(lane: LaneFacts) -> bool:
    """Whether jobs wait and almost none are sent."""
    return lane.depth >= MIN_CALLS and lane.depth > lane.calls


def late_lanes(facts: Facts) -> list[LaneFacts]:
    """Lanes that miss their target, the highest first."""
    return [lane for lane in facts.lanes if misses_target(lane)]


def pressed_lanes(facts: Facts) -> list[LaneFacts]:
    """Lanes that miss their target, then those without one that wait long."""
    waiting = [lane for lane in facts.lanes if not lane.is_live and waits_long(lane)]
    return late_lanes(facts) + waiting


def lane_evidence(lane: LaneFacts) -> tuple[Evidence, ...]:
    """The figures that show how late a lane is."""
    found = []
    if lane.attainment is not None:
        found.append(Evidence(f"calls of lane {lane.lane} that met their target", lane.attainment, "ratio", 0.99))
    if lane.wait_p95_ms is not None:
        found.append(Evidence(f"p95 queue wait of lane {lane.lane}", lane.wait_p95_ms, "ms", lane.ttft_ms))
    found.append(Evidence(f"mean queue depth of lane {lane.lane}", lane.depth, "jobs"))
    return tuple(found)


def top_tenant(lane: LaneFacts) -> str | None:
    """The tenant that used most of the lane's time on workers, if one did."""
    traffic = lane.traffic
    return None if traffic is None or traffic.top_tenant_share < TOP_TENANT else traffic.top_tenant


def tenant_evidence(lane: LaneFacts) -> tuple[Evidence, ...]:
    traffic, tenant = lane.traffic, top_tenant(lane)
    if traffic is None or tenant is None:
        return ()
    what = f"time on workers in lane {lane.lane} used by tenant {tenant}"
    return (Evidence(what, traffic.top_tenant_share, "ratio", TOP_TENANT),)


def queue_dominates(lane: LaneFacts) -> bool:
    """Whether the wait for a worker is the largest part of the time to the first token."""
    if is_stuck(lane):
        return True
    traffic = lane.traffic
    if traffic is None or traffic.prefill_ms is None or traffic.queue_ms is None:
        return waits_long(lane)
    return traffic.queue_ms + (traffic.batching_ms or 0.0) >= traffic.prefill_ms


def is_full(worker: WorkerFacts, reserve: float = 0.0) -> bool:
    """Whether the worker runs as many sequences as the gateway may send, less what a lane leaves to higher ones."""
    if worker.sequences is None or worker.running_then is None:
        return False
    return worker.running_then + (worker.waiting or 0.0) >= FULL * worker.sequences * (1.0 - reserve)


def top_limit(worker: WorkerFacts) -> str | None:
    """The limit of the worker's resources that kept most jobs from it; None where it is unknown.

    A lane's reserve or share says which lane had to wait, and not what there was too little of.
    """
    known = {name: number for name, number in worker.limits.items() if name in RESOURCE_LIMITS}
    return max(known, key=known.__getitem__) if known else None


def up_workers(facts: Facts) -> list[WorkerFacts]:
    return [worker for worker in facts.workers if worker.phase == "ready"]


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def held_by_reserve(worker: WorkerFacts, lane: LaneFacts) -> bool:
    """Whether the lane had all that it does not leave to higher lanes, of a worker that was not full."""
    return lane.reserve > 1.0 - FULL and not is_full(worker) and is_full(worker, lane.reserve)


def has_slack(facts: Facts, worker: WorkerFacts) -> bool:
    """Whether the engine could run more sequences without missing a target, judged by the time with queued jobs."""
    if (worker.waiting or 0.0) >= 1.0 or (worker.kv_ratio or 0.0) >= FULL:
        return False
    used = [lane for lane in facts.lanes if lane.calls >= MIN_CALLS and lane.itl_p50_ms is not None]
    if any(lane.itl_ms is not None and (lane.itl_p95_ms or 0.0) > lane.itl_ms for lane in used):
        return False
    if worker.utilisation_then is not None and worker.utilisation_then < LOW_UTILISATION:
        return True
    # An engine that is busy all the time with few sequences still has capacity: a step takes hardly longer with more.
    # Batch lanes have no target of their own: the laxest one of the live lanes stands for what an engine can do.
    targets = [lane.itl_ms for lane in facts.lanes if lane.itl_ms is not None]
    laxest_ms = max(targets, default=DEFAULT_ITL_MS)
    return bool(used) and all(
        (lane.itl_p50_ms or 0.0) <= SLACK_ITL * (lane.itl_ms or laxest_ms)
        and (lane.itl_p95_ms or 0.0) <= (lane.itl_ms or laxest_ms)
        for lane in used
    )
