"""The compose file: files exist, secrets have no default, and the gateways accept their configuration."""

import re
from pathlib import Path
from typing import Any

import yaml

from inferry.cli.config.loader import parse
from support.promtool import promtool, write_yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER = DEPLOY / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
GATEWAYS = ("gateway-1", "gateway-2")
VARIABLE = re.compile(r"\$\{(\w+)([^}]*)\}")


def test_every_service_is_there() -> None:
    assert set(SERVICES) == {*GATEWAYS, "postgres", "redis", "prometheus", "grafana"}


def test_mounted_files_and_the_build_context_exist() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", ())]
    files = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]
    assert len(files) >= 6
    for file in files:
        assert (FOLDER / file).exists(), file
    named = {mount.split(":")[0] for mount in mounts if not mount.startswith(".")}
    assert named == set(COMPOSE["volumes"])
    assert (FOLDER / SERVICES["gateway-1"]["build"]["context"] / "Dockerfile").is_file()


def test_a_secret_that_is_not_set_is_an_error() -> None:
    text = (FOLDER / "compose.yaml").read_text()
    used = VARIABLE.findall(text)
    assert all(rest.startswith(":?") for _, rest in used)
    example = dict(line.split("=") for line in (FOLDER / "env.example").read_text().splitlines() if "=" in line)
    assert set(example) == {name for name, _ in used}
    assert not any(example.values())


def test_the_gateways_accept_their_configuration() -> None:
    raw = yaml.safe_load((FOLDER / "inferry.yaml").read_text())
    advertised = set()
    for name in GATEWAYS:
        environment = {
            key: VARIABLE.sub(lambda found: f"{found[1].lower()}-16-characters", value)
            for key, value in SERVICES[name]["environment"].items()
        }
        config = parse(raw, environment)
        assert config.cluster.name == name
        assert config.cluster.advertise == f"{name}:8100"
        assert config.cluster.secret_env in environment
        assert config.auth.mode == "on"
        assert "@postgres/" in config.ledger
        assert "@redis:" in (config.cluster.redis or "")
        advertised.add(config.cluster.advertise)
        stop_s = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
        assert stop_s >= config.server.drain_timeout_s + 30
    assert len(advertised) == 2


def test_ports_are_published_on_this_host_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(published) == 4
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_images_have_versions() -> None:
    images = [service["image"] for name, service in SERVICES.items() if name not in GATEWAYS]
    assert all(re.fullmatch(r"[\w/.-]+:v?\d[\w.-]*", image) for image in images)


def test_prometheus_scrapes_both_gateways_with_the_alert_rules(tmp_path: Path) -> None:
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == [f"{name}:8000" for name in GATEWAYS]
    assert any(mount.endswith(f":{config['rule_files'][0]}:ro") for mount in SERVICES["prometheus"]["volumes"])
    config["rule_files"] = [str(DEPLOY / "prometheus" / "inferry-rules.yaml")]
    promtool("check", "config", write_yaml(tmp_path / "prometheus.yaml", config))


def test_grafana_has_the_data_source_and_the_dashboards() -> None:
    (source,) = yaml.safe_load((FOLDER / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (other,) = yaml.safe_load((DEPLOY / "monitoring/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["uid"] == other["uid"]
    (provider,) = yaml.safe_load((DEPLOY / "monitoring/provisioning/dashboards/inferry.yaml").read_text())["providers"]
    assert any(mount.endswith(f":{provider['options']['path']}:ro") for mount in SERVICES["grafana"]["volumes"])
    assert "GF_AUTH_ANONYMOUS_ENABLED" not in SERVICES["grafana"]["environment"]
