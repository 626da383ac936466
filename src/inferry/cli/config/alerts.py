"""The `alerts` section of the configuration: which rules the gateway evaluates, and where alerts are sent."""

import base64
import binascii
import math
import os
import ssl
from collections.abc import Iterator, Mapping
from ipaddress import ip_network

from msgspec import Struct

from inferry.cli.config.checks import check_positive
from inferry.cli.config.secrets import secret_variable
from inferry.durable.callback_policy import CallbackForbidden, CallbackPolicy, parse_target
from inferry.observe.alerts import ALERT_RULES, AlertRule

MIN_SECRET_BYTES = 16
_PREFIX = "whsec_"


class AlertRuleConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of one rule."""

    enabled: bool = True
    """Whether the rule is evaluated."""
    threshold: float | None = None
    """The rule's threshold, in its unit; null keeps the default."""
    for_s: float | None = None
    """How long the condition must hold before the alert fires, in seconds; null keeps the default."""


class AlertWebhookConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receiver of alerts. Its addresses are checked as those of callbacks are."""

    url: str
    """Where alerts are sent: `https://…`, or `http://…` with `allow_http`."""
    secret: str
    """Signs the requests as Standard Webhooks defines: `whsec_` and at least 16 bytes in base64. `$NAME` reads the
    environment variable NAME."""
    allow_http: bool = False
    """Whether the URL may begin with `http://`."""
    allowed_networks: tuple[str, ...] = ()
    """Internal networks that the receiver may be in, for example `10.2.0.0/16`."""
    ca_file: str | None = None
    """A PEM file of certificate authorities for the receiver; null uses those of the operating system."""
    timeout_s: float = 10.0
    """Maximum time of one attempt, in seconds."""
    retry_for_s: float = 3600.0
    """How long an alert is retried, in seconds."""

    def policy(self) -> CallbackPolicy:
        return CallbackPolicy(
            allow_http=self.allow_http,
            allowed_networks=tuple(map(ip_network, self.allowed_networks)),
            timeout_s=self.timeout_s,
            initial_backoff_s=min(5.0, self.retry_for_s),
            max_backoff_s=300.0,
            retry_for_s=self.retry_for_s,
        )

    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file)

    def key(self, env: Mapping[str, str] = os.environ) -> bytes:
        """The key that signs. Raises ValueError."""
        variable = secret_variable(self.secret)
        text = self.secret if variable is None else env.get(variable, "")
        if not text:
            raise ValueError(f"the environment variable {variable} is not set")
        try:
            key = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if not text.startswith(_PREFIX) or len(key) < MIN_SECRET_BYTES:
            raise ValueError(f"must be {_PREFIX} and at least {MIN_SECRET_BYTES} bytes in base64")
        return key


class AlertsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Alerts that the gateway evaluates itself."""

    enabled: bool = True
    """Whether rules are evaluated. `GET /admin/alerts` is empty otherwise."""
    rules: dict[str, AlertRuleConfig] = {}
    """Changes of rules by name, for example `InferryQueueNearlyFull: {threshold: 0.9}`."""
    webhook: AlertWebhookConfig | None = None
    """Where alerts are sent when they begin to fire and when they are resolved; null sends none."""

    def active_rules(self) -> tuple[AlertRule, ...]:
        """The rules that are enabled, with their thresholds and times."""
        if not self.enabled:
            return ()
        return tuple(_changed(rule, self.rules.get(rule.name, AlertRuleConfig())) for rule in self._enabled())

    def _enabled(self) -> list[AlertRule]:
        return [rule for rule in ALERT_RULES if rule.name not in self.rules or self.rules[rule.name].enabled]


def _changed(rule: AlertRule, change: AlertRuleConfig) -> AlertRule:
    return rule._replace(
        threshold=rule.threshold if change.threshold is None else change.threshold,
        for_s=rule.for_s if change.for_s is None else change.for_s,
    )


def check_alerts(config: AlertsConfig) -> Iterator[str]:
    known = {rule.name: rule for rule in ALERT_RULES}
    for name, change in config.rules.items():
        where = f"alerts.rules.{name}"
        if name not in known:
            yield f"{where} is not a rule; the rules are {', '.join(known)}"
            continue
        if change.threshold is not None and known[name].threshold is None:
            yield f"{where}.threshold has no effect: the rule has no threshold"
        if change.threshold is not None and not math.isfinite(change.threshold):
            yield f"{where}.threshold must be a number"
        if change.for_s is not None and not 0 <= change.for_s < math.inf:
            yield f"{where}.for_s must be at least 0"
    if config.webhook is not None:
        yield from _check_webhook(config.webhook)


def check_webhook_secret(config: AlertsConfig) -> Iterator[str]:
    """Why the webhook's secret cannot be read from its environment variable."""
    if config.webhook is not None:
        try:
            config.webhook.key()
        except ValueError as problem:
            yield f"alerts.webhook.secret: {problem}"


def _check_webhook(webhook: AlertWebhookConfig) -> Iterator[str]:
    yield from check_positive("alerts.webhook", webhook, "timeout_s", "retry_for_s")
    for index, network in enumerate(webhook.allowed_networks):
        try:
            ip_network(network)
        except ValueError:
            yield f"alerts.webhook.allowed_networks[{index}] must be a network, for example 10.2.0.0/16"
            return
    try:
        parse_target(webhook.url, webhook.policy())
    except CallbackForbidden as problem:
        yield f"alerts.webhook.url {problem}"
    if secret_variable(webhook.secret) is None:
        try:
            webhook.key()
        except ValueError as problem:
            yield f"alerts.webhook.secret {problem}"
    if webhook.ca_file is not None:
        try:
            webhook.tls()
        except OSError:
            yield "alerts.webhook.ca_file cannot be read or has no certificates"
