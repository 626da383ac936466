"""Counters and histograms with labels, and how they are written for Prometheus."""

from collections.abc import Iterable

from inferry.observe.counters import FastCounter, FastHistogram
from inferry.observe.history import SeriesReading
from inferry.observe.metric_spec import MetricSpec
from inferry.observe.metric_table import METRIC_TABLE

SPECS = {spec.name: spec for spec in METRIC_TABLE}

Rows = Iterable[tuple[tuple[str, ...], float]]


class Counters:
    """The children of one counter."""

    def __init__(self, name: str) -> None:
        self.spec = SPECS[name]
        self._children: dict[tuple[str, ...], FastCounter] = {}
        # Made once and shared by all readings: the history keeps many of each series.
        self._pairs: dict[tuple[str, ...], tuple[tuple[str, str], ...]] = {}

    def at(self, *labels: str) -> FastCounter:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = FastCounter()
            self._pairs[labels] = tuple(zip(self.spec.labels, labels, strict=True))
        return child

    def drop(self, *labels: str) -> None:
        self._children.pop(labels, None)
        self._pairs.pop(labels, None)

    def readings(self) -> list[SeriesReading]:
        name, pairs = self.spec.name, self._pairs
        return [SeriesReading(name, pairs[labels], child.value) for labels, child in self._children.items()]

    def lines(self) -> list[str]:
        return exposition_lines(self.spec, ((labels, child.value) for labels, child in self._children.items()))


class Histograms:
    """The children of one histogram."""

    def __init__(self, name: str) -> None:
        self.spec = SPECS[name]
        self._children: dict[tuple[str, ...], FastHistogram] = {}
        self._pairs: dict[tuple[str, ...], tuple[tuple[str, str], ...]] = {}
        # The text before each number never changes, so it is made once: a scrape blocks the event loop.
        self._heads: dict[tuple[str, ...], tuple[list[str], str, str]] = {}

    def at(self, *labels: str) -> FastHistogram:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = FastHistogram(self.spec.buckets)
            self._pairs[labels] = tuple(zip(self.spec.labels, labels, strict=True))
            name, pairs = self.spec.name, _pairs(self.spec.labels, labels)
            before, after = (f"{pairs},", f"{{{pairs}}}") if pairs else ("", "")
            bounds = [*(repr(float(bound)) for bound in self.spec.buckets), "+Inf"]
            self._heads[labels] = (
                [f'{name}_bucket{{{before}le="{bound}"}} ' for bound in bounds],
                f"{name}_count{after} ",
                f"{name}_sum{after} ",
            )
        return child

    def drop(self, *labels: str) -> None:
        self._children.pop(labels, None)
        self._pairs.pop(labels, None)
        self._heads.pop(labels, None)

    def readings(self) -> list[SeriesReading]:
        return [
            SeriesReading(
                self.spec.name,
                self._pairs[labels],
                child.total,
                child.bounds,
                tuple(child.cumulative()),
                child.largest,
            )
            for labels, child in self._children.items()
        ]

    def lines(self) -> list[str]:
        lines = []
        for labels, child in self._children.items():
            buckets, count, total = self._heads[labels]
            upto = child.cumulative()
            lines += [f"{head}{number}" for head, number in zip(buckets, upto, strict=True)]
            lines.append(f"{count}{upto[-1]}")
            lines.append(f"{total}{child.total!r}")
        return lines


def row_readings(spec: MetricSpec, rows: Rows) -> list[SeriesReading]:
    return [SeriesReading(spec.name, tuple(zip(spec.labels, labels, strict=True)), value) for labels, value in rows]


def exposition_lines(spec: MetricSpec, rows: Rows) -> list[str]:
    if not spec.labels:
        return [f"{spec.name} {value!r}" for _, value in rows]
    return [f"{spec.name}{{{_pairs(spec.labels, labels)}}} {value!r}" for labels, value in rows]


def _pairs(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
