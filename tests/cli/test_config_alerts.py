"""The `alerts` section: rules with changes, a webhook that reaches no internal address, and mistakes that are named."""

from typing import Any

import pytest

from inferry.cli.config.loader import dump, parse
from inferry.cli.config.schema import ConfigError
from inferry.observe.alerts import ALERT_RULES

SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUA=="
HOOK = {"url": "https://hooks.example/in", "secret": SECRET}


def test_all_rules_are_active_unless_disabled() -> None:
    assert parse({}).alerts.active_rules() == ALERT_RULES
    assert parse({"alerts": {"enabled": False}}).alerts.active_rules() == ()
    some = parse({"alerts": {"rules": {"InferryWorkerDown": {"enabled": False}}}}).alerts.active_rules()
    assert {rule.name for rule in ALERT_RULES} - {rule.name for rule in some} == {"InferryWorkerDown"}


def test_a_rule_takes_its_threshold_and_its_time() -> None:
    changes = {"InferryQueueNearlyFull": {"threshold": 0.9, "for_s": 5}}
    (rule,) = [one for one in parse({"alerts": {"rules": changes}}).alerts.active_rules() if one.name in changes]
    assert (rule.threshold, rule.for_s) == (0.9, 5)
    assert rule.expression.promql().endswith("> 0.9")


def test_the_secret_of_the_webhook_is_not_shown() -> None:
    config = parse({"alerts": {"webhook": HOOK}})
    assert config.alerts.webhook is not None
    assert config.alerts.webhook.key() == b"ABCDEFGHIJKLMNOP"
    assert SECRET not in dump(config)
    named = parse({"alerts": {"webhook": {**HOOK, "secret": "$HOOK_SECRET"}}})
    assert "$HOOK_SECRET" in dump(named)
    assert named.alerts.webhook is not None
    assert named.alerts.webhook.key({"HOOK_SECRET": SECRET}) == b"ABCDEFGHIJKLMNOP"
    with pytest.raises(ValueError, match="HOOK_SECRET is not set"):
        named.alerts.webhook.key({})


def test_an_internal_receiver_needs_its_network() -> None:
    internal = {**HOOK, "url": "http://10.2.0.7:9093/hook", "allow_http": True}
    with pytest.raises(ConfigError, match=r"alerts\.webhook\.url has an address that is internal"):
        parse({"alerts": {"webhook": internal}})
    assert parse({"alerts": {"webhook": {**internal, "allowed_networks": ["10.2.0.0/16"]}}}).alerts.webhook is not None


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"rules": {"Nonsense": {}}}, "alerts.rules.Nonsense"),
        ({"rules": {"InferryWorkerDown": {"threshold": 1}}}, "alerts.rules.InferryWorkerDown.threshold"),
        ({"rules": {"InferryLatencyDrift": {"for_s": -1}}}, "alerts.rules.InferryLatencyDrift.for_s"),
        ({"rules": {"InferryLatencyDrift": {"thresh": 1}}}, "alerts.rules.InferryLatencyDrift.thresh"),
        ({"webhook": {**HOOK, "url": "http://hooks.example/"}}, "alerts.webhook.url"),
        ({"webhook": {**HOOK, "url": "https://127.0.0.1/"}}, "alerts.webhook.url"),
        ({"webhook": {**HOOK, "secret": "short"}}, "alerts.webhook.secret"),
        ({"webhook": {**HOOK, "secret": "whsec_QUJD"}}, "alerts.webhook.secret"),
        ({"webhook": {**HOOK, "allowed_networks": ["x"]}}, "alerts.webhook.allowed_networks[0]"),
        ({"webhook": {**HOOK, "timeout_s": 0}}, "alerts.webhook.timeout_s"),
        ({"webhook": {**HOOK, "ca_file": "/nowhere.pem"}}, "alerts.webhook.ca_file"),
    ],
)
def test_a_mistake_is_named_with_its_path(section: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"alerts": section})
    assert path in str(caught.value)
    assert "QUJD" not in str(caught.value)
