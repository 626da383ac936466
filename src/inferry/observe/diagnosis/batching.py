"""Rules about how jobs share a pass. They concern workers that pad or batch statically, and pooled calls."""

from math import ceil

from inferry.observe.diagnosis.facts import MIN_CALLS, Facts, LaneFacts, WorkerFacts
from inferry.observe.diagnosis.findings import Evidence, Finding, Setting
from inferry.observe.diagnosis.pressure import FULL, lane_evidence, pressed_lanes, ratio, up_workers

HIGH_PADDING = 0.4
MIN_PASS = 4
SPREAD = 2.0
"""Without a measurement, the longest prompt of a pass of at least `MIN_PASS` jobs is taken to be this many standard
deviations above the mean."""
MAJORITY = 0.5
SMALL_BATCH = 0.25
"""Part of the batch limit below which a mean batch is small."""
GOOD_BATCH = 64
SHORT_WINDOW_MS = 5.0
GOOD_WINDOW_MS = 25.0
LONG_HOLD = 0.25
"""Part of the TTFT target that may be spent on waiting for a batch."""


def padding(facts: Facts) -> Finding | None:
    """Passes mix short and long prompts, and every prompt is computed as long as the longest."""
    lane = max(facts.lanes, key=lambda one: one.calls)
    padded = [(ratio, one) for one in _passes(facts) if (ratio := _padding_ratio(one, lane)) is not None]
    share, worker = max(padded, key=lambda one: one[0], default=(0.0, None))
    if worker is None or share < HIGH_PADDING:
        return None
    how = "" if worker.padding_ratio is not None else ", estimated from the lengths of prompts"
    evidence = [
        Evidence(f"computed prompt tokens on worker {worker.worker} that are padding{how}", share, "ratio"),
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
    by_size = ratio(facts.releases.get("size", 0), sum(facts.releases.values()))
    worker = max(up_workers(facts), key=lambda one: one.plans, default=None)
    if worker is None or worker.batch is None or not (worker.pads or by_size >= MAJORITY):
        return None
    limit = GOOD_BATCH if worker.sequences is None else min(worker.sequences, GOOD_BATCH)
    for lane in _waiting_lanes(facts):
        if lane.depth < lane.max_batch or lane.max_batch >= limit or worker.batch < FULL * lane.max_batch:
            continue
        return Finding(
            cause="small_batches",
            stage="batching",
            where=f"lane {lane.lane}",
            summary=f"Batches of lane {lane.lane} are full at {lane.max_batch} jobs while more wait.",
            evidence=(
                *lane_evidence(lane),
                Evidence(f"jobs per batch on worker {worker.worker}", worker.batch, "jobs", lane.max_batch),
                Evidence("batches per second", worker.plans / facts.observed_s, "batches/s"),
            ),
            setting=Setting("config", f"lanes.{lane.lane}.max_batch", str(limit), str(lane.max_batch)),
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
                    Evidence("passes per second", worker.plans / facts.observed_s, "passes/s"),
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


def _padding_ratio(worker: WorkerFacts, lane: LaneFacts) -> float | None:
    """The measured part of padding; without one, what passes of this size would have with prompts of this spread."""
    if worker.padding_ratio is not None:
        return worker.padding_ratio
    traffic = lane.traffic
    if traffic is None or worker.batch is None or worker.batch < MIN_PASS or not traffic.prompt_tokens:
        return None
    longest = traffic.prompt_tokens + SPREAD * traffic.prompt_tokens_sd
    return 1.0 - traffic.prompt_tokens / longest
