"""Rates, means and quantiles over a window of the metrics' history."""

import pytest

from inferry.cli.observation_wiring import prefix_cache_hit_ratios
from inferry.domain.lanes import Lane
from inferry.observe.figures import figures
from inferry.observe.history import MetricHistory, SeriesReading, quantile_of
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


def test_no_quantile_is_above_the_largest_value() -> None:
    """All of 300 waits between 60 and 70 s are in the bucket from 60 to 120 s."""
    metrics = Metrics(["m"], ["w"])
    history = MetricHistory(metrics)
    history.sample(0.0)
    name = "inferry_queue_wait_seconds"
    for number in range(300):
        metrics._queue_wait.at("P2", "m").observe(60.0 + number / 30)
    history.sample(5.0)
    assert history.quantile(0.95, name, 60, lane="P2") == pytest.approx(60.0 + 299 / 30)
    assert history.largest_by(name, ("lane",))[("lane", "P2"),] == pytest.approx(60.0 + 299 / 30)
    assert figures(history, 60, 5.0).lanes[Lane.P2].queue_p95_ms == pytest.approx(69_966.7, rel=0.001)
    (reading,) = [one for one in metrics.readings() if one.name == name and ("lane", "P2") in one.labels]
    assert (quantile_of(0.95, reading.bounds, list(reading.buckets)) or 0.0) > 70, "as Prometheus computes it"


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
    depths: dict[tuple[str, ...], float] = {("P0", "m"): 1, ("P0", "n"): 2}
    metrics.watch({"inferry_queue_depth": lambda: depths})
    history = MetricHistory(metrics)
    history.sample(0.0)
    assert history.latest("inferry_queue_depth", lane="P0") == 3
    assert history.latest("inferry_jobs_total", model="m") == 0
    assert history.label_values("inferry_queue_wait_seconds", "lane") == [lane.name for lane in Lane]


def test_values_by_labels_are_those_of_each_selection() -> None:
    source = FakeSource()
    history = MetricHistory(source)
    for at, count in ((0.0, 0), (10.0, 100), (20.0, 140)):
        source.values = [
            *(_counter(factor * count, lane=lane, model=model) for factor, lane, model in SERIES),
            _wait(0.0, count, 2 * count, 2 * count, 2 * count),
        ]
        history.sample(at)
    assert history.increase_by("calls", 10, ("lane",)) == {
        (("lane", lane),): history.increase("calls", 10, lane=lane) for lane in ("P0", "P1")
    }
    assert history.latest_by("calls", (), where=(("model", "b"),)) == {(): [420.0]}
    assert history.mean_by("calls", 20, ("model",)) == {
        (("model", "a"),): [80.0, 160.0],
        (("model", "b"),): [240.0],
    }
    ((labels, (bounds, buckets)),) = history.buckets_by("wait", 10, ("lane",)).items()
    assert (labels, bounds, buckets) == ((("lane", "P0"),), (1.0, 2.0, 4.0), [40, 80, 80, 80])
    assert quantile_of(0.5, bounds, buckets) == history.quantile(0.5, "wait", 10)
    assert history.buckets_by("wait", 10, ("lane",), ago_s=10.0)[labels][1] == [100, 200, 200, 200]
    assert history.increase_by("unknown", 10, ("lane",)) == {}
    assert history.mean_by("unknown", 10, ()) == {}


SERIES = ((1, "P0", "a"), (2, "P1", "a"), (3, "P1", "b"))


def test_a_series_that_does_not_change_is_kept_once() -> None:
    source = FakeSource()
    history = MetricHistory(source)
    for at in range(100):
        source.values = [_counter(7.5, lane="P0"), _counter(float(at), lane="P1")]
        history.sample(float(at))
    assert history.values("calls", 100, lane="P1")[-2:] == [(98.0, 98.0), (99.0, 99.0)]
    kept = {id(sample.series["calls"][0]) for sample in history._samples}
    assert len(kept) == 1


def test_the_prefix_cache_hit_ratio_is_of_the_last_minutes() -> None:
    source = FakeSource()
    history = MetricHistory(source)

    def tokens(model: str, prompt: float, cached: float) -> list[SeriesReading]:
        return [
            SeriesReading("inferry_tokens_total", (("kind", kind), ("model", model), ("lane", "P0")), value)
            for kind, value in (("prompt", prompt), ("cached", cached), ("output", 5.0))
        ]

    assert prefix_cache_hit_ratios(history) == {}
    for at, prompt, cached in ((0.0, 1000.0, 1000.0), (10.0, 2000.0, 1250.0)):
        source.values = [*tokens("busy", prompt, cached), *tokens("idle", 10.0, 10.0)]
        history.sample(at)
    assert prefix_cache_hit_ratios(history) == {"busy": 0.25}
