"""The dashboard's figures: what they are computed from, and how long their course is kept."""

import pytest

from inferry.domain.lanes import Lane
from inferry.observe.figures import POINTS, FigureHistory, figures
from inferry.observe.history import MetricHistory, SeriesReading


class FakeSource:
    """Counters rise by a fixed amount per sample."""

    def __init__(self) -> None:
        self.number = 0

    def readings(self) -> list[SeriesReading]:
        n = self.number = self.number + 1
        lane = (("lane", "P0"),)
        worker = (("worker", "w"),)
        return [
            SeriesReading("inferry_jobs_total", (*lane, ("model", "m"), ("outcome", "done")), 10 * n),
            SeriesReading("inferry_tokens_total", (("kind", "output"), ("model", "m"), *lane), 300 * n),
            SeriesReading("inferry_tokens_total", (("kind", "prompt"), ("model", "m"), *lane), 900 * n),
            SeriesReading("inferry_errors_total", (("code", "queue_full"),), n),
            SeriesReading("inferry_jobs_in_flight", (), 7),
            SeriesReading("inferry_queue_depth", lane, 4),
            SeriesReading("inferry_slo_attainment_total", (*lane, ("attained", "true")), 9 * n),
            SeriesReading("inferry_slo_attainment_total", (*lane, ("attained", "false")), 1 * n),
            SeriesReading("inferry_queue_wait_seconds", lane, 0.5 * n, (0.1, 1.0), (5 * n, 10 * n, 10 * n)),
            SeriesReading("inferry_worker_up", worker, 1),
            SeriesReading("inferry_worker_running_sequences", worker, 3),
            SeriesReading("inferry_worker_kv_used_tokens", worker, 512),
            SeriesReading("inferry_worker_gpu_utilization_ratio", worker, 0.8 if n < 3 else 0.0),
            SeriesReading("inferry_batch_size", worker, 20 * n, (1, 8), (0, 10 * n, 10 * n)),
        ]


def test_figures_are_rates_and_quantiles_of_the_window() -> None:
    history = MetricHistory(FakeSource())
    for at in (0.0, 5.0, 10.0):
        history.sample(at)
    found = figures(history, 10.0, 10.0)
    assert found.calls_per_s == pytest.approx(2.0)
    rates = [found.output_tokens_per_s, found.prompt_tokens_per_s, found.refusals_per_s]
    assert rates == pytest.approx([60.0, 180.0, 0.2])
    assert found.in_flight == 7
    lane = found.lanes[Lane.P0]
    assert [lane.queued, lane.attainment] == pytest.approx([4, 0.9])
    assert [lane.queue_p50_ms, lane.queue_p95_ms] == pytest.approx([100.0, 910.0])
    assert lane.ttft_p95_ms is None
    assert found.lanes[Lane.P2].attainment is None
    worker = found.workers["w"]
    assert (worker.running, worker.kv_used, worker.batch_mean) == (3, 512, 2.0)
    assert worker.gpu_utilization == pytest.approx(1.6 / 3), "a mean of the window, as all figures; not the last sample"


def test_a_bounded_number_of_points_is_kept() -> None:
    history = MetricHistory(FakeSource())
    points = FigureHistory(history)
    for number in range(POINTS + 5):
        history.sample(float(number))
        points.sample(float(number))
    assert len(points.points) == POINTS
    assert points.points[-1].at == POINTS + 4
    assert points.version == POINTS + 5
    assert list(points.points[-1].workers) == ["w"]
