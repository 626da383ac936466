"""Makes the evaluation of alerts and the webhook they are sent to. Part of the composition root."""

import random
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from inferry.admission.budget_burn import BudgetBurn
from inferry.cli.config.alerts import AlertsConfig, AlertWebhookConfig
from inferry.cli.config.schema import ConfigError
from inferry.domain.clock import Clock
from inferry.durable.callback_client import CallbackClient, SystemResolver
from inferry.durable.webhook_sender import WebhookSender
from inferry.observe.alert_states import Alert, AlertStates
from inferry.observe.history import MetricHistory
from inferry.observe.metrics import Metrics

RESULTS = ("delivered", "retried", "failed", "dropped")


class Alerting:
    """The gateway's alerts. `follow` is called after each sample of the history. `burn` names spending tenants."""

    def __init__(self, config: AlertsConfig, history: MetricHistory, metrics: Metrics, clock: Clock) -> None:
        self.burn: Mapping[str, BudgetBurn] = {}
        details = {
            "InferryBudgetBurn": lambda labels: self._owner(labels["period"], "key"),
            "InferryRunBudgetNearlySpent": lambda labels: self._owner("run", "run"),
        }
        self._states = AlertStates(config.active_rules(), history, details)
        self._clock = clock
        self._resolver: SystemResolver | None = None
        self._webhook = None if config.webhook is None else self._make_webhook(config.webhook)
        metrics.watch({"inferry_alerts": self._states.counts, "inferry_alert_webhooks_total": self._attempts})

    def start(self) -> None:
        if self._webhook is not None:
            self._webhook.start()

    async def close(self) -> None:
        if self._webhook is not None:
            await self._webhook.close()
        if self._resolver is not None:
            self._resolver.close()

    def follow(self, now: float) -> None:
        for alert in self._states.evaluate(now, self._clock.wall()):
            if self._webhook is not None:
                self._webhook.send(f"{alert.id}.{alert.state}", event_body(alert, self._clock.wall()))

    def report(self) -> list[dict[str, object]]:
        """Pending and firing alerts, for operators."""
        return [alert.object() for alert in self._states.active]

    def _owner(self, period: str, name: str) -> dict[str, str]:
        """The tenant that is furthest ahead, and its key or run where there is one."""
        burn = self.burn.get(period, BudgetBurn())
        return {"tenant": burn.tenant, **({name: burn.name} if burn.name else {})}

    def _attempts(self) -> dict[str, int]:
        return {result: 0 if self._webhook is None else self._webhook.attempts[result] for result in RESULTS}

    def _make_webhook(self, config: AlertWebhookConfig) -> WebhookSender:
        try:
            key = config.key()
        except ValueError as error:
            raise ConfigError(f"alerts.webhook.secret: {error}") from None
        self._resolver = SystemResolver()
        policy = config.policy()
        client = CallbackClient(policy, self._resolver, config.tls())
        return WebhookSender(config.url, key, client, policy, self._clock, random.random)


def event_body(alert: Alert, wall: float) -> bytes:
    """The body of a webhook request. It is the same in every attempt."""
    at = datetime.fromtimestamp(wall, UTC).isoformat().replace("+00:00", "Z")
    return msgspec.json.encode({"type": f"alert.{alert.state}", "timestamp": at, "data": alert.object()})
