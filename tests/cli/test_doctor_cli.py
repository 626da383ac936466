"""`inferry doctor` and `inferry top` against a running gateway."""

import http.server
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from inferry.cli import doctor as doctor_module
from inferry.cli.main import app
from inferry.cli.top import render
from inferry.observe.diagnosis.diagnose import diagnose
from inferry.observe.diagnosis.findings import Diagnosis
from observe.diagnosis_facts import a_lane, a_worker, some_facts
from support.quiet_machine import a_quiet_machine
from support.scripted_gateway import ScriptedGateway
from support.serving import closed_port_url, post

KEY = "correct-horse-battery-staple"
CANARY = "canary-5d1c-not-to-be-seen"


def inferry(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160", **(env or {})})
    return result.exit_code, result.output


def shown(found: Diagnosis) -> str:
    text = io.StringIO()
    doctor_module.show(found, Console(width=120, color_system=None, file=text))
    return text.getvalue()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedGateway]:
    config = {"server": {"admin_key": KEY}}
    with a_quiet_machine(), ScriptedGateway(tmp_path_factory.mktemp("doctor"), config) as gateway:
        body = {"model": "m", "messages": [{"role": "user", "content": CANARY}]}
        for _ in range(3):
            assert post(gateway.url, "/v1/chat/completions", body)[0] == 200
        yield gateway


@pytest.mark.parametrize("command", [("doctor",), ("top", "--once"), ("top",)])
def test_the_commands_talk_to_a_running_gateway(gateway: ScriptedGateway, command: tuple[str, ...]) -> None:
    code, text = inferry(*command, "--url", gateway.url, env={"INFERRY_ADMIN_KEY": KEY})
    assert code == 0, text
    assert "ot enough data" in text
    assert CANARY not in text
    assert "\x1b" not in text
    assert inferry(*command, "--url", gateway.url, "--admin-key", KEY)[0] == 0


def test_doctor_prints_the_diagnosis_as_json(gateway: ScriptedGateway) -> None:
    code, text = inferry("doctor", "--json", "--window", "30s", "--url", gateway.url, "--admin-key", KEY, "--check")
    assert code == 0
    assert (json.loads(text)["verdict"], json.loads(text)["window_s"]) == ("not_enough_data", 30.0)
    assert CANARY not in text


@pytest.mark.parametrize("command", ["doctor", "top"])
def test_what_is_wrong_with_the_gateway_is_said_in_one_line(gateway: ScriptedGateway, command: str) -> None:
    code, text = inferry(command, "--url", gateway.url)
    assert (code, "need the admin key" in text, "INFERRY_ADMIN_KEY" in text) == (1, True, True)
    with closed_port_url() as url:
        code, text = inferry(command, "--url", url)
        assert (code, "cannot reach" in text) == (1, True)
    assert inferry(command, "--url", "nonsense")[0] == 2
    assert inferry(command, "--url", gateway.url, "--admin-key", "a\nb")[0] == 1
    with a_server(b'{"hello": 1}') as url:
        code, text = inferry(command, "--url", url)
        assert (code, "is no Inferry gateway of this release" in text) == (1, True)
    with a_server(b"[]") as url:
        assert inferry(command, "--url", url)[0] == 1


def test_doctor_shows_cause_evidence_setting_split_and_advice() -> None:
    facts = some_facts(
        lanes=(a_lane("P1", calls=500, wait_p95_ms=9000.0, attainment=0.2, measured=500, depth=80.0),),
        workers=(a_worker("gpu[bold]\x1b[31m", sequences=2, running=2.0),),
    )
    text = shown(diagnose(facts, 0.0))
    assert "Problem: starved_gpu (queue) at worker gpu[bold]·[31m" in text
    assert "p95 queue wait of lane P1: 9.00 s (compare 2.00 s)" in text
    assert ".max_sequences: 16 (now 2)" in text
    assert "from the last 1m00" in text
    assert "batching mode: continuous" in text
    assert "\x1b" not in text


def test_a_problem_has_an_exit_status_of_its_own_if_asked(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = diagnose(some_facts(workers=(a_worker(phase="down"),)), 0.0)
    monkeypatch.setattr(doctor_module, "fetch_diagnosis", lambda *_: found)
    assert inferry("doctor")[0] == 0
    code, text = inferry("doctor", "--check")
    assert (code, "dead_worker" in text) == (3, True)


def test_top_shows_lanes_workers_tenants_and_alerts(tmp_path: Path) -> None:
    lane = a_lane("P0", calls=100, calls_per_s=12.5, depth_now=7, attainment=0.971, measured=100, ttft_ms=500.0)
    found = diagnose(some_facts(lanes=(lane,), workers=(a_worker("w", utilisation=0.37),)), 0.0, alerts=2)
    with (tmp_path / "out").open("w") as file:
        out = Console(width=140, color_system=None, file=file)
        out.print(render(found, "http://gateway"))
    text = (tmp_path / "out").read_text()
    for part in ("2 alerts", "12.5", "97.1%", "500ms + 50ms/token", "37%", "ready"):
        assert part in text
    assert msgspec.convert(msgspec.to_builtins(found), type(found)) == found


@contextmanager
def a_server(body: bytes) -> Iterator[str]:
    """A server that answers everything with this."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("command", [("doctor",), ("top", "--once")])
@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://[::1", "http://exa mple:1"])
def test_an_address_that_is_none_is_named(command: tuple[str, ...], url: str) -> None:
    code, text = inferry(*command, "--url", url)
    assert (code, "http://HOST:PORT" in text) == (2, True), text


def test_a_host_name_that_cannot_exist_is_not_reached() -> None:
    code, text = inferry("doctor", "--url", f"http://{'a' * 300}:1", "--admin-key", KEY)
    assert (code, "cannot reach" in text) == (1, True), text
