"""The last minutes of the gateway's metrics: rates, quantiles and means over a window that ends now.

Alerts, `doctor`, `top` and the dashboard read it. The event loop owns it and calls `sample` at a fixed interval. Memory
is bounded by the number of samples kept times the number of series.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

INTERVAL_S = 5.0
KEPT_S = 900.0


class SeriesReading(NamedTuple):
    """One series of a metric. A histogram has the cumulative `buckets` of `bounds` and +Inf; `value` is its sum."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    bounds: tuple[float, ...] = ()
    buckets: tuple[int, ...] = ()


class MetricSource(Protocol):
    def readings(self) -> Iterable[SeriesReading]:
        """Every series with its present value."""


class _Sample(NamedTuple):
    at: float
    series: dict[str, list[SeriesReading]]


class MetricHistory:
    """Samples of a metric source. `labels` select the series whose labels include them; several are added up.

    A window ends with the last sample, or `ago_s` seconds before it.
    """

    def __init__(self, source: MetricSource, *, kept_s: float = KEPT_S) -> None:
        self._source = source
        self._kept_s = kept_s
        self._samples: deque[_Sample] = deque()

    def sample(self, now: float) -> None:
        """Keep the present values, and forget those older than is kept."""
        series: dict[str, list[SeriesReading]] = {}
        for reading in self._source.readings():
            series.setdefault(reading.name, []).append(reading)
        self._samples.append(_Sample(now, series))
        while self._samples[0].at < now - self._kept_s:
            self._samples.popleft()

    def latest(self, name: str, **labels: str) -> float | None:
        """The sum of the selected series in the last sample; None without one."""
        if not self._samples:
            return None
        found = _selected(self._samples[-1], name, labels)
        return sum(one.value for one in found) if found else None

    def label_values(self, name: str, label: str) -> list[str]:
        """The values of one label among the series of a metric in the last sample."""
        found = _selected(self._samples[-1], name, {}) if self._samples else []
        return list(dict.fromkeys(value for one in found for key, value in one.labels if key == label))

    def series(self, name: str) -> list[tuple[tuple[str, str], ...]]:
        """The labels of each series of a metric in the last sample."""
        return [one.labels for one in self._samples[-1].series.get(name, ())] if self._samples else []

    def series_count(self, name: str, **labels: str) -> int:
        """Number of selected series in the last sample."""
        return len(_selected(self._samples[-1], name, labels)) if self._samples else 0

    def values(self, name: str, window_s: float, **labels: str) -> list[tuple[float, float]]:
        """(time, value) of each sample in the window, the oldest first: the course of a gauge."""
        return [
            (sample.at, sum(one.value for one in found))
            for sample in self._within(window_s)
            if (found := _selected(sample, name, labels))
        ]

    def mean(self, name: str, window_s: float, **labels: str) -> float | None:
        """Mean of a gauge over the window."""
        values = self.values(name, window_s, **labels)
        return sum(value for _, value in values) / len(values) if values else None

    def increase(self, name: str, window_s: float, **labels: str) -> float:
        """How much a counter, or a histogram's sum, rose over the window."""
        first, last = self._ends(window_s)
        if first is None or last is None:
            return 0.0
        return _total(last, name, labels) - _total(first, name, labels)

    def rate(self, name: str, window_s: float, **labels: str) -> float:
        """Increase per second, over as much of the window as has samples."""
        first, last = self._ends(window_s)
        if first is None or last is None:
            return 0.0
        return (_total(last, name, labels) - _total(first, name, labels)) / (last.at - first.at)

    def count(self, name: str, window_s: float, *, ago_s: float = 0.0, **labels: str) -> int:
        """Values that a histogram observed in the window."""
        buckets = self._bucket_increase(name, window_s, ago_s, labels)[1]
        return buckets[-1] if buckets else 0

    def quantile(self, q: float, name: str, window_s: float, *, ago_s: float = 0.0, **labels: str) -> float | None:
        """Quantile of what a histogram observed in the window, interpolated within its bucket as Prometheus does."""
        bounds, buckets = self._bucket_increase(name, window_s, ago_s, labels)
        if not buckets or buckets[-1] <= 0:
            return None
        rank = q * buckets[-1]
        below, lower = 0, 0.0
        for bound, upto in zip(bounds, buckets, strict=False):
            if upto >= rank and upto > below:
                return lower + (bound - lower) * (rank - below) / (upto - below)
            below, lower = upto, bound
        return bounds[-1]

    def _bucket_increase(
        self, name: str, window_s: float, ago_s: float, labels: Mapping[str, str]
    ) -> tuple[tuple[float, ...], list[int]]:
        first, last = self._ends(window_s, ago_s)
        found = [] if last is None else _selected(last, name, labels)
        if first is None or not found:
            return (), []
        before = {one.labels: one.buckets for one in _selected(first, name, labels)}
        totals = [0] * len(found[0].buckets)
        for one in found:
            start = before.get(one.labels, (0,) * len(one.buckets))
            totals = [total + now - then for total, now, then in zip(totals, one.buckets, start, strict=True)]
        return found[0].bounds, totals

    def _within(self, window_s: float, ago_s: float = 0.0) -> list[_Sample]:
        if not self._samples:
            return []
        end = self._samples[-1].at - ago_s
        return [sample for sample in self._samples if end - window_s <= sample.at <= end]

    def _ends(self, window_s: float, ago_s: float = 0.0) -> tuple[_Sample | None, _Sample | None]:
        within = self._within(window_s, ago_s)
        return (within[0], within[-1]) if len(within) > 1 else (None, None)


def _selected(sample: _Sample, name: str, labels: Mapping[str, str]) -> list[SeriesReading]:
    wanted = set(labels.items())
    return [one for one in sample.series.get(name, ()) if wanted <= set(one.labels)]


def _total(sample: _Sample, name: str, labels: Mapping[str, str]) -> float:
    return sum(one.value for one in _selected(sample, name, labels))
