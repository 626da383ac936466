"""Every query of the Grafana dashboards parses, and names metrics and labels that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from inferry.cli import deploy_files
from inferry.cli.config.loader import parse
from inferry.observe.metric_table import METRIC_TABLE
from inferry.observe.metrics import Metrics
from support.promtool import ROOT, promtool, write_yaml

DEPLOY = ROOT / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
OF_PROMETHEUS = {"instance", "job", "le"}


def known_metrics() -> dict[str, set[str]]:
    """Labels by the name of a series."""
    found: dict[str, set[str]] = {}
    for spec in METRIC_TABLE:
        for suffix in ("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",):
            found[spec.name + suffix] = set(spec.labels)
    process = re.findall(r"^# TYPE (process_\w+) ", Metrics([], []).render()[0].decode(), re.MULTILINE)
    return found | {name: set() for name in process}


def queries() -> Iterator[tuple[str, str, str]]:
    """(dashboard, panel, query) with Grafana's variables replaced."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
                assert "$" not in query
                yield path.stem, panel["title"], query


def test_the_files_are_current() -> None:
    for name, text in deploy_files.files().items():
        assert (DEPLOY / name).read_text() == text, f"{name} is stale, run `make docs`"
    assert {path.name for path in DASHBOARDS} == {
        Path(name).name for name in deploy_files.files() if name.endswith(".json")
    }


def test_every_query_is_accepted_by_prometheus(tmp_path: Path) -> None:
    rules = [{"record": f"query:number{number}", "expr": query} for number, (*_, query) in enumerate(queries())]
    path = write_yaml(tmp_path / "queries.yaml", {"groups": [{"name": "queries", "rules": rules}]})
    assert f"{len(rules)} rules found" in promtool("check", "rules", path)
    assert len(rules) > 60


@pytest.mark.parametrize(("dashboard", "panel", "query"), list(queries()))
def test_a_query_names_metrics_and_labels_that_exist(dashboard: str, panel: str, query: str) -> None:
    known = known_metrics()
    names = re.findall(r"\b((?:inferry|process)_\w+)", query)
    assert names
    for name in names:
        assert name in known, name
    for name, matchers in re.findall(r"\b((?:inferry|process)_\w+)\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)=~?\"", matchers)) <= known[name] | OF_PROMETHEUS
    grouped = re.findall(r"\bby \(([^)]*)\) \((?:rate\()?(\w+)", query)
    assert len(grouped) == query.count("by (")
    for labels, name in grouped:
        assert {one.strip() for one in labels.split(",")} <= known[name] | OF_PROMETHEUS


def test_every_series_that_a_panel_names_by_a_label_has_that_label() -> None:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                    assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), (path.stem, panel["title"])


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in dashboard["panels"]]
        assert len(set(places)) == len(places)
        assert all(one["gridPos"]["x"] + one["gridPos"]["w"] <= 24 for one in dashboard["panels"])
        assert len({one["id"] for one in dashboard["panels"]}) == len(places)
    assert len({json.loads(path.read_text())["uid"] for path in DASHBOARDS}) == len(DASHBOARDS)


# -- Prometheus and Grafana in containers ----------------------------------------------------------------------------


def test_the_configuration_of_prometheus_is_accepted(tmp_path: Path) -> None:
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yaml").read_text())
    assert config["rule_files"] == ["/etc/prometheus/inferry-rules.yaml"]
    config["rule_files"] = [str(DEPLOY / "prometheus" / "inferry-rules.yaml")]
    promtool("check", "config", write_yaml(tmp_path / "prometheus.yaml", config))


def test_the_containers_mount_files_that_exist() -> None:
    folder = DEPLOY / "monitoring"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    mounts = [mount for service in compose["services"].values() for mount in service.get("volumes", ())]
    files = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]
    assert len(files) >= 4
    for file in files:
        assert (folder / file).exists(), file
    assert set(compose["services"]) == {"prometheus", "grafana"}


def test_the_gateway_that_the_containers_scrape_is_the_default_one() -> None:
    config = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yaml").read_text())
    (scrape,) = config["scrape_configs"]
    (target,) = scrape["static_configs"][0]["targets"]
    assert target.rpartition(":")[2] == str(parse({}).server.port)
