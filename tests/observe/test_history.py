"""Rates, means and quantiles over a window of the metrics' history."""

import pytest

from inferry.domain.lanes import Lane
from inferry.observe.history import MetricHistory, SeriesReading
from inferry.observe.metrics import Metrics


class FakeSource:
    def __init__(self) -> None:
        self.values: list[SeriesReading] = []

    def readings(self) -> list[SeriesReading]:
        return self.values


def _counter(value: float, **labels: str) -> SeriesReading:
    return SeriesReading("calls", tuple(labels.items()), value)


def _wait(total: float, *buckets: int) -> SeriesReading:
    return SeriesReading("wait", (("lane", "P0"),), total, (1.0, 2.0, 4.0), buckets)


def test_a_rate_covers_the_window_and_adds_up_the_selected_series() -> None:
    source = FakeSource()
    history = MetricHistory(source)
    for at, count in ((0.0, 0), (10.0, 100), (20.0, 140)):
        source.values = [_counter(count, lane="P0", model="a"), _counter(2 * count, lane="P1", model="a")]
        history.sample(at)
    assert history.rate("calls", 10, lane="P0") == pytest.approx(4.0)
    assert history.increase("calls", 20, model="a") == pytest.approx(420)
    assert history.latest("calls", lane="P1") == 280
    assert history.rate("calls", 10, lane="P2") == 0.0
    assert history.label_values("calls", "lane") == ["P0", "P1"]


def test_a_gauge_has_a_mean_and_a_course() -> None:
    source = FakeSource()
    history = MetricHistory(source)
    for at, value in ((0.0, 9.0), (5.0, 1.0), (10.0, 3.0)):
        source.values = [_counter(value)]
        history.sample(at)
    assert history.values("calls", 5) == [(5.0, 1.0), (10.0, 3.0)]
    assert history.mean("calls", 5) == pytest.approx(2.0)
    assert history.mean("unknown", 5) is None


def test_a_quantile_is_of_the_values_observed_in_the_window() -> None:
    source = FakeSource()
    history = MetricHistory(source)
    for at, reading in ((0.0, _wait(50, 0, 0, 0, 50)), (5.0, _wait(60, 10, 20, 20, 70))):
        source.values = [reading]
        history.sample(at)
    assert history.count("wait", 60, lane="P0") == 20
    assert history.quantile(0.5, "wait", 60) == pytest.approx(1.0)
    assert history.quantile(0.75, "wait", 60) == pytest.approx(1.5)
    assert history.increase("wait", 60) == pytest.approx(10)


def test_a_value_above_all_bounds_is_the_highest_bound() -> None:
    source = FakeSource()
    history = MetricHistory(source)
    for at, reading in ((0.0, _wait(0, 0, 0, 0, 0)), (5.0, _wait(60, 0, 0, 0, 7))):
        source.values = [reading]
        history.sample(at)
    assert history.quantile(0.9, "wait", 60) == 4.0


def test_without_two_samples_nothing_is_known() -> None:
    history = MetricHistory(FakeSource())
    assert history.latest("calls") is None
    assert history.rate("calls", 60) == 0.0
    history.sample(0.0)
    assert history.quantile(0.5, "wait", 60) is None


def test_old_samples_are_forgotten() -> None:
    source = FakeSource()
    history = MetricHistory(source, kept_s=10)
    for at in range(100):
        source.values = [_counter(at)]
        history.sample(float(at))
    assert len(history.values("calls", 1000)) == 11


def test_every_series_of_the_gateway_is_read() -> None:
    metrics = Metrics(["m"], ["w"])
    metrics.watch({"inferry_queue_depth": lambda: {Lane.P0: 3}})
    history = MetricHistory(metrics)
    history.sample(0.0)
    assert history.latest("inferry_queue_depth", lane="P0") == 3
    assert history.latest("inferry_jobs_total", model="m") == 0
    assert history.label_values("inferry_queue_wait_seconds", "lane") == [lane.name for lane in Lane]
