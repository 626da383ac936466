"""Conditions of alerts, each written once: as PromQL, and evaluated over the history of the metrics.

An expression is a vector as in PromQL: values by labels. A comparison keeps the entries for which it holds; `Both`
keeps those whose `on` labels the other side has. In PromQL the gateways of a fleet are told apart by `instance`. An
expression over a metric that does not exist is empty: it cannot say anything.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, Protocol

from inferry.observe.history import Labels, MetricHistory, quantile_of

Vector = dict[Labels, float]


class Expression(Protocol):
    def promql(self) -> str: ...
    def evaluate(self, history: MetricHistory) -> Vector: ...


class Gauge(NamedTuple):
    """A gauge by labels, added up or averaged over its other labels. With a window: its mean over time.

    `where` selects series; only a gauge without a window has it.
    """

    name: str
    by: tuple[str, ...] = ()
    window_s: float | None = None
    where: tuple[tuple[str, str], ...] = ()
    how: Literal["sum", "avg"] = "sum"

    def promql(self) -> str:
        matchers = ",".join(f'{label}="{value}"' for label, value in self.where)
        series = f"{self.name}{{{matchers}}}" if matchers else self.name
        if self.window_s is not None:
            assert not self.where
            series = f"avg_over_time({series}[{duration(self.window_s)}])"
        return f"{self.how}{_by(self.by)} ({series})"

    def evaluate(self, history: MetricHistory) -> Vector:
        if self.window_s is None:
            found = history.latest_by(self.name, self.by, self.where)
        else:
            found = history.mean_by(self.name, self.window_s, self.by)
        if self.how == "avg":
            return {labels: sum(values) / len(values) for labels, values in found.items()}
        return {labels: sum(values) for labels, values in found.items()}


class Increase(NamedTuple):
    """How much a counter, or the number of values of a histogram, rose over a window.

    `ago_s`: the window ended this long ago; for histograms only.
    """

    name: str
    window_s: float
    by: tuple[str, ...] = ()
    of_histogram: bool = False
    ago_s: float = 0.0

    def promql(self) -> str:
        name = f"{self.name}_count" if self.of_histogram else self.name
        offset = f" offset {duration(self.ago_s)}" if self.ago_s else ""
        return f"sum{_by(self.by)} (increase({name}[{duration(self.window_s)}]{offset}))"

    def evaluate(self, history: MetricHistory) -> Vector:
        if not self.of_histogram:
            return history.increase_by(self.name, self.window_s, self.by)
        found = history.buckets_by(self.name, self.window_s, self.by, ago_s=self.ago_s)
        return {labels: float(buckets[-1]) for labels, (_, buckets) in found.items()}


class Quantile(NamedTuple):
    """A quantile of what a histogram observed in a window that ended `ago_s` seconds ago."""

    q: float
    name: str
    window_s: float
    by: tuple[str, ...] = ()
    ago_s: float = 0.0

    def promql(self) -> str:
        offset = f" offset {duration(self.ago_s)}" if self.ago_s else ""
        rate = f"rate({self.name}_bucket[{duration(self.window_s)}]{offset})"
        return f"histogram_quantile({self.q:g}, sum{_by((*self.by, 'le'))} ({rate}))"

    def evaluate(self, history: MetricHistory) -> Vector:
        found: Vector = {}
        for labels, observed in history.buckets_by(self.name, self.window_s, self.by, ago_s=self.ago_s).items():
            value = quantile_of(self.q, *observed)
            if value is not None:
                found[labels] = value
        return found


class Scaled(NamedTuple):
    """An expression times a factor."""

    factor: float
    inner: Expression

    def promql(self) -> str:
        return f"{self.factor:g} * {self.inner.promql()}"

    def evaluate(self, history: MetricHistory) -> Vector:
        return {labels: self.factor * value for labels, value in self.inner.evaluate(history).items()}


class Ratio(NamedTuple):
    """One expression over another with the same labels."""

    above: Expression
    below: Expression

    def promql(self) -> str:
        return f"{self.above.promql()} / {self.below.promql()}"

    def evaluate(self, history: MetricHistory) -> Vector:
        below = self.below.evaluate(history)
        return {
            labels: value / below[labels]
            for labels, value in self.above.evaluate(history).items()
            if below.get(labels, 0.0)
        }


class Compared(NamedTuple):
    """The entries of an expression that are above or below a number, or the same entry of another expression."""

    left: Expression
    sign: Literal[">", "<"]
    right: Expression | float

    def promql(self) -> str:
        right = f"{self.right:g}" if isinstance(self.right, int | float) else self.right.promql()
        return f"{self.left.promql()} {self.sign} {right}"

    def evaluate(self, history: MetricHistory) -> Vector:
        left = self.left.evaluate(history)
        if isinstance(self.right, int | float):
            right = dict.fromkeys(left, float(self.right))
        else:
            right = self.right.evaluate(history)
        is_above = self.sign == ">"
        return {
            labels: value
            for labels, value in left.items()
            if labels in right and (value > right[labels] if is_above else value < right[labels])
        }


class Both(NamedTuple):
    """The entries of `left` whose labels `on` some entry of `right` has."""

    left: Expression
    right: Expression
    on: tuple[str, ...] = ()

    def promql(self) -> str:
        return f"({self.left.promql()})\nand on ({', '.join(('instance', *self.on))}) ({self.right.promql()})"

    def evaluate(self, history: MetricHistory) -> Vector:
        right = {_only(labels, self.on) for labels in self.right.evaluate(history)}
        return {
            labels: value for labels, value in self.left.evaluate(history).items() if _only(labels, self.on) in right
        }


def duration(seconds: float) -> str:
    """Seconds as Prometheus writes durations."""
    whole = round(seconds)
    return f"{whole // 60}m" if whole and not whole % 60 else f"{whole}s"


def metrics_of(expression: object) -> set[str]:
    """The metrics that an expression reads."""
    if isinstance(expression, Gauge | Increase | Quantile):
        return {expression.name}
    inner: Iterable[object] = expression if isinstance(expression, tuple) else ()
    return set().union(*(metrics_of(one) for one in inner))


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(('instance', *labels))})"


def _only(labels: Labels, names: tuple[str, ...]) -> Labels:
    values: Mapping[str, str] = dict(labels)
    return tuple((name, values[name]) for name in names)
