"""Alert rules: the same situations in the gateway and in Prometheus, and the life of an alert."""

import re
from pathlib import Path

import pytest
import yaml

from inferry.cli.alerts import rules_file
from inferry.cli.config.alerts import AlertRuleConfig, AlertsConfig
from inferry.observe.alert_expressions import metrics_of
from inferry.observe.alert_states import AlertStates
from inferry.observe.alerts import ALERT_RULES
from inferry.observe.history import KEPT_S, MetricHistory, SeriesReading
from inferry.observe.metric_table import METRIC_TABLE
from observe.alert_scenarios import SCENARIOS, STEP_S, Firing, Scenario
from support.promtool import ROOT, promtool, write_yaml

FILE = ROOT / "deploy" / "prometheus" / "inferry-rules.yaml"


class Replay:
    """A metric source that gives the values of a scenario, one step after the other."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.step = 0

    def readings(self) -> list[SeriesReading]:
        return self._scenario.readings(self.step)


def firing_by_minute(scenario: Scenario) -> dict[float, Firing]:
    source = Replay(scenario)
    history = MetricHistory(source)
    states = AlertStates(ALERT_RULES, history)
    found: dict[float, Firing] = {}
    for step in range(int(max(scenario.expected) * 60 // STEP_S) + 1):
        source.step = step
        history.sample(step * STEP_S)
        states.evaluate(step * STEP_S, step * STEP_S)
        firing = [one for one in states.active if one.state == "firing"]
        found[step * STEP_S / 60] = frozenset(
            (one.rule.name, ",".join(f'{name}="{value}"' for name, value in one.labels)) for one in firing
        )
    return found


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_the_gateway_fires_what_the_situation_calls_for(scenario: Scenario) -> None:
    found = firing_by_minute(scenario)
    assert {minute: found[minute] for minute in scenario.expected} == scenario.expected


def test_prometheus_fires_the_same(tmp_path: Path) -> None:
    severities = {rule.name: rule.severity for rule in ALERT_RULES}
    tests = [
        {
            "name": scenario.name,
            "interval": f"{STEP_S}s",
            "input_series": [
                {"series": series, "values": " ".join(f"{value:g}" for value in scenario.values(series))}
                for series in scenario.series
            ],
            "promql_expr_test": [
                {
                    "expr": 'ALERTS{alertstate="firing"}',
                    "eval_time": f"{int(minute * 60)}s",
                    "exp_samples": [
                        {"labels": _alert_series(name, severities[name], labels), "value": 1} for name, labels in firing
                    ],
                }
                for minute, firing in scenario.expected.items()
            ],
        }
        for scenario in SCENARIOS
    ]
    content = {"rule_files": [str(FILE)], "evaluation_interval": f"{STEP_S}s", "tests": tests}
    promtool("test", "rules", write_yaml(tmp_path / "tests.yaml", content))


def _alert_series(name: str, severity: str, labels: str) -> str:
    inner = ",".join(filter(None, (f'alertname="{name}",alertstate="firing",severity="{severity}"', labels)))
    return f"ALERTS{{{inner}}}"


def test_every_rule_has_a_situation_in_which_it_fires() -> None:
    fired = {name for scenario in SCENARIOS for firing in scenario.expected.values() for name, _ in firing}
    assert fired == {rule.name for rule in ALERT_RULES}


# -- the rules file --------------------------------------------------------------------------------------------------


def test_the_rules_file_is_current() -> None:
    assert FILE.read_text() == rules_file(AlertsConfig()), "run `make docs`"


def test_the_rules_file_is_accepted_by_prometheus() -> None:
    assert f"{len(ALERT_RULES)} rules found" in promtool("check", "rules", FILE)


def test_rules_with_changes_are_accepted_by_prometheus(tmp_path: Path) -> None:
    changes = {
        rule.name: AlertRuleConfig(for_s=7, threshold=rule.threshold and 2 * rule.threshold) for rule in ALERT_RULES
    }
    changes["InferryLedgerDown"] = AlertRuleConfig(enabled=False)
    path = tmp_path / "rules.yaml"
    path.write_text(rules_file(AlertsConfig(rules=changes)))
    assert f"{len(ALERT_RULES) - 1} rules found" in promtool("check", "rules", path)
    (group,) = yaml.safe_load(path.read_text())["groups"]
    assert {rule["for"] for rule in group["rules"]} == {"7s"}
    assert "> 1.5" in group["rules"][1]["expr"]


def test_rules_read_metrics_that_exist_and_no_more_time_than_is_kept() -> None:
    known = {spec.name for spec in METRIC_TABLE}
    for rule in ALERT_RULES:
        assert metrics_of(rule.expression) <= known, rule.name
        for window, offset in re.findall(r"\[(\d+)m\](?: offset (\d+)m)?", rule.expression.promql()):
            assert 60 * (int(window) + int(offset or 0)) <= KEPT_S


# -- the life of an alert --------------------------------------------------------------------------------------------


class Source:
    def __init__(self) -> None:
        self.burn = {"day": 0.0, "month": 0.0}

    def readings(self) -> list[SeriesReading]:
        return [SeriesReading("inferry_budget_burn_ratio", (("period", key),), one) for key, one in self.burn.items()]


def test_an_alert_is_pending_then_fires_once_and_is_resolved_once() -> None:
    source = Source()
    history = MetricHistory(source)
    (rule,) = [rule._replace(for_s=60.0) for rule in ALERT_RULES if rule.name == "InferryBudgetBurn"]
    states = AlertStates((rule,), history, {rule.name: lambda labels: {"tenant": f"acme-{labels['period']}"}})

    def step(at: float, **burn: float) -> list[tuple[str, str]]:
        source.burn |= burn
        history.sample(at)
        return [(dict(one.labels)["period"], one.state) for one in states.evaluate(at, 1000.0 + at)]

    assert step(0) == []
    assert states.active == []
    assert step(5, day=2.0) == []
    assert [one.state for one in states.active] == ["pending"]
    assert step(60) == []
    assert step(65, day=3.0) == [("day", "firing")]
    assert step(70, month=9.0) == []
    first, second = states.active
    assert first.object() == {
        "name": "InferryBudgetBurn",
        "severity": "warning",
        "state": "firing",
        "since": 1005.0,
        "summary": "A tenant or key spends its budget of the day 3 times as fast as the day passes.",
        "value": 3.0,
        "labels": {"period": "day", "tenant": "acme-day"},
    }
    assert (second.state, second.labels) == ("pending", (("period", "month"),))
    assert states.counts() == {
        ("InferryBudgetBurn", "warning", "pending"): 1,
        ("InferryBudgetBurn", "warning", "firing"): 1,
    }
    assert step(75, month=0.0) == [], "an alert that was only pending ends without a word"
    assert step(80, day=0.0) == [("day", "resolved")]
    assert states.active == []
    assert step(85, day=2.0) == []
    assert states.active[0].since == 1085.0, "a new alert begins anew"


def test_a_clock_that_is_set_forward_makes_no_alert_fire() -> None:
    source = Source()
    history = MetricHistory(source)
    states = AlertStates(ALERT_RULES, history)
    source.burn["day"] = 9.0
    history.sample(0.0)
    assert states.evaluate(0.0, 1000.0) == []
    assert states.evaluate(5.0, 90_000.0) == []
    assert [one.state for one in states.active] == ["pending"]
