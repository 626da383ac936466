"""`inferry keys` and `inferry tenants`: keys and limits in the ledger's database.

The commands need no running gateway; a running one applies changes within a second.
"""

import difflib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferry.cli.config.conversion import invalid_value
from inferry.cli.config.loader import load, load_workers
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.tenants import unpriced_models
from inferry.cli.formats import parse_lifetime
from inferry.cli.terminal import fail
from inferry.dispatch.tenants import TenantManager
from inferry.domain.errors import GatewayError
from inferry.domain.keys import NewKey, key_as_dict
from inferry.domain.ledger import LedgerUnusable
from inferry.domain.tenant_settings import LimitSettings, TenantSettings
from inferry.ledger.stores.opening import require_existing, require_shared
from inferry.ledger.stores.tenants import TenantStore

keys_app = typer.Typer(help="API keys: create, list, revoke, rotate.", no_args_is_help=True)
tenants_app = typer.Typer(help="Tenants in the database: list, show, set, remove.", no_args_is_help=True)

_LIMITS = ", ".join(LimitSettings.__struct_fields__)
_SETTINGS = ", ".join(TenantSettings.__struct_fields__)
MIN_WIDTH = 160

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="The gateway's configuration.")]
Ledger = Annotated[
    str | None, typer.Option("--ledger", metavar="URL", help="Database URL; default: the configuration's `ledger`.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the key, for scripts.")]
KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="Id of the key: the part between its two underscores.")]
Name = Annotated[str, typer.Argument(metavar="TENANT", help="Name of the tenant.")]
KeyLimits = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LIMIT=VALUE",
        help=f"Limits of the key, in addition to its tenant's: {_LIMITS}.",
    ),
]
Settings = Annotated[
    list[str],
    typer.Argument(metavar="SETTING=VALUE", help=f"Settings to change; null removes one: {_SETTINGS}."),
]

SettingsT = TypeVar("SettingsT", bound=LimitSettings)


@keys_app.command("create")
def create_key(
    limits: KeyLimits = None,
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant of the key; created if new.")] = "default",
    label: Annotated[str, typer.Option(help="Label, shown in lists.")] = "",
    expires: Annotated[
        float | None, typer.Option(metavar="DURATION", parser=parse_lifetime, help="Lifetime of the key: 12h, 90d …")
    ] = None,
    config_file: ConfigFile = None,
    ledger: Ledger = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Create a key and print it once; only a hash is stored."""
    with _tenant_manager(config_file, ledger, may_create=True) as (manager, config):
        overrides = _merged_settings(LimitSettings, {}, limits or ())
        before = manager.snapshot()
        now = time.time()
        new_key = manager.create_key(
            tenant,
            now=now,
            label=label,
            limits=overrides.limits(),
            expires_at=None if expires is None else now + expires,
        )
    notes = [*unpriced_models({"the key": overrides}, config.prices, config.workers)]
    if all(one.name != tenant for one in before.tenants):
        notes.append(f"The tenant {tenant} is new and has no limits; set them with `inferry tenants set {tenant} …`.")
    if not before.keys:
        notes.append(
            "This is the first key: from now on, gateways with this database refuse calls without a key, "
            "unless auth.mode is off."
        )
    _show_new(new_key, notes, as_json=as_json, quiet=quiet)


@keys_app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only keys of this tenant.")] = None,
    status: Annotated[str | None, typer.Option(help="Only keys with this status: valid, expired or revoked.")] = None,
    config_file: ConfigFile = None,
    ledger: Ledger = None,
    as_json: Json = False,
) -> None:
    """List keys, oldest first."""
    if status not in (None, "valid", "expired", "revoked"):
        raise typer.BadParameter("must be valid, expired or revoked", param_hint="--status")
    with _tenant_manager(config_file, ledger) as (manager, _):
        found = manager.keys(time.time())
    found = [key for key in found if tenant in (None, key["tenant"]) and status in (None, key["status"])]
    show(found, ("id", "tenant", "label", "status", "created_at", "expires_at", "limits"), "key", as_json=as_json)


@keys_app.command("revoke")
def revoke_key(key_id: KeyId, config_file: ConfigFile = None, ledger: Ledger = None, as_json: Json = False) -> None:
    """Revoke a key now. Running gateways refuse it and end its calls in flight within a second."""
    with _tenant_manager(config_file, ledger) as (manager, _):
        now = time.time()
        key = key_as_dict(manager.revoke_key(key_id, now), now)
    if as_json:
        typer.echo(msgspec.json.encode(key))
    else:
        typer.echo(f"{key_id} of {key['tenant']} is revoked.")


@keys_app.command("rotate")
def rotate_key(
    key_id: KeyId,
    grace: Annotated[
        float, typer.Option(metavar="DURATION", parser=parse_lifetime, help="Time for which the old key stays valid.")
    ] = "24h",  # type: ignore[assignment]  # typer runs defaults through the parser
    config_file: ConfigFile = None,
    ledger: Ledger = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Create a key with the limits of an old one, which ends after a grace period."""
    with _tenant_manager(config_file, ledger) as (manager, _):
        new_key = manager.rotate_key(key_id, time.time(), grace)
    note = f"The old key, {key_id}, ends at {format_time(time.time() + grace)} at the latest."
    _show_new(new_key, [note], as_json=as_json, quiet=quiet)


@tenants_app.command("list")
def list_tenants(config_file: ConfigFile = None, ledger: Ledger = None, as_json: Json = False) -> None:
    """List tenants, those of the configuration first, with the settings that differ from the defaults."""
    with _tenant_manager(config_file, ledger, may_create=True) as (manager, _):
        found = manager.tenants(time.time())
    if as_json:
        typer.echo(msgspec.json.encode(found))
        return
    rows = [{**one, "settings": _changed_settings(one), "keys": one["valid_keys"]} for one in found]
    show(rows, ("name", "source", "keys", "settings"), "tenant", as_json=False)


@tenants_app.command("show")
def show_tenant(name: Name, config_file: ConfigFile = None, ledger: Ledger = None, as_json: Json = False) -> None:
    """Show a tenant with its settings."""
    with _tenant_manager(config_file, ledger, may_create=True) as (manager, _):
        found = manager.tenant(name, time.time())
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        typer.echo(yaml.safe_dump(_to_builtins(found), sort_keys=False), nl=False)


@tenants_app.command("set")
def set_tenant(
    name: Name, settings: Settings, config_file: ConfigFile = None, ledger: Ledger = None, as_json: Json = False
) -> None:
    """Change settings of a tenant, or create one; other settings stay unchanged."""
    with _tenant_manager(config_file, ledger, may_create=True) as (manager, config):
        now = time.time()
        known = [_only_settings(one) for one in manager.tenants(now) if one["name"] == name]
        wanted = _merged_settings(TenantSettings, known[0] if known else {}, settings)
        if wanted.isolation == "pool" and name not in _pools(config):
            fail(f"no worker of the configuration has `pool: {name}`", status=1)
        manager.put_tenant(wanted.tenant(name))
        found = manager.tenant(name, now)
    for note in unpriced_models({name: wanted}, config.prices, config.workers):
        _note(note)
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        typer.echo(yaml.safe_dump(_to_builtins(found), sort_keys=False), nl=False)


@tenants_app.command("remove")
def remove_tenant(name: Name, config_file: ConfigFile = None, ledger: Ledger = None, as_json: Json = False) -> None:
    """Remove a tenant from the database and revoke its keys. Its usage stays in the ledger."""
    with _tenant_manager(config_file, ledger) as (manager, _):
        revoked = manager.remove_tenant(name, time.time())
    if as_json:
        typer.echo(msgspec.json.encode({"name": name, "revoked_keys": revoked}))
    else:
        typer.echo(f"Removed {name} and revoked {revoked} key{'' if revoked == 1 else 's'}.")


@contextmanager
def _tenant_manager(
    config_file: Path | None, ledger: str | None, *, may_create: bool = False
) -> Iterator[tuple[TenantManager, Config]]:
    """Tenants of the configuration and the database; errors end the command with a message."""
    try:
        config = load(config_file)
        url = ledger or config.ledger
        (require_shared if may_create else require_existing)(url)
        manager = TenantManager(TenantStore(url), config.configured_tenants())
    except (ConfigError, LedgerUnusable) as error:
        fail(str(error))
    try:
        yield manager, config
    except (GatewayError, LedgerUnusable) as error:
        fail(str(error), status=1)
    finally:
        manager.close()


def _pools(config: Config) -> set[str | None]:
    workers = config.workers
    if config.workers_file is not None:
        try:
            workers = (*workers, *load_workers(Path(config.workers_file)))
        except ConfigError as error:
            fail(str(error))
    return {worker.pool for worker in workers}


def _merged_settings(kind: type[SettingsT], before: dict[str, Any], overrides: Sequence[str]) -> SettingsT:
    """`before` with NAME=VALUE overrides. Values are YAML, as in a configuration; models are comma-separated."""
    raw = dict(before)
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals:
            fail(f"{text!r} is not of the form NAME=VALUE")
        if name not in kind.__struct_fields__:
            close_match = difflib.get_close_matches(name, kind.__struct_fields__, n=1, cutoff=0.5)
            hint = f"did you mean {close_match[0]}?" if close_match else f"known: {', '.join(kind.__struct_fields__)}"
            fail(f"unknown setting {name}; {hint}")
        raw.pop(name, None)
        if name == "models" and value != "null":
            raw[name] = [model.strip() for model in value.strip("[]").split(",")]
        elif (read := _value(name, value)) is not None:
            raw[name] = read
    try:
        settings = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        fail(invalid_value(str(error), raw, kind))
    problems = list(settings.validation_errors())
    if problems:
        fail("; ".join(problems))
    return settings


def _value(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        fail(f"the value of {name} is not valid YAML")


def _only_settings(tenant: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tenant.items() if name in TenantSettings.__struct_fields__}


def _changed_settings(tenant: dict[str, Any]) -> dict[str, Any]:
    default = TenantSettings()
    return {name: value for name, value in _only_settings(tenant).items() if value != getattr(default, name)}


def _to_builtins(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _show_new(new_key: NewKey, notes: Sequence[str], *, as_json: bool, quiet: bool) -> None:
    if quiet:
        typer.echo(new_key.text)
        return
    if as_json:
        typer.echo(msgspec.json.encode({**key_as_dict(new_key.key, new_key.key.created_at), "key": new_key.text}))
    else:
        typer.echo(new_key.text)
    ends = "" if new_key.key.expires_at is None else f", valid until {format_time(new_key.key.expires_at)}"
    # On standard error, so that redirected output is the key alone.
    _note(f"Key {new_key.key.key_id} of the tenant {new_key.key.tenant}{ends}. It is shown only once.")
    for note in notes:
        _note(note)


def _note(text: str) -> None:
    typer.echo(text, err=True)


def show(rows: list[dict[str, Any]], columns: Sequence[str], what: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(rows))
        return
    if not rows:
        typer.echo(f"No {what}s.")
        return
    table = Table(*(name.removesuffix("_at") for name in columns))
    for row in rows:
        table.add_row(*(Text(_cell(row[name], is_time=name.endswith("_at"))) for name in columns))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)  # piped output must not fold names
    console.print(table)


def _cell(value: Any, *, is_time: bool) -> str:
    if is_time:
        return "never" if value is None else format_time(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={_cell(one, is_time=False)}" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return "+".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_time(wall: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(wall))
    except (OSError, OverflowError, ValueError):  # a year that the system cannot represent
        return "after the year 9999"
