"""Rules about how jobs share a pass. They concern workers that pad or batch statically, and pooled calls."""

from math import ceil

from inferry.observe.diagnosis.facts import MIN_CALLS, Facts, LaneFacts, WorkerFacts
from inferry.observe.diagnosis.findings import Evidence, Finding, Setting
from inferry.observe.diagnosis.pressure import lane_evidence, pressed_lanes, ratio, up_workers

HIGH_PADDING = 0.4
MAJORITY = 0.5
SMALL_BATCH = 0.25
"""Part of the batch limit below which a mean batch is small."""
SHORT_WINDOW_MS = 5.0
GOOD_WINDOW_MS = 25.0
LONG_HOLD = 0.25
"""Part of the TTFT target that may be spent on waiting for a batch."""


def padding(facts: Facts) -> Finding | None:
    """Passes mix short and long prompts, and every prompt is computed as long as the longest."""
    padded = [one for one in facts.workers if one.padding_ratio is not None and one.plans >= MIN_CALLS]
    worker = max(padded, key=lambda one: one.padding_ratio or 0.0, default=None)
    if worker is None or worker.padding_ratio is None or worker.padding_ratio < HIGH_PADDING:
        return None
    lane = _busiest(facts)
    evidence = [
        Evidence(f"computed prompt tokens on worker {worker.worker} that are padding", worker.padding_ratio, "ratio"),
        Evidence("jobs per pass", worker.batch or 0.0, "jobs"),
    ]
    if lane.traffic is not None:
        evidence.append(Evidence("mean prompt", lane.traffic.prompt_tokens, "tokens"))
        evidence.append(Evidence("standard deviation of prompts", lane.traffic.prompt_tokens_sd, "tokens"))
    return Finding(
        cause="padding",
        stage="batching",
        where=f"worker {worker.worker}",
        summary=f"Most of what worker {worker.worker} computes is padding: passes mix short and long prompts.",
        evidence=tuple(evidence),
        setting=Setting(
            "config",
            f"lanes.{lane.lane}.max_batch",
            str(max(2, lane.max_batch // 4)),
            f"{lane.max_batch}; an engine that batches continuously does not pad",
        ),
    )


def small_batches(facts: Facts) -> Finding | None:
    """Batches are full and small: the limit of a batch is too low for the queue behind it."""
    full = ratio(facts.releases.get("size", 0), sum(facts.releases.values()))
    if full < MAJORITY:
        return None
    for lane in _waiting_lanes(facts):
        if lane.depth < lane.max_batch:
            continue
        worker = _widest(facts)
        size = 0.0 if worker is None or worker.batch is None else worker.batch
        limit = 64 if worker is None or worker.sequences is None else worker.sequences
        if lane.max_batch >= limit:
            continue
        return Finding(
            cause="small_batches",
            stage="batching",
            where=f"lane {lane.lane}",
            summary=f"Batches of lane {lane.lane} are full at {lane.max_batch} jobs while more wait.",
            evidence=(
                *lane_evidence(lane),
                Evidence("jobs per batch", size, "jobs", lane.max_batch),
                Evidence("batches that were sent because they were full", full, "ratio", MAJORITY),
            ),
            setting=Setting("config", f"lanes.{lane.lane}.max_batch", str(min(limit, 64)), str(lane.max_batch)),
        )
    return None


def window_too_short(facts: Facts) -> Finding | None:
    """Jobs of a worker that cannot add to a running pass are sent alone, although others follow at once."""
    for lane in _waiting_lanes(facts):
        for worker in _passes(facts):
            limit = min(lane.max_batch, worker.sequences or lane.max_batch)
            if worker.batch is None or worker.batch > max(1.5, SMALL_BATCH * limit):
                continue
            is_short = lane.window == "off" or min(lane.coalesce_ms, lane.max_wait_ms) <= SHORT_WINDOW_MS
            if not is_short:
                continue
            return Finding(
                cause="window_too_short",
                stage="batching",
                where=f"lane {lane.lane}",
                summary=f"Worker {worker.worker} computes {worker.batch:.1f} jobs per pass: the window is short.",
                evidence=(
                    *lane_evidence(lane),
                    Evidence(f"jobs per pass on worker {worker.worker}", worker.batch, "jobs", limit),
                    Evidence("passes per second", worker.plans / facts.window_s, "passes/s"),
                    Evidence("longest hold", 0.0 if lane.window == "off" else lane.coalesce_ms, "ms"),
                ),
                setting=_longer_window(lane),
            )
    return None


def window_too_long(facts: Facts) -> Finding | None:
    """Jobs wait for others to join their batch longer than for a worker."""
    for lane in facts.lanes:
        held_ms, wait_ms = _held_ms(facts, lane), lane.wait_mean_ms
        if held_ms is None or not wait_ms or lane.calls < MIN_CALLS or lane.ttft_ms is None:
            continue
        if held_ms < MAJORITY * wait_ms or held_ms < LONG_HOLD * lane.ttft_ms:
            continue
        return Finding(
            cause="window_too_long",
            stage="batching",
            where=f"lane {lane.lane}",
            summary=f"Calls of lane {lane.lane} wait for others to join their batch.",
            evidence=(
                Evidence(f"mean time that a job of lane {lane.lane} is held for others", held_ms, "ms"),
                Evidence("mean queue wait, hold included", wait_ms, "ms", lane.ttft_ms),
            ),
            setting=Setting("config", f"lanes.{lane.lane}.window", "adaptive", lane.window)
            if lane.window == "fixed"
            else Setting("config", f"lanes.{lane.lane}.coalesce_ms", f"{GOOD_WINDOW_MS:g}", f"{lane.coalesce_ms:g}"),
        )
    return None


def _held_ms(facts: Facts, lane: LaneFacts) -> float | None:
    """Mean hold of the lane's jobs: measured, or for a fixed window what the releases show."""
    if lane.traffic is not None and lane.traffic.batching_ms is not None:
        return lane.traffic.batching_ms
    if lane.batching_mean_ms is not None:
        return lane.batching_mean_ms
    timed = facts.releases.get("window", 0) + facts.releases.get("max_wait", 0)
    if lane.window != "fixed" or ratio(timed, sum(facts.releases.values())) < MAJORITY or lane.wait_mean_ms is None:
        return None
    return min(lane.wait_mean_ms, lane.coalesce_ms, lane.max_wait_ms)


def _longer_window(lane: LaneFacts) -> Setting:
    if lane.window == "off":
        return Setting("config", f"lanes.{lane.lane}.window", "adaptive", "off")
    if lane.max_wait_ms < lane.coalesce_ms:
        return Setting("config", f"lanes.{lane.lane}.max_wait_ms", f"{4 * GOOD_WINDOW_MS:g}", f"{lane.max_wait_ms:g}")
    return Setting("config", f"lanes.{lane.lane}.coalesce_ms", f"{ceil(GOOD_WINDOW_MS)}", f"{lane.coalesce_ms:g}")


def _waiting_lanes(facts: Facts) -> list[LaneFacts]:
    """Lanes under pressure; where the pressure is inside the engine, those with calls."""
    return pressed_lanes(facts) or [
        lane for lane in facts.lanes if lane.calls >= MIN_CALLS and any(_queues(one) for one in _passes(facts))
    ]


def _queues(worker: WorkerFacts) -> bool:
    return (worker.waiting or 0.0) >= 1.0


def _passes(facts: Facts) -> list[WorkerFacts]:
    """Workers that compute a plan as one pass, with enough plans to judge."""
    return [worker for worker in up_workers(facts) if worker.pads and worker.plans >= MIN_CALLS]


def _widest(facts: Facts) -> WorkerFacts | None:
    return max(up_workers(facts), key=lambda one: one.plans, default=None)


def _busiest(facts: Facts) -> LaneFacts:
    return max(facts.lanes, key=lambda lane: lane.calls)
