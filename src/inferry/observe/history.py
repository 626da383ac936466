"""The last minutes of the gateway's metrics: rates, quantiles and means over a window that ends now.

Alerts, `doctor`, `top` and the dashboard read it. The event loop owns it and calls `sample` at a fixed interval. Memory
is bounded by the number of samples kept times the number of series.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

INTERVAL_S = 5.0
KEPT_S = 900.0


Labels = tuple[tuple[str, str], ...]


class SeriesReading(NamedTuple):
    """One series of a metric. A histogram has the cumulative `buckets` of `bounds` and +Inf; `value` is its sum, and
    `largest` its largest value since the start, where that is known."""

    name: str
    labels: Labels
    value: float
    bounds: tuple[float, ...] = ()
    buckets: tuple[int, ...] = ()
    largest: float | None = None


class MetricSource(Protocol):
    def readings(self) -> Iterable[SeriesReading]:
        """Every series with its present value."""


class _Sample(NamedTuple):
    at: float
    series: dict[str, list[SeriesReading]]


class MetricHistory:
    """Samples of a metric source. `labels` select the series whose labels include them; several are added up.

    A window ends with the last sample, or `ago_s` seconds before it where that is given.
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
        if self._samples:
            for name, found in series.items():
                _share_unchanged(found, self._samples[-1].series.get(name, []))
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

    def count(self, name: str, window_s: float, **labels: str) -> int:
        """Values that a histogram observed in the window."""
        buckets = self._bucket_increase(name, window_s, labels)[1]
        return buckets[-1] if buckets else 0

    def quantile(self, q: float, name: str, window_s: float, **labels: str) -> float | None:
        """Quantile of what a histogram observed in the window, interpolated within its bucket as Prometheus does, and
        at most the largest value."""
        found = quantile_of(q, *self._bucket_increase(name, window_s, labels))
        return at_most(found, _largest(_selected(self._samples[-1], name, labels)) if self._samples else None)

    # -- by labels: one value per combination that the labels `by` have in the last sample ---------------------------

    def latest_by(self, name: str, by: tuple[str, ...], where: Labels = ()) -> dict[Labels, list[float]]:
        """The values of the selected series in the last sample, by labels."""
        found: dict[Labels, list[float]] = {}
        for one, labels in _grouped(self._samples[-1], name, by) if self._samples else ():
            if not where or set(where) <= set(one.labels):
                found.setdefault(labels, []).append(one.value)
        return found

    def mean_by(self, name: str, window_s: float, by: tuple[str, ...]) -> dict[Labels, list[float]]:
        """The mean of each series over the window, by labels."""
        totals: dict[Labels, tuple[float, int]] = {}
        within = self._within(window_s)
        for sample in within:
            for one in sample.series.get(name, ()):
                total, count = totals.get(one.labels, (0.0, 0))
                totals[one.labels] = (total + one.value, count + 1)
        found: dict[Labels, list[float]] = {}
        for one, labels in _grouped(within[-1], name, by) if within else ():
            total, count = totals[one.labels]
            found.setdefault(labels, []).append(total / count)
        return found

    def increase_by(self, name: str, window_s: float, by: tuple[str, ...]) -> dict[Labels, float]:
        """How much a counter rose over the window, by labels."""
        first, last = self._ends(window_s)
        if first is None or last is None:
            return {}
        found: dict[Labels, float] = {}
        before = {one.labels: one.value for one in first.series.get(name, ())}
        for one, labels in _grouped(last, name, by):
            found[labels] = found.get(labels, 0.0) + one.value - before.get(one.labels, 0.0)
        return found

    def buckets_by(
        self, name: str, window_s: float, by: tuple[str, ...], *, ago_s: float = 0.0
    ) -> dict[Labels, tuple[tuple[float, ...], list[int]]]:
        """Bounds of a histogram, and what it observed in the window at most each bound, by labels."""
        first, last = self._ends(window_s, ago_s)
        if first is None or last is None:
            return {}
        found: dict[Labels, tuple[tuple[float, ...], list[int]]] = {}
        before = {one.labels: one.buckets for one in first.series.get(name, ())}
        for one, labels in _grouped(last, name, by):
            start = before.get(one.labels, (0,) * len(one.buckets))
            _, totals = found.get(labels, ((), [0] * len(one.buckets)))
            found[labels] = (
                one.bounds,
                [total + now - then for total, now, then in zip(totals, one.buckets, start, strict=True)],
            )
        return found

    def largest_by(self, name: str, by: tuple[str, ...]) -> dict[Labels, float]:
        """The largest value that a histogram observed since the start, by labels; those where it is known."""
        found: dict[Labels, list[SeriesReading]] = {}
        for one, labels in _grouped(self._samples[-1], name, by) if self._samples else ():
            found.setdefault(labels, []).append(one)
        return {labels: largest for labels, ones in found.items() if (largest := _largest(ones)) is not None}

    def _bucket_increase(
        self, name: str, window_s: float, labels: Mapping[str, str]
    ) -> tuple[tuple[float, ...], list[int]]:
        first, last = self._ends(window_s)
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


def _largest(readings: Iterable[SeriesReading]) -> float | None:
    """The largest value of all series; None where one does not know its own."""
    known = [one.largest for one in readings]
    return max((one for one in known if one is not None), default=None) if None not in known else None


def at_most(value: float | None, largest: float | None) -> float | None:
    """A quantile, which interpolation in a wide bucket may put above the largest value that was observed."""
    return value if value is None or largest is None else min(value, largest)


def quantile_of(q: float, bounds: tuple[float, ...], buckets: list[int]) -> float | None:
    """Quantile of a histogram with cumulative `buckets`, interpolated within its bucket as Prometheus does."""
    if not buckets or buckets[-1] <= 0:
        return None
    rank = q * buckets[-1]
    below, lower = 0, 0.0
    for bound, upto in zip(bounds, buckets, strict=False):
        if upto >= rank and upto > below:
            return lower + (bound - lower) * (rank - below) / (upto - below)
        below, lower = upto, bound
    return bounds[-1]


def _grouped(sample: _Sample, name: str, by: tuple[str, ...]) -> Iterator[tuple[SeriesReading, Labels]]:
    for one in sample.series.get(name, ()):
        values = dict(one.labels)
        yield one, tuple((label, values[label]) for label in by)


def _share_unchanged(readings: list[SeriesReading], before: list[SeriesReading]) -> None:
    """Keep one object for a series that has not changed: most do not, and many samples are kept."""
    for index, (one, old) in enumerate(zip(readings, before, strict=False)):
        if one == old:
            readings[index] = old
