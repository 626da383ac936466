"""Mistakes on the command line and unusable ledgers give one sentence and exit code 2, no traceback."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferry.cli.main import app
from inferry.domain.ledger import LedgerLocked
from inferry.ledger.stores.file_lock import exclusive_use, lock_file
from inferry.ledger.stores.sqlite_open import open_for_writing

Command = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    for name in ("INFERRY_LEDGER", "INFERRY_SERVER__PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, env=None: CliRunner().invoke(app, arguments, env=env)


def is_plain(result: Any) -> bool:
    return result.exit_code == 2 and isinstance(result.exception, SystemExit) and "Traceback" not in result.output


# -- where to listen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("port", ["99999", "-1", "65536", "1.5", "http"])
def test_an_invalid_port_is_a_usage_error(run: Command, port: str) -> None:
    result = run("serve", "--port", port)
    assert is_plain(result)
    assert "--port" in result.stderr


@pytest.mark.parametrize("host", ["a..b", "no-such-host.invalid", "", "a b", "http://127.0.0.1"])
def test_an_unknown_host_is_an_error(run: Command, host: str) -> None:
    result = run("serve", "--host", host, "--port", "0")
    assert is_plain(result)
    assert "host" in result.stderr


def test_a_port_in_use_is_an_error_that_names_it(run: Command) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run("serve", "--port", port)
    assert is_plain(result)
    assert port in result.stderr
    assert "in use" in result.stderr


# -- ledgers in memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("keys", "create", "--tenant", "acme"),
        ("keys", "list"),
        ("keys", "revoke", "k"),
        ("tenants", "list"),
        ("ledger", "runs"),
        ("ledger", "jobs"),
    ],
)
@pytest.mark.parametrize("ledger", ["sqlite:///:memory:", "sqlite:///", "sqlite://"])
def test_a_command_on_an_in_memory_ledger_suggests_a_file(run: Command, command: tuple[str, ...], ledger: str) -> None:
    result = run(*command, env={"INFERRY_LEDGER": ledger})
    assert is_plain(result)
    assert "ledger" in result.stderr
    assert "sqlite:///inferry.db" in result.stderr


def test_a_key_needs_a_tenant(run: Command) -> None:
    result = run("keys", "create", "--ledger", "sqlite:///:memory:")
    assert is_plain(result)
    assert result.stdout == ""


# -- one gateway per ledger ------------------------------------------------------------------------------------------


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the ledger in tmp_path, and says so."""
    code = (
        "import sys\n"
        "from inferry.ledger.stores.file_lock import exclusive_use\n"
        f"with exclusive_use('sqlite:///{tmp_path}/inferry.db'):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_gateway_on_one_ledger_is_refused_with_the_pid_of_the_first(
    run: Command, holder: "subprocess.Popen[str]"
) -> None:
    result = run("serve", "--port", "0")
    assert is_plain(result)
    assert f"process {holder.pid}" in result.stderr
    assert "inferry.db" in result.stderr


def test_keys_can_be_made_while_a_gateway_holds_the_ledger(run: Command, holder: "subprocess.Popen[str]") -> None:
    assert run("keys", "create", "--tenant", "acme").exit_code == 0
    assert run("ledger", "runs").exit_code == 0


def test_a_killed_gateway_releases_its_ledger(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    url = f"sqlite:///{tmp_path}/inferry.db"
    with pytest.raises(LedgerLocked), exclusive_use(url):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with exclusive_use(url):
        assert lock_file(url).read_text() == f"{os.getpid()}\n"
    with exclusive_use(url):
        pass


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("is_empty", [True, False])
def test_two_names_of_one_database_have_one_lock(
    tmp_path: Path, link: Callable[[Path, Path], None], is_empty: bool
) -> None:
    (tmp_path / "inferry.db").touch()
    if not is_empty:
        open_for_writing(f"sqlite:///{tmp_path}/inferry.db").dispose()
    link(tmp_path / "inferry.db", tmp_path / "other.db")
    with (
        exclusive_use(f"sqlite:///{tmp_path}/inferry.db"),
        pytest.raises(LedgerLocked),
        exclusive_use(f"sqlite:///{tmp_path}/other.db"),
    ):
        pass


def test_a_hard_link_to_the_ledger_of_a_gateway_is_refused(
    run: Command, tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    os.link(tmp_path / "inferry.db", tmp_path / "other.db")
    (tmp_path / "inferry.yaml").write_text("ledger: sqlite:///other.db\n")
    result = run("serve", "--port", "0", "--config", "inferry.yaml")
    assert is_plain(result)
    assert "another process already uses this ledger" in result.stderr
    assert "other.db)" in result.stderr


def test_the_lock_leaves_those_of_sqlite_alone(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    """While a gateway holds its lock, other processes write."""
    engine = open_for_writing(f"sqlite:///{tmp_path}/inferry.db")
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = DELETE")
        connection.exec_driver_sql("BEGIN EXCLUSIVE")
        connection.exec_driver_sql("CREATE TABLE more (id INTEGER)")
        connection.commit()
    engine.dispose()


def test_gateways_in_memory_do_not_lock_each_other_out() -> None:
    with exclusive_use("sqlite:///:memory:"), exclusive_use("sqlite:///:memory:"):
        pass


def test_a_child_of_the_gateway_does_not_keep_the_lock(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/inferry.db"
    with exclusive_use(url):
        child = subprocess.Popen(
            [sys.executable, "-c", "print('up', flush=True); input()"],
            close_fds=False,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
    try:
        with exclusive_use(url):
            assert child.poll() is None
    finally:
        child.kill()
        child.communicate()
