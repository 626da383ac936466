"""Rules about jobs that wait in the queue for a worker."""

from inferry.observe.diagnosis.facts import Facts, LaneFacts, WorkerFacts
from inferry.observe.diagnosis.findings import Evidence, Finding, Setting
from inferry.observe.diagnosis.pressure import (
    FULL,
    HIGH_UTILISATION,
    LOW_UTILISATION,
    has_slack,
    held_by_reserve,
    is_full,
    lane_evidence,
    late_lanes,
    pressed_lanes,
    queue_dominates,
    ratio,
    tenant_evidence,
    top_limit,
    top_tenant,
    up_workers,
    waits_long,
)

FLOOD_SHARE = 0.5
MIN_BACKLOG = 5.0
"""Mean queue depth from which a batch lane has more work than the workers take."""
MIN_BURSTS = 2
MAX_QUEUED = 0.5
"""Part of the time with queued jobs above which a lane has a lasting backlog, and not bursts."""
HIGH_RESERVE = 0.3
IDLE = 0.1
"""Part of its limit below which a worker counts as idle."""
KV_LIMIT = "kv_tokens"
KV_FRACTION = 0.95
"""Part of the KV cache that the gateway uses at most."""
_LIMIT_REACHED = "calls wait while its limit is reached"
PREFILL_LIMITS = ("prefill_tokens",)


def batch_flood(facts: Facts) -> Finding | None:
    """A lane without a target holds the workers while a live lane waits for them."""
    late = late_lanes(facts)
    if not late:
        return None
    lane = late[0]
    batch = [one for one in facts.lanes if not one.is_live]
    running, share = sum(one.running_now for one in facts.lanes), _batch_share(facts, batch)
    flood = max(batch, key=lambda one: one.depth, default=None)
    if flood is None or share < FLOOD_SHARE or flood.depth < MIN_BACKLOG:
        return None
    tenant = top_tenant(flood)
    jobs = f"Jobs of lane {flood.lane}" if tenant is None else f"Jobs of tenant {tenant} in lane {flood.lane}"
    return Finding(
        cause="p2_flood",
        stage="queue",
        where=f"lane {flood.lane}" if tenant is None else f"tenant {tenant}",
        summary=f"{jobs} hold the workers while calls of lane {lane.lane} wait.",
        evidence=(
            *lane_evidence(lane),
            Evidence(f"time on workers used by lane {flood.lane}", share, "ratio", FLOOD_SHARE),
            Evidence(f"jobs of lane {flood.lane} on workers now", flood.running_now, "jobs", running),
            Evidence(f"mean queue depth of lane {flood.lane}", flood.depth, "jobs"),
            *tenant_evidence(flood),
        ),
        setting=_separate(facts, flood),
    )


def kv_pressure(facts: Facts) -> Finding | None:
    """The KV cache is full: jobs wait for it, or the engine evicts and recomputes."""
    lanes = pressed_lanes(facts)
    if not lanes:
        return None
    need = max(_job_tokens(lane) for lane in lanes)
    tight = [one for one in up_workers(facts) if _is_short_of_kv(one, need)]
    if not tight:
        return None
    worker = max(tight, key=lambda one: one.kv_ratio or 0.0)
    packs = worker.kv_packing == "sum"
    return Finding(
        cause="kv_pressure",
        stage="queue",
        where=f"worker {worker.worker}",
        summary=f"The KV cache of worker {worker.worker} is full; sequences wait for it.",
        evidence=(
            *lane_evidence(lanes[0]),
            Evidence(f"KV cache of worker {worker.worker} in use", worker.kv_ratio or 0.0, "ratio", FULL),
            Evidence("KV tokens that a call needs", need, "tokens", worker.kv_capacity),
            Evidence("running sequences", worker.running or 0.0, "sequences", worker.sequences),
        ),
        setting=Setting("config", f"workers[{worker.worker}].kv_packing", "timed", "sum")
        if packs
        else Setting("engine flag", "--kv-cache-dtype", "fp8"),
    )


def engine_queue(facts: Facts) -> Finding | None:
    """The engine runs fewer sequences than the gateway sends; its own queue ignores lanes."""
    lanes = pressed_lanes(facts)
    for worker in up_workers(facts) if lanes else ():
        limit = worker.queues_at
        if worker.pads or limit is None or (worker.kv_ratio or 0.0) >= FULL:
            continue
        if worker.sequences is not None and limit >= FULL * worker.sequences:
            continue
        return Finding(
            cause="engine_flags",
            stage="prefill",
            where=f"worker {worker.worker}",
            summary=f"The engine of worker {worker.worker} queues calls itself, where lanes have no effect.",
            evidence=(
                *lane_evidence(lanes[0]),
                Evidence(f"sequences waiting inside worker {worker.worker}", worker.waiting or 0.0, "sequences", 0),
                Evidence("running sequences meanwhile", limit, "sequences", worker.sequences),
            ),
            setting=Setting("engine flag", "--max-num-seqs", str(worker.sequences or 4 * limit), str(limit)),
        )
    return None


def starved_gpu(facts: Facts) -> Finding | None:
    """Jobs wait although the engine could run more: the gateway may send it too little."""
    lanes = [lane for lane in pressed_lanes(facts) if queue_dominates(lane)]
    if not lanes:
        return None
    lane = lanes[0]
    for worker in up_workers(facts):
        full, by_reserve = is_full(worker, lane.reserve), held_by_reserve(worker, lane)
        by_prefill = worker.prefill_tokens is not None and not full and top_limit(worker) in (None, *PREFILL_LIMITS)
        if not (full or by_prefill) or not has_slack(facts, worker):
            continue
        limit = f"lane {lane.lane} leaves {lane.reserve:.0%} of it to higher lanes" if by_reserve else _LIMIT_REACHED
        return Finding(
            cause="starved_gpu",
            stage="queue",
            where=f"worker {worker.worker}",
            summary=f"Worker {worker.worker} could run more: {limit}.",
            evidence=(*lane_evidence(lane), _running_evidence(worker), *_slack_evidence(facts, worker)),
            setting=_less_reserve(lane) if by_reserve else _more_work(worker, by_prefill=by_prefill),
        )
    return None


def idle_group(facts: Facts) -> Finding | None:
    """Calls wait for the workers of their lane's groups while others are idle."""
    for lane in pressed_lanes(facts):
        groups = lane.groups
        if groups is None or not queue_dominates(lane):
            continue
        idle = [one for one in up_workers(facts) if one.group not in groups and _is_idle(one)]
        if not idle:
            continue
        wider = ", ".join(dict.fromkeys((*groups, *(one.group for one in idle))))
        return Finding(
            cause="idle_group",
            stage="queue",
            where=f"lane {lane.lane}",
            summary=f"Calls of lane {lane.lane} wait for their worker groups while other workers are idle.",
            evidence=(
                *lane_evidence(lane),
                Evidence(f"idle workers outside of the groups of lane {lane.lane}", len(idle), "workers"),
                Evidence(f"running sequences of worker {idle[0].worker}", idle[0].running or 0.0, "sequences"),
            ),
            setting=Setting("config", f"lanes.{lane.lane}.groups", f"[{wider}]", f"[{', '.join(groups)}]")
            if lane.is_live
            else Setting("config", f"lanes.{lane.lane}.borrow_groups", "true"),
        )
    return None


def bursts(facts: Facts) -> Finding | None:
    """Calls arrive many at a time: they wait for each other, and between two bursts nothing waits."""
    for lane in late_lanes(facts):
        is_backlogged = lane.backlogs < MIN_BURSTS or lane.queued_ratio > MAX_QUEUED or lane.depth < MIN_BACKLOG
        if is_backlogged or not waits_long(lane) or not queue_dominates(lane):
            continue
        tenant = top_tenant(lane)
        return Finding(
            cause="bursts",
            stage="queue",
            where=f"lane {lane.lane}" if tenant is None else f"tenant {tenant}",
            summary=f"Calls of lane {lane.lane} arrive many at a time and wait for each other.",
            evidence=(
                *lane_evidence(lane),
                Evidence("times that a queue built up", lane.backlogs, "times", MIN_BURSTS),
                Evidence("part of the time with queued calls", lane.queued_ratio, "ratio", MAX_QUEUED),
                *tenant_evidence(lane),
            ),
            setting=Setting("action", "start these calls at different times", "or send them in lane P2"),
        )
    return None


def overload(facts: Facts) -> Finding | None:
    """Calls with a target wait, and the workers have nothing left to give. Batch work may wait."""
    lanes = [lane for lane in late_lanes(facts) if waits_long(lane) and queue_dominates(lane)]
    workers = up_workers(facts)
    if not lanes or not workers:
        return None
    busy = [one.utilisation_then for one in workers if one.utilisation_then is not None]
    evidence = [*lane_evidence(lanes[0])]
    if busy:
        evidence.append(Evidence("GPU utilisation", sum(busy) / len(busy), "ratio", HIGH_UTILISATION))
    evidence.append(Evidence("running sequences", sum(one.running or 0.0 for one in workers), "sequences"))
    evidence.append(Evidence("workers up", len(workers), "workers"))
    evidence += tenant_evidence(lanes[0])
    return Finding(
        cause="overload",
        stage="queue",
        where=f"lane {lanes[0].lane}",
        summary="More calls arrive than the workers can serve within the targets.",
        evidence=tuple(evidence),
        setting=Setting("action", "add a worker to `workers`", "(`inferry plan` computes how many)"),
    )


def _batch_share(facts: Facts, batch: list[LaneFacts]) -> float:
    """The part of the workers that lanes without a target hold: by time of ended calls, or by what runs now."""
    names = {lane.lane for lane in batch}
    running = ratio(sum(lane.running_now for lane in batch), sum(lane.running_now for lane in facts.lanes))
    used = {lane.lane: lane.traffic.worker_s for lane in facts.lanes if lane.traffic is not None}
    spent = ratio(sum(value for name, value in used.items() if name in names), sum(used.values()))
    return max(running, spent)


def _separate(facts: Facts, flood: LaneFacts) -> Setting:
    if flood.reserve < 0.25:
        return Setting("config", f"lanes.{flood.lane}.reserve", "0.25", f"{flood.reserve:g}")
    if len(facts.workers) > 1 and flood.groups is None:
        return Setting("config", f"lanes.{flood.lane}.groups", "[batch]", "all groups")
    return Setting("config", f"lanes.{flood.lane}.reserve", "0.5", f"{flood.reserve:g}")


def _is_idle(worker: WorkerFacts) -> bool:
    return (worker.running or 0.0) < IDLE * (worker.sequences or 1 / IDLE)


def _is_short_of_kv(worker: WorkerFacts, need: float) -> bool:
    """Whether the KV cache has no place for one more call of this many tokens."""
    if worker.kv_ratio is None or not worker.kv_capacity:
        return False
    limit = top_limit(worker)
    if limit is not None:
        return limit == KV_LIMIT and worker.kv_ratio >= 0.5
    has_place = worker.kv_ratio < FULL and worker.kv_ratio + need / worker.kv_capacity <= KV_FRACTION
    return not has_place and not is_full(worker)


def _job_tokens(lane: LaneFacts) -> float:
    return 0.0 if lane.traffic is None else lane.traffic.prompt_tokens + lane.traffic.output_tokens


def _slack_evidence(facts: Facts, worker: WorkerFacts) -> list[Evidence]:
    found = []
    if worker.utilisation_then is not None and worker.utilisation_then < LOW_UTILISATION:
        found.append(Evidence("GPU utilisation", worker.utilisation_then, "ratio", LOW_UTILISATION))
    found += [
        Evidence(f"p95 inter-token latency of lane {lane.lane}", lane.itl_p95_ms, "ms", lane.itl_ms)
        for lane in facts.lanes
        if lane.itl_p95_ms is not None and lane.itl_ms is not None
    ]
    if worker.kv_ratio is not None:
        found.append(Evidence("KV cache in use", worker.kv_ratio, "ratio"))
    return found


def _running_evidence(worker: WorkerFacts) -> Evidence:
    """Running sequences while jobs were queued, beside the limit."""
    when = "" if worker.running_queued is None else " while calls were queued"
    what = f"running sequences of worker {worker.worker}{when}"
    return Evidence(what, worker.running_then or 0.0, "sequences", worker.sequences)


def _less_reserve(lane: LaneFacts) -> Setting:
    """The setting of a lane that leaves so much to higher lanes that the worker never fills."""
    less = "0.05" if lane.is_live else "0.25" if lane.reserve > HIGH_RESERVE else "0.1"
    return Setting("config", f"lanes.{lane.lane}.reserve", less, f"{lane.reserve:g}")


def _more_work(worker: WorkerFacts, *, by_prefill: bool) -> Setting:
    if by_prefill:
        value = 4 * (worker.prefill_tokens or 0)
        return Setting("config", f"workers[{worker.worker}].prefill_tokens", str(value), str(worker.prefill_tokens))
    now = worker.sequences or 1
    return Setting("config", f"workers[{worker.worker}].max_sequences", str(max(16, 4 * now)), str(now))
