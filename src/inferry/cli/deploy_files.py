"""The generated files under `deploy/`: `python -m inferry.cli.deploy_files` writes them.

Each is a pure function of the code: the Prometheus rules of the alert table, and the Grafana dashboards.
"""

import json
import sys
from pathlib import Path

from inferry.cli.alerts import rules_file
from inferry.cli.checkout import ROOT
from inferry.cli.config.alerts import AlertsConfig
from inferry.cli.grafana import DASHBOARDS, dashboard_json

DEPLOY = ROOT / "deploy"


def files() -> dict[str, str]:
    """The generated files by path below `deploy/`."""
    dashboards = {
        f"grafana/{one.name}.json": json.dumps(dashboard_json(one), indent=2, ensure_ascii=False) + "\n"
        for one in DASHBOARDS
    }
    return {"prometheus/inferry-rules.yaml": rules_file(AlertsConfig()), **dashboards}


def write(directory: Path) -> None:
    for name, text in files().items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(DEPLOY)
    sys.exit(0)
