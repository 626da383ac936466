"""`inferry alerts rules` prints the rules file, with the changes of a configuration."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from inferry.cli.main import app
from support.promtool import ROOT


def test_the_rules_are_those_of_the_deployed_file() -> None:
    done = CliRunner().invoke(app, ["alerts", "rules"])
    assert done.exit_code == 0
    assert done.stdout == (ROOT / "deploy" / "prometheus" / "inferry-rules.yaml").read_text()


def test_the_rules_have_the_changes_of_a_configuration(tmp_path: Path) -> None:
    config = tmp_path / "inferry.yaml"
    config.write_text("alerts: {rules: {InferryWorkerDown: {for_s: 300}, InferryLedgerDown: {enabled: false}}}")
    done = CliRunner().invoke(app, ["alerts", "rules", "--config", str(config)])
    rules = {rule["alert"]: rule for rule in yaml.safe_load(done.stdout)["groups"][0]["rules"]}
    assert rules["InferryWorkerDown"]["for"] == "5m"
    assert "InferryLedgerDown" not in rules


def test_a_webhook_whose_secret_is_not_set_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "inferry.yaml"
    config.write_text("alerts: {webhook: {url: 'https://hooks.example/', secret: $NO_SUCH_SECRET}}")
    monkeypatch.delenv("NO_SUCH_SECRET", raising=False)
    done = CliRunner().invoke(app, ["check-config", "--config", str(config)])
    assert done.exit_code == 2
    assert "alerts.webhook.secret: the environment variable NO_SUCH_SECRET is not set" in done.output
