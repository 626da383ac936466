"""Calls the admin endpoints of a running gateway, for commands. Errors are printed and end the command."""

import http.client
import os
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import typer

from inferry.cli.config.environment import ADMIN_KEY
from inferry.cli.terminal import fail

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0

Url = Annotated[str, typer.Option("--url", help="URL of the gateway.")]
AdminKey = Annotated[
    str | None,
    typer.Option("--admin-key", help=f"Admin key; default: {ADMIN_KEY}, which process lists do not show."),
]


class GatewayProblem(Exception):
    """The gateway could not be asked. The message is for the operator."""


def ask(
    url: str,
    method: str,
    path: str,
    admin_key: str | None = None,
    *,
    body: dict[str, Any] | None = None,
    timeout_s: float | None = TIMEOUT_S,
) -> Any:
    """The gateway's JSON answer. Prints the problem and exits where there is none."""
    try:
        return ask_or_raise(url, method, path, admin_key, body=body, timeout_s=timeout_s)
    except GatewayProblem as problem:
        fail(str(problem), status=1)


def ask_or_raise(
    url: str,
    method: str,
    path: str,
    admin_key: str | None = None,
    *,
    body: dict[str, Any] | None = None,
    timeout_s: float | None = TIMEOUT_S,
) -> Any:
    """The gateway's JSON answer to a request, with `body` as JSON. Raises GatewayProblem."""
    connection = _connection(url, timeout_s)
    key = admin_key or os.environ.get(ADMIN_KEY)
    sent = None if body is None else msgspec.json.encode(body)
    try:
        connection.request(method, path, sent, {"authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        received = response.read()
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # UnicodeError: an impossible host name
        raise GatewayProblem(f"cannot reach {url}: {error}") from None
    except ValueError:
        raise GatewayProblem("the admin key has characters that no header may have") from None
    finally:
        connection.close()
    try:
        answer = msgspec.json.decode(received)
    except msgspec.DecodeError:
        answer = None
    if response.status != 200:
        problem = answer.get("error") if isinstance(answer, dict) else None
        message = problem.get("message") if isinstance(problem, dict) else None
        hint = f"; set {ADMIN_KEY} or --admin-key" if response.status == 403 else ""
        raise GatewayProblem(f"{message or f'{url} answered {response.status}'}{hint}")
    if not isinstance(answer, dict):
        raise GatewayProblem(f"{url} is not an Inferry gateway")
    return answer


def _connection(url: str, timeout_s: float | None) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            return kind(parts.hostname, parts.port, timeout=timeout_s)
    except (ValueError, http.client.InvalidURL):
        pass
    raise typer.BadParameter("must be of the form http://HOST:PORT", param_hint="--url")
