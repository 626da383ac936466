"""Rules about time inside the engine: prefill, decode, and flags that trade one for the other."""

from statistics import median

from inferry.domain.workers import RECOMMENDED_CHUNK_TOKENS
from inferry.observe.diagnosis.facts import MIN_CALLS, Facts, LaneFacts
from inferry.observe.diagnosis.findings import Evidence, Finding, Setting
from inferry.observe.diagnosis.pressure import lane_evidence, late_lanes, queue_dominates, up_workers

ITLS_PER_STEP = 4
"""A step is too long above this multiple of the ITL target."""
MIN_CHUNK_TOKENS = 256
FAST_PREFILL_TOKENS_PER_S = 40_000
"""Prompt tokens per second of an 8B model on a large GPU. On a slower engine a long step takes longer still."""
SLOW_WORKER = 3.0
COLD_CACHE = 0.2
REPEATED = 0.5
PREFILL_SHARE = 0.5


def chunk_too_large(facts: Facts) -> Finding | None:
    """Single steps compute so many prompt tokens that the streams beside them pause, while most steps are short."""
    for lane in late_lanes(facts):
        target_ms, p50_ms, p99_ms = lane.itl_ms, lane.itl_p50_ms, lane.itl_p99_ms
        if target_ms is None or p50_ms is None or p99_ms is None:
            continue
        if p50_ms > target_ms or p99_ms < ITLS_PER_STEP * target_ms:
            continue
        for worker in up_workers(facts):
            now = worker.chunk_tokens
            step_ms = p99_ms if now is None else max(p99_ms, 1000 * now / FAST_PREFILL_TOKENS_PER_S)
            better = _better_chunk(now, step_ms, target_ms)
            if now is not None and better >= now:
                continue
            evidence = [
                *lane_evidence(lane)[:1],
                Evidence(f"p99 inter-token latency of lane {lane.lane}", p99_ms, "ms", target_ms),
                Evidence(f"p50 inter-token latency of lane {lane.lane}", p50_ms, "ms", target_ms),
            ]
            if now is not None:
                evidence.append(Evidence(f"tokens per step of worker {worker.worker}", now, "tokens", better))
            return Finding(
                cause="engine_flags",
                stage="decode",
                where=f"worker {worker.worker}",
                summary=f"Steps of worker {worker.worker} compute too many prompt tokens; streams pause meanwhile.",
                evidence=tuple(evidence),
                setting=Setting(
                    "engine flag", "--max-num-batched-tokens", str(better), None if now is None else str(now)
                ),
            )
    return None


def slow_worker(facts: Facts) -> Finding | None:
    """One worker takes several times as long per token as the others."""
    known = [
        (one, one.traffic.itl_ms, one.traffic.prefill_ms)
        for one in up_workers(facts)
        if one.traffic is not None and one.traffic.attempts >= MIN_CALLS and one.traffic.itl_ms is not None
    ]
    if len(known) < 2 or not late_lanes(facts):
        return None
    worker, itl_ms, _ = max(known, key=lambda one: one[1] or 0.0)
    others = median(one[1] or 0.0 for one in known if one[0] is not worker)
    if itl_ms is None or not others or itl_ms < SLOW_WORKER * others:
        return None
    return Finding(
        cause="slow_worker",
        stage="decode",
        where=f"worker {worker.worker}",
        summary=f"Worker {worker.worker} is several times slower than the others.",
        evidence=(
            Evidence(f"time per token of worker {worker.worker}", itl_ms, "ms", others),
            Evidence("running sequences there", worker.running or 0.0, "sequences"),
        ),
        setting=Setting("action", "inferry workers drain", worker.worker),
    )


def decode_bound(facts: Facts) -> Finding | None:
    """Every step is too long for the target: too many sequences, or too large a model."""
    for lane in late_lanes(facts):
        if lane.itl_ms is None or lane.itl_p50_ms is None or lane.itl_p50_ms <= lane.itl_ms:
            continue
        worker = max(up_workers(facts), key=lambda one: one.running or 0.0, default=None)
        if worker is None:
            return None
        running = worker.running or 0.0
        fits = max(1, int(running * lane.itl_ms / lane.itl_p50_ms))
        is_crowded = running >= 8
        output = 1.0 if lane.traffic is None else lane.traffic.output_tokens
        return Finding(
            cause="decode_bound",
            stage="decode",
            where=f"worker {worker.worker}",
            summary=f"Tokens of lane {lane.lane} take longer than the target in every step.",
            evidence=(
                *lane_evidence(lane)[:1],
                Evidence(f"p50 inter-token latency of lane {lane.lane}", lane.itl_p50_ms, "ms", lane.itl_ms),
                Evidence(f"running sequences of worker {worker.worker}", running, "sequences", worker.sequences),
            ),
            setting=Setting("config", f"workers[{worker.worker}].max_sequences", str(fits), str(worker.sequences))
            if is_crowded
            else Setting("action", "serve this model in a lower precision", "or route these calls to a smaller model"),
            late_ms=(lane.itl_p50_ms - lane.itl_ms) * output,
        )
    return None


def cold_cache(facts: Facts) -> Finding | None:
    """Prompts repeat a template, and the engine computes it every time."""
    for lane in _prefill_lanes(facts):
        traffic = lane.traffic
        if traffic is None or traffic.templated_ratio < REPEATED or (traffic.cached_ratio or 0.0) >= COLD_CACHE:
            continue
        return Finding(
            cause="cold_cache",
            stage="prefill",
            where=f"lane {lane.lane}",
            summary="Prompts of the same templates are computed again for every call.",
            evidence=(
                *lane_evidence(lane)[:1],
                Evidence("mean time from sending to the first token", traffic.prefill_ms or 0.0, "ms", lane.ttft_ms),
                Evidence("cached prompt tokens", traffic.cached_ratio or 0.0, "ratio", COLD_CACHE),
                Evidence("calls with a repeated template", traffic.templated_ratio, "ratio", REPEATED),
            ),
            setting=Setting(
                "action",
                "move text that varies, such as a timestamp, to the end of the prompt",
                "and start the engine with --enable-prefix-caching",
            ),
            late_ms=_late_prefill_ms(lane),
        )
    return None


def prefill_bound(facts: Facts) -> Finding | None:
    """The prompt itself takes too long."""
    for lane in _prefill_lanes(facts):
        traffic = lane.traffic
        if traffic is None:
            continue
        return Finding(
            cause="prefill_bound",
            stage="prefill",
            where=f"lane {lane.lane}",
            summary=f"Most of the time to the first token in lane {lane.lane} is the computation of prompts.",
            evidence=(
                *lane_evidence(lane)[:1],
                Evidence("mean time from sending to the first token", traffic.prefill_ms or 0.0, "ms", lane.ttft_ms),
                Evidence("mean prompt", traffic.prompt_tokens, "tokens"),
                Evidence("cached prompt tokens", traffic.cached_ratio or 0.0, "ratio"),
            ),
            setting=Setting("action", "add a worker to `workers`", "or shorten the prompts of this lane"),
            late_ms=_late_prefill_ms(lane),
        )
    return None


def _prefill_lanes(facts: Facts) -> list[LaneFacts]:
    """Late lanes whose time to the first token is spent in the engine."""
    found = []
    for lane in late_lanes(facts):
        traffic = lane.traffic
        if traffic is None or traffic.prefill_ms is None or lane.ttft_ms is None or queue_dominates(lane):
            continue
        if traffic.prefill_ms >= PREFILL_SHARE * lane.ttft_ms:
            found.append(lane)
    return found


def _late_prefill_ms(lane: LaneFacts) -> float:
    prefill_ms = None if lane.traffic is None else lane.traffic.prefill_ms
    return max(0.0, (prefill_ms or 0.0) - (lane.ttft_ms or 0.0))


def _better_chunk(chunk_tokens: int | None, step_ms: float, target_ms: float) -> int:
    """The recommended chunk, halved until its measured step takes at most `ITLS_PER_STEP` inter-token intervals."""
    better = RECOMMENDED_CHUNK_TOKENS
    if chunk_tokens is not None:
        while better > MIN_CHUNK_TOKENS and better * step_ms / chunk_tokens > ITLS_PER_STEP * target_ms:
            better //= 2
    return better
