"""The systemd units. `systemd-analyze` checks them where it is installed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inferry.cli.config.loader import parse
from inferry.cli.terminal import USAGE_ERROR

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
PROGRAM = "/opt/inferry/bin/inferry"
MAX_EXPOSURE = 2.5
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def settings(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (FOLDER / name).read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            key, is_setting, value = line.partition("=")
            assert is_setting, line
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """The units with a program that exists on this machine."""
    found = []
    for name in ("inferry.service", "inferry.socket"):
        path = tmp_path / name
        path.write_text((FOLDER / name).read_text().replace(PROGRAM, f"{sys.executable} -m inferry"))
        found.append(path)
    return found


@needs_systemd
def test_systemd_accepts_the_units(units: list[Path]) -> None:
    found = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=120)
    complaints = [line for line in found.stderr.splitlines() if "inferry" in line]
    assert not complaints
    assert found.returncode == 0, found.stderr


@needs_systemd
def test_the_service_is_sandboxed(units: list[Path]) -> None:
    command = ["systemd-analyze", "security", "--offline=true", str(units[0])]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", found.stdout)
    assert exposure is not None, found.stderr
    assert float(exposure[1]) <= MAX_EXPOSURE


def test_the_service_waits_for_the_drain_and_for_the_state_that_the_gateway_reports() -> None:
    service = settings("inferry.service")
    assert service["Type"] == ["notify"]
    assert service["KillMode"] == ["mixed"]
    assert float(service["TimeoutStopSec"][0]) >= parse({}).server.drain_timeout_s + 30
    assert service["RestartPreventExitStatus"] == [str(USAGE_ERROR)]
    assert service["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


def test_the_socket_is_the_default_port_of_the_gateway() -> None:
    server = parse({}).server
    assert settings("inferry.socket")["ListenStream"] == [f"{server.host}:{server.port}"]
