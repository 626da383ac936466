"""The figures that the dashboard shows, from samples of the metrics: of lanes, of workers and of the whole gateway.

`figures` is pure. `FigureHistory` keeps one point per sample of the metrics, so that a page opened now has the course
of the last minutes. The event loop owns it. Memory is bounded by the number of points times the number of workers.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from inferry.domain.lanes import Lane
from inferry.observe.history import MetricHistory

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
    """One worker. `gpu_utilization` is None where it is not known."""

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


def figures(history: MetricHistory, window_s: float, workers: Iterable[str], at: float) -> Figures:
    """The figures over the window that ends with the last sample."""
    return Figures(
        at=at,
        calls_per_s=history.rate("inferry_jobs_total", window_s),
        prompt_tokens_per_s=history.rate("inferry_tokens_total", window_s, kind="prompt"),
        output_tokens_per_s=history.rate("inferry_tokens_total", window_s, kind="output"),
        refusals_per_s=history.rate("inferry_errors_total", window_s),
        in_flight=history.latest("inferry_jobs_in_flight") or 0.0,
        lanes={lane: _lane(history, window_s, lane.name) for lane in Lane},
        workers={name: _worker(history, window_s, name) for name in workers},
    )


def _lane(history: MetricHistory, window_s: float, lane: str) -> LaneFigures:
    def quantile_ms(q: float, name: str) -> float | None:
        seconds = history.quantile(q, name, window_s, lane=lane)
        return None if seconds is None else 1000 * seconds

    met = history.increase("inferry_slo_attainment_total", window_s, lane=lane, attained="true")
    judged = history.increase("inferry_slo_attainment_total", window_s, lane=lane)
    return LaneFigures(
        queued=history.latest("inferry_queue_depth", lane=lane) or 0.0,
        calls_per_s=history.rate("inferry_jobs_total", window_s, lane=lane),
        queue_p50_ms=quantile_ms(0.5, "inferry_queue_wait_seconds"),
        queue_p95_ms=quantile_ms(0.95, "inferry_queue_wait_seconds"),
        ttft_p50_ms=quantile_ms(0.5, "inferry_time_to_first_token_seconds"),
        ttft_p95_ms=quantile_ms(0.95, "inferry_time_to_first_token_seconds"),
        itl_p95_ms=quantile_ms(0.95, "inferry_inter_token_latency_seconds"),
        attainment=met / judged if judged > 0 else None,
        fairness=history.latest("inferry_fairness_index", lane=lane),
    )


def _worker(history: MetricHistory, window_s: float, worker: str) -> WorkerFigures:
    plans = history.count("inferry_batch_size", window_s, worker=worker)
    jobs = history.increase("inferry_batch_size", window_s, worker=worker)
    return WorkerFigures(
        running=history.latest("inferry_worker_running_sequences", worker=worker) or 0.0,
        kv_used=history.latest("inferry_worker_kv_used_tokens", worker=worker) or 0.0,
        batch_mean=jobs / plans if plans else None,
        gpu_utilization=history.latest(GPU_UTILIZATION, worker=worker),
    )


class FigureHistory:
    """The last `POINTS` points. `version` changes with every point."""

    def __init__(self, history: MetricHistory) -> None:
        self._history = history
        self._points: deque[Figures] = deque(maxlen=POINTS)
        self.version = 0

    @property
    def points(self) -> list[Figures]:
        """The oldest first."""
        return list(self._points)

    def sample(self, now: float) -> None:
        """Add a point. Called after each sample of the metrics."""
        workers = self._history.label_values("inferry_worker_up", "worker")
        self._points.append(figures(self._history, POINT_WINDOW_S, workers, now))
        self.version += 1
