"""What observes the running gateway: the history of its metrics, and what follows each of its samples."""

from collections.abc import Callable

from inferry.admission.budget_burn import BudgetBurn
from inferry.admission.quota_gate import QuotaGate
from inferry.cli.alert_wiring import Alerting
from inferry.cli.config.alerts import AlertsConfig
from inferry.cli.storage_metrics import StorageMetrics
from inferry.cli.storage_wiring import Storage
from inferry.dispatch.periodic_task import PeriodicTask
from inferry.domain.clock import Clock
from inferry.observe.history import INTERVAL_S, MetricHistory
from inferry.observe.loop_lag import LoopLagProbe
from inferry.observe.metrics import Metrics

OnSample = Callable[[float], None]

RATIO_WINDOW_S = 300.0
BURN_INTERVAL_S = 30.0
"""The accounts of all tenants are looked through this often, in seconds."""


class Observation:
    """Owns the task that samples the metrics. `followers` are called with the gateway's time after each sample."""

    def __init__(self, metrics: Metrics, clock: Clock, gate: QuotaGate, storage: Storage, alerts: AlertsConfig) -> None:
        self.history = MetricHistory(metrics)
        self.alerting = Alerting(alerts, self.history, metrics, clock)
        self.followers: list[OnSample] = [self.alerting.follow]
        self._clock = clock
        self._gate = gate
        self.burn: dict[str, BudgetBurn] = {}
        self._burn_at = float("-inf")
        self._sampling = PeriodicTask(self._sample, INTERVAL_S, "metrics")
        self._lag = LoopLagProbe(metrics.loop_lag, clock.now)
        self._storage = StorageMetrics(storage, metrics)
        metrics.watch(
            {
                "inferry_prefix_cache_hit_ratio": lambda: prefix_cache_hit_ratios(self.history),
                "inferry_budget_burn_ratio": self._burn_ratios,
                "inferry_run_budget_spent_ratio": lambda: self.burn["run"].ratio if self.burn else 0.0,
            }
        )

    def start(self) -> None:
        self._take_sample()
        self._sampling.start()
        self._storage.start()
        self.alerting.start()
        self._lag.start()

    async def close(self) -> None:
        self._lag.close()
        await self._storage.close()
        await self.alerting.close()
        await self._sampling.close()

    async def _sample(self) -> None:
        now = self._take_sample()
        for follow in self.followers:
            follow(now)

    def _take_sample(self) -> float:
        now = self._clock.now()
        if now - self._burn_at >= BURN_INTERVAL_S:
            self.burn = self.alerting.burn = self._gate.budget_burn(self._clock.wall())
            self._burn_at = now
        self.history.sample(now)
        return now

    def _burn_ratios(self) -> dict[str, float]:
        return {period: one.ratio for period, one in self.burn.items() if period != "run"}


def prefix_cache_hit_ratios(history: MetricHistory) -> dict[str, float]:
    """Cached part of the prompt tokens of the last minutes, by model; models without prompt tokens are left out."""
    found = history.increase_by("inferry_tokens_total", RATIO_WINDOW_S, ("model", "kind"))
    prompt = {labels[0][1]: tokens for labels, tokens in found.items() if labels[1][1] == "prompt" and tokens > 0}
    cached = {labels[0][1]: tokens for labels, tokens in found.items() if labels[1][1] == "cached"}
    return {model: cached.get(model, 0.0) / tokens for model, tokens in prompt.items()}
