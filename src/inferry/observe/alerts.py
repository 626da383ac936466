"""The alert rules: one table, from which the Prometheus rules file is generated and which the gateway evaluates."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from inferry.observe.alert_expressions import (
    Both,
    Compared,
    Expression,
    Gauge,
    Increase,
    Quantile,
    Ratio,
    Scaled,
    duration,
)
from inferry.observe.history import Labels

Severity = Literal["warning", "critical"]

LATENCY_WINDOW_S = 300.0
BATCH_WINDOW_S = 120.0
BASELINE_S = 600.0
"""Earlier time that a rule compares with, in seconds. The gateway keeps 15 minutes of history."""
MIN_FIRST_TOKENS = 30
"""First tokens in either window below which a drift of latency says nothing."""
MIN_SEQUENCES = 4.0
"""Mean running sequences below which a fall of the batch size says nothing."""


class AlertRule(NamedTuple):
    """One rule. `summary` may name labels and `value` in braces. `unit` says what the threshold is.

    A rule without a threshold has a condition that is true or false. `for_s`: how long the condition must hold.
    """

    name: str
    severity: Severity
    summary: str
    advice: str
    condition: Callable[[float], Expression]
    for_s: float
    threshold: float | None = None
    unit: str = ""

    @property
    def expression(self) -> Expression:
        return self.condition(self.threshold or 0.0)

    def text(self, labels: Labels, value: float) -> str:
        """The summary of an alert with these labels."""
        return self.summary.format_map({**dict(labels), "value": f"{value:.3g}", "threshold": self._threshold_text})

    @property
    def _threshold_text(self) -> str:
        return "" if self.threshold is None else f"{self.threshold:g}"


def _gpu_underused(threshold: float) -> Expression:
    wait = Quantile(0.95, "inferry_queue_wait_seconds", LATENCY_WINDOW_S, ("lane",))
    utilisation = Gauge("inferry_worker_gpu_utilization_ratio", (), LATENCY_WINDOW_S, how="avg")
    is_late = Compared(wait, ">", Gauge("inferry_slo_ttft_target_seconds", ("lane",)))
    return Both(is_late, Compared(utilisation, "<", threshold))


def _queue_nearly_full(threshold: float) -> Expression:
    share = Ratio(Gauge("inferry_queue_depth", ("lane",)), Gauge("inferry_queue_limit", ("lane",)))
    return Compared(share, ">", threshold)


def _batch_collapse(threshold: float) -> Expression:
    running, queue = "inferry_worker_running_sequences", "inferry_queue_depth"
    level = Gauge(running, ("worker",), BATCH_WINDOW_S + BASELINE_S)
    fell = Compared(Gauge(running, ("worker",), BATCH_WINDOW_S), "<", Scaled(threshold, level))
    mattered = Both(fell, Compared(level, ">", MIN_SEQUENCES), ("worker",))
    serves = Both(mattered, Compared(Gauge("inferry_worker_up", ("worker",)), ">", 0), ("worker",))
    grows = Compared(Gauge(queue, (), BATCH_WINDOW_S), ">", Gauge(queue, (), BATCH_WINDOW_S + BASELINE_S))
    return Both(serves, grows)


def _latency_drift(threshold: float) -> Expression:
    name, by = "inferry_time_to_first_token_seconds", ("lane",)
    before = Quantile(0.95, name, BASELINE_S, by, ago_s=LATENCY_WINDOW_S)
    drifted = Compared(Quantile(0.95, name, LATENCY_WINDOW_S, by), ">", Scaled(threshold, before))
    now = Compared(Increase(name, LATENCY_WINDOW_S, by, of_histogram=True), ">", MIN_FIRST_TOKENS)
    # A gateway that has just started has a few fast calls behind it: its older history must have enough.
    older = Increase(name, BASELINE_S / 2, by, of_histogram=True, ago_s=LATENCY_WINDOW_S + BASELINE_S / 2)
    return Both(Both(drifted, now, by), Compared(older, ">", MIN_FIRST_TOKENS), by)


ALERT_RULES: tuple[AlertRule, ...] = (
    AlertRule(
        name="InferryGpuUnderused",
        severity="warning",
        summary="Calls of lane {lane} wait {value} s (p95), longer than the target of their first token, while the "
        "GPUs are used less than {threshold} of the time.",
        advice="The gateway or its limits hold work back: see inferry_binding_limit_total, and the lanes' "
        "`reserve` and windows.",
        condition=_gpu_underused,
        for_s=300.0,
        threshold=0.4,
        unit="mean GPU utilisation, 0 to 1",
    ),
    AlertRule(
        name="InferryQueueNearlyFull",
        severity="warning",
        summary="The queue of lane {lane} is filled to {value} of its limit.",
        advice="Calls get 429 queue_full soon: add workers, or lower the load of this lane.",
        condition=_queue_nearly_full,
        for_s=60.0,
        threshold=0.75,
        unit="queued jobs as a part of `queue_limit`",
    ),
    AlertRule(
        name="InferryBatchCollapse",
        severity="warning",
        summary="Worker {worker} runs {value} sequences on average, below {threshold} of its level of the last "
        "minutes, while the queue grows.",
        advice="Look at the worker's KV use and its capacity share: preemption, slow start or a changed limit.",
        condition=_batch_collapse,
        for_s=60.0,
        threshold=0.5,
        unit="running sequences of the last 2 minutes as a part of those of the last 12",
    ),
    AlertRule(
        name="InferryLatencyDrift",
        severity="warning",
        summary="First tokens of lane {lane} take {value} s (p95), more than {threshold} times as long as before.",
        advice="Compare queue wait and load of the engines: inferry_queue_wait_seconds and "
        "inferry_worker_running_sequences.",
        condition=_latency_drift,
        for_s=120.0,
        threshold=2.0,
        unit="p95 of the last 5 minutes over that of the 10 minutes before",
    ),
    AlertRule(
        name="InferryBudgetBurn",
        severity="warning",
        summary="A tenant or key spends its budget of the {period} {value} times as fast as the {period} passes.",
        advice="The ceiling is reached before the period ends; `GET /admin/alerts` names the tenant.",
        condition=lambda threshold: Compared(Gauge("inferry_budget_burn_ratio", ("period",)), ">", threshold),
        for_s=300.0,
        threshold=1.5,
        unit="spent part of the ceiling over elapsed part of the period",
    ),
    AlertRule(
        name="InferryRunBudgetNearlySpent",
        severity="warning",
        summary="A run has spent {value} of its budget.",
        advice="Its next calls get 402 run_budget_exhausted; `GET /admin/alerts` names the tenant and the run.",
        condition=lambda threshold: Compared(Gauge("inferry_run_budget_spent_ratio"), ">", threshold),
        for_s=0.0,
        threshold=0.9,
        unit="spent part of the ceiling of a run",
    ),
    AlertRule(
        name="InferryWorkerDown",
        severity="critical",
        summary="Worker {worker} is down.",
        advice="See the worker's own log; `GET /admin/workers` says why the gateway took it out.",
        condition=lambda _: Compared(Gauge("inferry_worker_phase", ("worker",), where=(("phase", "down"),)), ">", 0),
        for_s=60.0,
    ),
    AlertRule(
        name="InferryLedgerDown",
        severity="critical",
        summary="The ledger's database is not usable.",
        advice="Rows wait in memory, and keys and budgets cannot be read: see `GET /ready` and the gateway's log.",
        condition=lambda _: Compared(Gauge("inferry_ledger_up"), "<", 1),
        for_s=30.0,
    ),
    AlertRule(
        name="InferryLedgerDropping",
        severity="critical",
        summary="{value} rows of the ledger were lost in the last 5 minutes.",
        advice="The database was away for longer than its rows fit into memory: costs of these calls are missing.",
        condition=lambda threshold: Compared(
            Increase("inferry_ledger_entries_dropped_total", LATENCY_WINDOW_S), ">", threshold
        ),
        for_s=0.0,
        threshold=0.0,
        unit="lost rows in 5 minutes",
    ),
    AlertRule(
        name="InferryEventLoopLag",
        severity="warning",
        summary="Timers of the event loop run {value} s late (p99).",
        advice="The gateway's process is at its limit, or the machine is: more CPU, or more gateway processes.",
        condition=lambda threshold: Compared(
            Quantile(0.99, "inferry_event_loop_lag_seconds", LATENCY_WINDOW_S), ">", threshold
        ),
        for_s=120.0,
        threshold=0.05,
        unit="seconds",
    ),
)


def prometheus_rules(rules: tuple[AlertRule, ...]) -> dict[str, Any]:
    """The rules as the content of a Prometheus rules file."""
    return {"groups": [{"name": "inferry", "rules": [_prometheus_rule(rule) for rule in rules]}]}


def _prometheus_rule(rule: AlertRule) -> dict[str, Any]:
    names: Mapping[str, str] = {name: f"{{{{ $labels.{name} }}}}" for name in ("lane", "worker", "period")}
    texts = {**names, "value": '{{ printf "%.3g" $value }}', "threshold": f"{rule.threshold or 0:g}"}
    return {
        "alert": rule.name,
        "expr": rule.expression.promql(),
        "for": duration(rule.for_s),
        "labels": {"severity": rule.severity},
        "annotations": {"summary": rule.summary.format_map(texts), "description": rule.advice},
    }
