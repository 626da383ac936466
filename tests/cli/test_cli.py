"""The command line, as users and scripts call it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from inferry._version import __version__
from inferry.cli.config.loader import dump, parse
from inferry.cli.main import app

Command = Callable[..., Any]  # typer does not always name its result type


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    for name in ("INFERRY_LEDGER", "INFERRY_SERVER__PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, arguments)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """A configuration file with the given text."""

    def write(text: str) -> str:
        path = tmp_path / "inferry.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_the_version_is_printed(run: Command) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"inferry {__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command(run: Command, arguments: list[str]) -> None:
    text = run(*arguments).output
    assert all(name in text for name in ("serve", "check-config", "ledger"))


def test_an_unknown_command_is_an_error(run: Command) -> None:
    assert run("serf").exit_code == 2


# -- check-config ----------------------------------------------------------------------------------------------------


def test_check_config_without_a_file_prints_the_defaults(run: Command) -> None:
    result = run("check-config")
    assert result.exit_code == 0
    assert result.stdout == dump(parse({}))


@pytest.mark.parametrize("option", ["--config", "-c"])
def test_check_config_prints_what_it_read(run: Command, written: Callable[[str], str], option: str) -> None:
    result = run("check-config", option, written("server: {port: 9000}\n"))
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["server"]["port"] == 9000
    assert result.stderr == ""


def test_check_config_sees_the_environment(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERRY_SERVER__PORT", "9100")
    assert yaml.safe_load(run("check-config").stdout)["server"]["port"] == 9100


def test_check_config_warns_where_a_lane_may_preempt_one_that_is_not_preemptible(
    run: Command, written: Callable[[str], str]
) -> None:
    advice = "# lanes.P0.may_preempt names P1, whose jobs are not preempted until lanes.P1.preemptible is true"
    lines = run("check-config", "--config", written("lanes: {P0: {may_preempt: [P1, P2]}}\n")).stdout.splitlines()
    assert [line for line in lines if "may_preempt names" in line] == [advice]
    both = "lanes: {P0: {may_preempt: [P1]}, P1: {preemptible: true}}\n"
    assert "may_preempt names" not in run("check-config", "--config", written(both)).stdout
    assert "may_preempt names" not in run("check-config").stdout


def test_check_config_warns_where_only_some_workers_of_a_model_state_a_precision(
    run: Command, written: Callable[[str], str]
) -> None:
    def output(second: str) -> str:
        first = "{kind: vllm, name: a, url: 'http://h', models: [m], precision: bf16}"
        other = f"{{kind: vllm, name: b, url: 'http://i', models: [m]{second}}}"
        return str(run("check-config", "--config", written(f"workers: [{first}, {other}]\n")).stdout)

    assert "# some workers of model m state no precision" in output("")
    assert "state no precision" not in output(", precision: fp8")
    assert "state no precision" not in output(", pool: acme")


def test_check_config_prints_no_secret(run: Command, written: Callable[[str], str]) -> None:
    path = written("workers: [{kind: vllm, name: a, url: 'http://h', api_key: sk-secret}]\n")
    result = run("check-config", "--config", path)
    assert result.exit_code == 0
    assert "sk-secret" not in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: {prot: 1}", "unknown key `server.prot`; did you mean `port`?"),
        ("server: {port: many}", "server.port: Expected `int`, got `str`"),
        ("server: {port: 70000}", "server.port must be between 0 and 65535"),
        ("server: [", "is not valid YAML"),
        ("- a list", "the configuration must be a mapping of keys, not a list"),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_2(
    run: Command, written: Callable[[str], str], text: str, message: str
) -> None:
    result = run("check-config", "--config", written(text))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("inferry: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_secret_that_is_not_in_the_environment_is_named_with_its_place(
    run: Command, written: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THERE", "x")
    for name in ("GONE", "GONE_TOO"):
        monkeypatch.delenv(name, raising=False)
    hosted = "{kind: openai, name: b, url: 'https://h', api_keys: [$THERE, $GONE_TOO]}"
    path = written(f"workers: [{{kind: vllm, name: a, url: 'http://h', api_key: $GONE}}, {hosted}]\n")
    result = run("check-config", "--config", path)
    assert result.exit_code == 2
    assert "workers[0].api_key: the environment variable GONE is not set" in result.stderr
    assert "workers[1].api_keys[1]: the environment variable GONE_TOO is not set" in result.stderr
    assert "THERE is" not in result.stderr


@pytest.mark.parametrize("secret", ["sk-\u20ac", "sk-a\n", "two words", "sk-\udcff"])
@pytest.mark.parametrize("command", ["check-config", "serve"])
def test_a_secret_that_no_header_can_carry_is_an_error(
    run: Command, written: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, command: str, secret: str
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", secret)
    path = written("workers: [{kind: vllm, name: a, url: 'http://h', api_key: $UPSTREAM_KEY}]\nserver: {port: 0}\n")
    result = run(command, "--config", path)
    assert result.exit_code == 2
    assert "the environment variable UPSTREAM_KEY must be printable ASCII without spaces" in result.stderr
    assert "sk-" not in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_file_is_named(run: Command, tmp_path: Path) -> None:
    result = run("check-config", "--config", "nowhere.yaml")
    assert result.exit_code == 2
    assert "cannot read nowhere.yaml: No such file or directory" in result.stderr


def test_a_message_is_not_taken_for_markup(run: Command, written: Callable[[str], str]) -> None:
    result = run("check-config", "--config", written("'[red]x[/nonsense]': 1"))
    assert result.exit_code == 2
    assert "[red]x[/nonsense]" in result.stderr


# -- serve -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_serve_refuses_what_check_config_refuses(run: Command, written: Callable[[str], str], command: str) -> None:
    result = run(command, "--config", written("lanes: {P0: {share: 2}}"))
    assert result.exit_code == 2
    assert "lanes.P0.share must be at least 0 and below 1" in result.stderr


def test_serve_refuses_a_model_directory_that_is_none(run: Command, written: Callable[[str], str]) -> None:
    path = written("workers: [{kind: embedded, model: ./nowhere}]")
    result = run("serve", "--config", path, "--port", "0")
    assert result.exit_code == 2
    assert "nowhere is not a model directory (no config.json)" in result.stderr


def test_serve_refuses_an_address_it_cannot_listen_on(run: Command) -> None:
    result = run("serve", "--host", "192.0.2.1", "--port", "0")
    assert result.exit_code == 2
    assert "cannot serve" in result.stderr


def test_an_unknown_log_level_is_refused(run: Command) -> None:
    result = run("serve", "--log-level", "loud")
    assert result.exit_code == 2
    assert "--log-level must be one of debug, info, warning, error" in result.stderr


# -- ledger ----------------------------------------------------------------------------------------------------------


def test_the_ledger_is_found_through_the_configuration(run: Command, written: Callable[[str], str]) -> None:
    path = written("ledger: sqlite:///from-the-file.db")
    result = run("ledger", "runs", "--config", path)
    assert result.exit_code == 2
    assert "from-the-file.db" in result.stderr


def test_the_ledger_commands_refuse_a_bad_configuration(run: Command, written: Callable[[str], str]) -> None:
    result = run("ledger", "jobs", "--config", written("ledgr: x"))
    assert result.exit_code == 2
    assert "unknown key `ledgr`; did you mean `ledger`?" in result.stderr


# -- as a process ----------------------------------------------------------------------------------------------------


def test_as_a_process_a_bad_configuration_ends_it_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "inferry.yaml").write_text("servr: {}\n")
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", "inferry", "serve", "--config", "inferry.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == "inferry: unknown key `servr`; did you mean `server`?\n"
    assert [path.name for path in tmp_path.iterdir()] == ["inferry.yaml"], "nothing was made before it failed"
