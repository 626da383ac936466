"""`inferry observe` on an address that it cannot use."""

import socket
from pathlib import Path

from typer.testing import CliRunner

from inferry.cli.main import app


def observe(directory: Path, *options: str) -> tuple[int, str]:
    database = f"sqlite:///{directory / 'observed.db'}"
    arguments = ["observe", "--upstream", "http://127.0.0.1:9", "--database", database, *options]
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_a_port_in_use_is_an_error_as_of_serve(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = observe(tmp_path, "--port", str(port))
    assert said == (2, f"inferry: cannot serve on 127.0.0.1 port {port}: Address already in use\n")
    assert not list(tmp_path.iterdir()), "no database was made"


def test_a_host_that_is_no_address_is_an_error(tmp_path: Path) -> None:
    status, said = observe(tmp_path, "--host", "a b")
    assert status == 2
    assert "--host is not a host name or address" in said
