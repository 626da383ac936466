"""The figures that the dashboard shows, from samples of the metrics: of lanes, of workers and of the whole gateway.

`figures` is pure. `FigureHistory` keeps one point per sample of the metrics, so that a page opened now has the course
of the last minutes. The event loop owns it. Memory is bounded by the number of points times the number of workers.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from inferry.domain.lanes import Lane
from inferry.observe.history import MetricHistory, at_most, quantile_of

POINTS = 180
POINT_WINDOW_S = 15.0
"""Rates and quantiles of a point cover this time before it."""
GPU_UTILIZATION = "inferry_worker_gpu_utilization_ratio"


class LaneFigures(NamedTuple):
    """One lane. Waits are milliseconds. A quantile is None without calls in the window, and `attainment` without
    targets."""

    queued: float
    calls_per_s: float
    queue_p50_ms: float | None
    queue_p95_ms: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p95_ms: float | None
    attainment: float | None
    fairness: float | None


class WorkerFigures(NamedTuple):
    """One worker. `gpu_utilization` is the mean over the window, None where it is not known."""

    running: float
    kv_used: float
    batch_mean: float | None
    gpu_utilization: float | None


class Figures(NamedTuple):
    """The gateway at `at`, on the gateway's clock. Token rates are of attempts that have ended."""

    at: float
    calls_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    refusals_per_s: float
    in_flight: float
    lanes: dict[Lane, LaneFigures]
    workers: dict[str, WorkerFigures]


def figures(history: MetricHistory, window_s: float, at: float) -> Figures:
    """The figures over the window that ends with the last sample."""
    calls = _rates(history, "inferry_jobs_total", window_s, "lane")
    tokens = _rates(history, "inferry_tokens_total", window_s, "kind")
    return Figures(
        at=at,
        calls_per_s=sum(calls.values()),
        prompt_tokens_per_s=tokens.get("prompt", 0.0),
        output_tokens_per_s=tokens.get("output", 0.0),
        refusals_per_s=history.rate("inferry_errors_total", window_s),
        in_flight=history.latest("inferry_jobs_in_flight") or 0.0,
        lanes=_lanes(history, window_s, calls),
        workers=_workers(history, window_s),
    )


def _lanes(history: MetricHistory, window_s: float, calls: Mapping[str, float]) -> dict[Lane, LaneFigures]:
    waits = _Quantiles(history, "inferry_queue_wait_seconds", window_s)
    firsts = _Quantiles(history, "inferry_time_to_first_token_seconds", window_s)
    intervals = _Quantiles(history, "inferry_inter_token_latency_seconds", window_s)
    judged = history.increase_by("inferry_slo_attainment_total", window_s, ("lane", "attained"))
    queued = _latest(history, "inferry_queue_depth", "lane")
    fairness = _latest(history, "inferry_fairness_index", "lane")
    found = {}
    for lane in Lane:
        met = judged.get((("lane", lane.name), ("attained", "true")), 0.0)
        missed = judged.get((("lane", lane.name), ("attained", "false")), 0.0)
        found[lane] = LaneFigures(
            queued=queued.get(lane.name, 0.0),
            calls_per_s=calls.get(lane.name, 0.0),
            queue_p50_ms=waits.of(0.5, lane),
            queue_p95_ms=waits.of(0.95, lane),
            ttft_p50_ms=firsts.of(0.5, lane),
            ttft_p95_ms=firsts.of(0.95, lane),
            itl_p95_ms=intervals.of(0.95, lane),
            attainment=met / (met + missed) if met + missed > 0 else None,
            fairness=fairness.get(lane.name),
        )
    return found


def _workers(history: MetricHistory, window_s: float) -> dict[str, WorkerFigures]:
    running = _latest(history, "inferry_worker_running_sequences", "worker")
    kv_used = _latest(history, "inferry_worker_kv_used_tokens", "worker")
    utilization = history.mean_by(GPU_UTILIZATION, window_s, ("worker",))
    jobs = history.increase_by("inferry_batch_size", window_s, ("worker",))
    plans = {
        worker: counts[-1]
        for worker, (_, counts) in _buckets(history, "inferry_batch_size", window_s, "worker").items()
    }
    return {
        worker: WorkerFigures(
            running=running.get(worker, 0.0),
            kv_used=kv_used.get(worker, 0.0),
            batch_mean=jobs[("worker", worker),] / count if (count := plans.get(worker, 0)) > 0 else None,
            gpu_utilization=sum(busy) if (busy := utilization.get((("worker", worker),))) else None,
        )
        for worker in history.label_values("inferry_worker_up", "worker")
    }


def _rates(history: MetricHistory, name: str, window_s: float, label: str) -> dict[str, float]:
    # As much of the window as has samples.
    rate, rise = history.rate(name, window_s), history.increase(name, window_s)
    per_s = rate / rise if rise else 0.0
    found = history.increase_by(name, window_s, (label,))
    return {labels[0][1]: one * per_s for labels, one in found.items()}


def _latest(history: MetricHistory, name: str, label: str) -> dict[str, float]:
    return {labels[0][1]: sum(values) for labels, values in history.latest_by(name, (label,)).items()}


def _buckets(
    history: MetricHistory, name: str, window_s: float, label: str
) -> dict[str, tuple[tuple[float, ...], list[int]]]:
    return {labels[0][1]: counted for labels, counted in history.buckets_by(name, window_s, (label,)).items()}


class _Quantiles:
    """Quantiles of a histogram over the window by lane, in milliseconds."""

    def __init__(self, history: MetricHistory, name: str, window_s: float) -> None:
        self._counted = _buckets(history, name, window_s, "lane")
        self._largest = {labels[0][1]: value for labels, value in history.largest_by(name, ("lane",)).items()}

    def of(self, q: float, lane: Lane) -> float | None:
        counted = self._counted.get(lane.name)
        seconds = None if counted is None else at_most(quantile_of(q, *counted), self._largest.get(lane.name))
        return None if seconds is None else 1000 * seconds


class FigureHistory:
    """The last `POINTS` points. `version` changes with every point."""

    def __init__(self, history: MetricHistory) -> None:
        self._history = history
        self._points: deque[Figures] = deque(maxlen=POINTS)
        self.version = 0

    @property
    def latest(self) -> Figures:
        """The last point, or what is known before the first."""
        return self._points[-1] if self._points else figures(self._history, POINT_WINDOW_S, 0.0)

    @property
    def points(self) -> list[Figures]:
        """The oldest first."""
        return list(self._points)

    def sample(self, now: float) -> None:
        """Add a point. Called after each sample of the metrics."""
        self._points.append(figures(self._history, POINT_WINDOW_S, now))
        self.version += 1
