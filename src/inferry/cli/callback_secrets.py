"""`inferry callback-secrets`: secrets that sign callbacks of async jobs, in the ledger's database.

The commands need no running gateway; a running one signs its next callback with the new secret.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from inferry.cli.config.loader import load
from inferry.cli.config.schema import ConfigError
from inferry.cli.formats import parse_lifetime
from inferry.cli.job_wiring import open_callback_secrets
from inferry.cli.keys import ConfigFile, Json, Ledger, Name, format_time, show
from inferry.cli.terminal import fail
from inferry.domain.errors import GatewayError
from inferry.domain.keys import is_valid_tenant_name
from inferry.durable.callback_secrets import SecretStore, secret_object
from inferry.durable.callback_signature import secret_text

callback_secrets_app = typer.Typer(help="Secrets that sign callbacks: rotate, list.", no_args_is_help=True)


@callback_secrets_app.command("rotate")
def rotate_secret(
    name: Name,
    grace: Annotated[
        float,
        typer.Option(metavar="DURATION", parser=parse_lifetime, help="Time for which earlier secrets still sign."),
    ] = "24h",  # type: ignore[assignment]  # typer runs defaults through the parser
    config_file: ConfigFile = None,
    ledger: Ledger = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the secret, for scripts.")] = False,
) -> None:
    """Create the callback secret of a tenant and print it once; an earlier one ends after a grace period."""
    if not is_valid_tenant_name(name):
        fail(f"{name!r} is not a valid name of a tenant")
    with _secrets(config_file, ledger) as store:
        secret = store.rotate(name, time.time(), grace)
        others = [one for one in store.valid(name, time.time()) if one.id != secret.id]
    text = secret_text(secret.key)
    if as_json and not quiet:
        typer.echo(msgspec.json.encode({**secret_object(secret, secret.created_at), "secret": text}))
        return
    typer.echo(text)
    if not quiet:
        # On standard error, so that redirected output is the secret alone.
        typer.echo(f"Secret {secret.id} of {name}. It is shown only once.", err=True)
        for one in others:
            typer.echo(f"The earlier secret, {one.id}, ends at {format_time(one.expires_at or 0.0)}.", err=True)


@callback_secrets_app.command("list")
def list_secrets(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only secrets of this tenant.")] = None,
    config_file: ConfigFile = None,
    ledger: Ledger = None,
    as_json: Json = False,
) -> None:
    """List callback secrets by id, newest first."""
    with _secrets(config_file, ledger) as store:
        found = [secret_object(one, time.time()) for one in store.all(tenant)]
    show(found, ("id", "tenant", "status", "created_at", "expires_at"), "callback secret", as_json=as_json)


@contextmanager
def _secrets(config_file: Path | None, ledger: str | None) -> Iterator[SecretStore]:
    """The database of secrets; errors end the command with a message."""
    try:
        url = ledger or load(config_file).ledger
        with open_callback_secrets(url) as store:
            yield store
    except ConfigError as error:
        fail(str(error))
    except GatewayError as error:
        fail(str(error), status=1)
