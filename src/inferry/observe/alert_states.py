"""Which alerts are pending and firing: the rules evaluated over the history of the metrics. Pure."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from inferry.observe.alerts import AlertRule
from inferry.observe.history import Labels, MetricHistory

State = Literal["pending", "firing", "resolved"]
Details = Callable[[Mapping[str, str]], Mapping[str, str]]
"""Further labels of an alert, for operators only: they are not in metrics."""


class Alert(NamedTuple):
    """An alert. `since`: Unix time from which its condition has held; `began_at`: the same on the gateway's clock."""

    rule: AlertRule
    labels: Labels
    state: State
    since: float
    began_at: float
    value: float
    details: Labels = ()

    @property
    def id(self) -> str:
        """The same for one alert as long as its condition holds."""
        return ",".join((self.rule.name, *(f"{name}={value}" for name, value in self.labels), f"{self.since:.3f}"))

    def object(self) -> dict[str, object]:
        """The alert as operators see it."""
        return {
            "name": self.rule.name,
            "severity": self.rule.severity,
            "state": self.state,
            "since": self.since,
            "summary": self.rule.text(self.labels, self.value),
            "value": self.value,
            "labels": dict((*self.labels, *self.details)),
        }


class AlertStates:
    """The alerts of one gateway. `evaluate` is called after each sample of the history."""

    def __init__(
        self, rules: tuple[AlertRule, ...], history: MetricHistory, details: Mapping[str, Details] | None = None
    ) -> None:
        self._rules = [(rule, rule.expression) for rule in rules]
        self._history = history
        self._details = details or {}
        self._active: dict[tuple[str, Labels], Alert] = {}

    @property
    def active(self) -> list[Alert]:
        """Pending and firing alerts: firing ones first, then by the order of the rules."""
        return sorted(self._active.values(), key=lambda one: one.state != "firing")

    def evaluate(self, now: float, wall: float) -> list[Alert]:
        """Update all alerts; return those that began to fire and those that fired and are resolved."""
        changed: list[Alert] = []
        before, self._active = self._active, {}
        for rule, expression in self._rules:
            for labels, value in expression.evaluate(self._history).items():
                old = before.pop((rule.name, labels), None)
                since, began_at = (wall, now) if old is None else (old.since, old.began_at)
                state: State = "firing" if now - began_at >= rule.for_s else "pending"
                alert = Alert(rule, labels, state, since, began_at, value, self._more_labels(rule, labels))
                self._active[rule.name, labels] = alert
                if state == "firing" and (old is None or old.state == "pending"):
                    changed.append(alert)
        changed += [one._replace(state="resolved") for one in before.values() if one.state == "firing"]
        return changed

    def _more_labels(self, rule: AlertRule, labels: Labels) -> Labels:
        details = self._details.get(rule.name)
        return () if details is None else tuple(details(dict(labels)).items())

    def counts(self) -> dict[tuple[str, ...], float]:
        """Number of alerts by name, severity and state; zero for every rule without one."""
        found: dict[tuple[str, ...], float] = {}
        found |= {(rule.name, rule.severity, state): 0.0 for rule, _ in self._rules for state in ("pending", "firing")}
        for one in self._active.values():
            found[one.rule.name, one.rule.severity, one.state] += 1
        return found
