"""Workers from the command line and from a watched file."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from inferry.cli.config.loader import load_workers, parse, parse_workers
from inferry.cli.config.schema import ConfigError
from inferry.cli.main import app
from support.scripted_gateway import ScriptedGateway
from support.serving import Serving, get
from support.waiting import until

KEY = "correct-horse-battery-staple"


def inferry(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", **(env or {})})
    return result.exit_code, result.output


def test_a_worker_is_listed_drained_and_readmitted(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        code, shown = inferry("workers", "list", "--url", gateway.url)
        assert code == 0
        assert "scripted" in shown
        assert "ready" in shown
        code, shown = inferry("workers", "drain", "scripted", "--url", gateway.url, "--json")
        assert code == 0
        assert msgspec.json.decode(shown)[0]["phase"] == "draining"
        code, shown = inferry("workers", "readmit", "scripted", "--url", gateway.url)
        assert "ready" in shown
        code, shown = inferry("workers", "drain", "no/body", "--url", gateway.url)
        assert code == 1
        assert "there is no worker `no/body`; workers of this gateway: `scripted`" in shown


def test_the_key_comes_from_the_environment(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, {"server": {"admin_key": KEY}}) as gateway:
        code, shown = inferry("workers", "list", "--url", gateway.url)
        assert (code, "admin key" in shown) == (1, True)
        assert inferry("workers", "list", "--url", gateway.url, env={"INFERRY_ADMIN_KEY": KEY})[0] == 0


def test_an_unreachable_gateway_is_reported() -> None:
    code, shown = inferry("workers", "list", "--url", "http://127.0.0.1:1")
    assert (code, "cannot reach" in shown) == (1, True)
    assert inferry("workers", "list", "--url", "nonsense")[0] == 2


def test_the_admin_key_may_come_from_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    assert parse({}, {"INFERRY_ADMIN_KEY": "1234567890123456"}).server.admin_key == "1234567890123456"
    with pytest.raises(ConfigError, match="at least 16"):
        parse({}, {"INFERRY_ADMIN_KEY": "short"})
    code, shown = inferry("check-config", env={"INFERRY_ADMIN_KEY": KEY})
    assert (code, KEY in shown, "admin_key: '***'" in shown) == (0, False, True)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "must be a list of workers"),
        ("workers: []", "must be a list of workers"),
        ("- {kind: vllm, name: a, url: 'http://h:1'}\n- {kind: vllm, name: b, ulr: x}", r"workers\[1\]\.ulr"),
        ("- {kind: vllm, name: a, url: 'http://h:1'}\n- {kind: vllm, name: a, url: 'http://h:2'}", "is used by"),
        ("- {kind: vllm, name: a, url: nonsense}", r"workers\[0\]\.url"),
        ("- {kind: [", "not valid YAML"),
        ("- {kind: steam, name: a}", "kind"),
    ],
)
def test_a_workers_file_is_checked_like_the_configuration(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint) as error:
        load_workers(path)
    assert str(path) in str(error.value)


def test_an_empty_workers_file_does_not_start_the_default_worker() -> None:
    assert parse_workers(b"[]") == ()
    assert parse({"workers_file": "w.yaml"}).workers == ()
    assert len(parse({"workers_file": "w.yaml", "workers": [{"kind": "embedded"}]}).workers) == 1
    assert parse({}, {"INFERRY_WORKERS_FILE": "w.yaml"}).workers_file == "w.yaml"


def test_check_config_reads_the_workers_file_too(tmp_path: Path) -> None:
    config, workers = tmp_path / "inferry.yaml", tmp_path / "workers.yaml"
    config.write_text(f"workers_file: {workers}\nworkers: [{{kind: embedded, name: local}}]\n")
    assert inferry("check-config", "--config", str(config))[0] == 2
    workers.write_text("- {kind: vllm, name: gpu, url: 'http://h:1'}\n")
    code, shown = inferry("check-config", "--config", str(config))
    assert (code, "gpu (vllm)" in shown) == (0, True)
    workers.write_text("- {kind: vllm, name: local, url: 'http://h:1'}\n")
    code, shown = inferry("check-config", "--config", str(config))
    assert (code, "local" in shown) == (2, True)


def test_a_gateway_follows_its_workers_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over real sockets: a gateway is the worker of another."""
    monkeypatch.setattr("inferry.dispatch.workers_file.POLL_INTERVAL_S", 0.05)
    workers = tmp_path / "workers.yaml"
    with ScriptedGateway(tmp_path, models=("m",)) as engine:
        entry = f"- {{kind: openai, name: NAME, url: '{engine.url}', models: [m]}}\n"
        workers.write_text(entry.replace("NAME", "first"))

        class Watching(Serving):
            def __enter__(self) -> "Watching":
                super().__enter__()
                assert self.service.watch is not None
                self._loop.call_soon_threadsafe(self.service.watch.start)
                return self

            def __exit__(self, *error: object) -> None:
                assert self.service.watch is not None
                self.run(self.service.watch.close())
                super().__exit__(None, None, None)

        directory = tmp_path / "front"
        directory.mkdir()
        with Watching(directory, config={"workers_file": str(workers)}) as front:

            def phases() -> dict[str, str]:
                found: dict[str, str] = get(front.url, "/ready")[2]["workers"]
                return found

            assert phases() == {"first": "ready"}
            workers.write_text(entry.replace("NAME", "first") + entry.replace("NAME", "second"))
            until(lambda: phases() == {"first": "ready", "second": "ready"}, problem=lambda: "the second comes")
            assert 'inferry_worker_up{worker="second"} 1.0' in get(front.url, "/metrics")[2]
            workers.write_text("- nonsense")
            until(lambda: "workers are unchanged" in caplog.text, problem=lambda: "it is said that the file is no use")
            assert set(phases()) == {"first", "second"}
            workers.write_text(entry.replace("NAME", "second"))
            until(lambda: phases() == {"second": "ready"}, problem=lambda: "the first goes")
            assert 'worker="first"' not in get(front.url, "/metrics")[2]
