"""The generated reference pages: `python -m inferry.cli.docs` writes them, `--check` lists stale ones.

Each page is a pure function of the code it describes.
"""

import argparse
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import typer.main
from msgspec import Struct, UnsetType

from inferry.cli import main as cli
from inferry.cli.checkout import ROOT
from inferry.cli.config import (
    alerts,
    callbacks,
    cluster,
    retention,
    scaling,
    schema,
    single_flight,
    storage,
    tenants,
    tracing,
    workers,
)
from inferry.cli.config.alerts import AlertRuleConfig, AlertsConfig, AlertWebhookConfig
from inferry.cli.config.callbacks import CallbacksConfig
from inferry.cli.config.environment import ADMIN_KEY, ENV_PREFIX
from inferry.cli.config.loader import dump, parse
from inferry.cli.config.scaling import ScalingConfig
from inferry.cli.config.schema import Config, HealthConfig, LaneConfig, ServerConfig
from inferry.cli.config.single_flight import SingleFlightConfig
from inferry.cli.config.storage import StorageConfig
from inferry.cli.config.tenants import AuthConfig, PriceConfig, TenantConfig
from inferry.cli.config.tracing import TracingConfig
from inferry.cli.config.workers import (
    HTTP_KINDS,
    EmbeddedWorkerConfig,
    HttpWorkerConfig,
    RayWorkerConfig,
    VllmInProcessWorkerConfig,
)
from inferry.cli.markdown import attribute_docs, codes, page, table
from inferry.cli.metrics_page import metrics_page
from inferry.domain import errors, settings
from inferry.domain.errors import GatewayError
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.ingress.errors import error_body
from inferry.ingress.openapi import document
from inferry.observe.alerts import ALERT_RULES

REFERENCE = ROOT / "docs" / "reference"

_TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false", types.NoneType: "null"}
_EXAMPLE_WORKERS = [
    {"kind": "embedded"},
    {"kind": "vllm", "name": "gpu-a", "url": "http://10.0.0.5:8000"},
    {"kind": "vllm-inprocess", "name": "gpu-c", "model": "./models/llama"},
]


def pages() -> dict[str, str]:
    """The generated pages by file name."""
    return {
        "config.md": config_page(),
        "metrics.md": metrics_page(),
        "errors.md": errors_page(),
        "cli.md": cli_page(),
        "openapi.json": document.render_page(),
    }


def stale(directory: Path) -> list[str]:
    """Names of pages that differ from the code."""
    return [name for name, text in pages().items() if _read(directory / name) != text]


def write(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (directory / name).write_text(text, encoding="utf-8")


# -- configuration ---------------------------------------------------------------------------------------------------


def config_page() -> str:
    docs = attribute_docs(schema) | attribute_docs(workers) | attribute_docs(tenants)
    for module in (alerts, single_flight, storage, callbacks, cluster, retention, scaling, tracing):
        docs |= attribute_docs(module)
    for (struct, name), text in attribute_docs(settings).items():
        docs["TenantConfig" if struct in ("LimitSettings", "TenantSettings") else struct, name] = text
    return page(
        "Configuration",
        "src/inferry/cli/config/ and src/inferry/domain/settings.py",
        "One YAML file, given with `--config`. Every key except the name and URL of an HTTP worker has a default, so "
        "an empty file is a valid configuration. Unknown keys and invalid values are errors that name their path. "
        "`inferry check-config --config FILE` prints the configuration with defaults and without secrets.",
        f"An environment variable sets one key: `{ENV_PREFIX}SERVER__PORT=9000` is `server.port`, "
        f"`{ENV_PREFIX}LANES__P2__SHARE=0.1` is `lanes.P2.share`, `{ENV_PREFIX}LEDGER` is `ledger`, "
        f"`{ENV_PREFIX}WORKERS_FILE` is `workers_file`, `{ADMIN_KEY}` is `server.admin_key`. "
        "Values are read as YAML and override the file. Entries of `workers` cannot be set this way.",
        *_section("Top level", "", Config, docs),
        *_section("`server`", "server.", ServerConfig, docs),
        *_section("`health`", "health.", HealthConfig, docs),
        *_section("`scaling`", "scaling.", ScalingConfig, docs),
        *_section("`single_flight`", "single_flight.", SingleFlightConfig, docs),
        *_section("`storage`", "storage.", StorageConfig, docs),
        *_section("`callbacks`", "callbacks.", CallbacksConfig, docs),
        *_section("`tracing`", "tracing.", TracingConfig, docs),
        *_section("`retention`", "retention.", retention.RetentionConfig, docs),
        *_section("`cluster`", "cluster.", cluster.ClusterConfig, docs),
        *_section("`alerts`", "alerts.", AlertsConfig, docs),
        *_section("`alerts.rules`", "alerts.rules.<rule>.", AlertRuleConfig, docs),
        _alert_rules(),
        *_section("`alerts.webhook`", "alerts.webhook.", AlertWebhookConfig, docs),
        *_section("`auth`", "auth.", AuthConfig, docs),
        *_section("`tenants`", "tenants.<name>.", TenantConfig, docs),
        *_section("`prices`", "prices.<model>.", PriceConfig, docs),
        *_lanes_section(docs),
        *_section("`workers[]` of `kind: embedded`", "", EmbeddedWorkerConfig, docs),
        *_section("`workers[]` of every kind over HTTP", "", HttpWorkerConfig, docs),
        *(
            part
            for kind in HTTP_KINDS
            for part in _section(
                f"`workers[]` of `kind: {kind.__struct_config__.tag}`", "", kind, docs, HttpWorkerConfig
            )
        ),
        *_section("`workers[]` of `kind: vllm-inprocess`", "", VllmInProcessWorkerConfig, docs),
        *_section("`workers[]` of `kind: ray`", "", RayWorkerConfig, docs),
        "## Complete example",
        "Every key with its default, and three kinds of workers. A configuration needs only the keys it changes.",
        f"```yaml\n{example_config()}```",
    )


def example_config() -> str:
    """A configuration with every key."""
    return dump(parse({"workers": _EXAMPLE_WORKERS}))


def _section(
    title: str, prefix: str, struct: type[Struct], docs: dict[tuple[str, str], str], base: type[Struct] | None = None
) -> Iterator[str]:
    """The keys of a Struct; inherited from `base` only if it redefines them."""
    yield f"## {title}"
    yield inspect.cleandoc(struct.__doc__ or "")
    rows = [
        (
            f"`{prefix}{field.encode_name}`",
            type_name(field.type),
            default_name(field),
            docs[struct.__name__, field.name],
        )
        for field in msgspec.structs.fields(struct)
        if base is None or (struct.__name__, field.name) in docs
    ]
    if rows:
        yield table(("key", "type", "default", "meaning"), rows)


def _alert_rules() -> str:
    """The rules with their defaults."""
    rows = [
        (
            f"`{rule.name}`",
            rule.severity,
            "" if rule.threshold is None else shown(rule.threshold),
            rule.unit,
            shown(rule.for_s),
        )
        for rule in ALERT_RULES
    ]
    return table(("rule", "severity", "threshold", "unit", "`for_s`"), rows)


def _lanes_section(docs: dict[tuple[str, str], str]) -> Iterator[str]:
    lanes = [lane.name for lane in Lane]
    yield "## `lanes`"
    named = [f"`{name}` is {docs['LanesConfig', name].rstrip('.').lower()}" for name in lanes]
    yield f"The three lanes: {', '.join(named)}. Omitted keys keep the lane's default."
    rows = []
    for field in msgspec.structs.fields(LaneConfig):
        defaults = [shown(getattr(DEFAULT_LANES[lane], field.name)) for lane in Lane]
        key = f"`lanes.<lane>.{field.encode_name}`"
        rows.append((key, type_name(field.type), *defaults, docs["LaneConfig", field.name]))
    yield table(("key", "type", *(f"default {name}" for name in lanes), "meaning"), rows)


def type_name(kind: Any) -> str:
    """A type in words."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return " or ".join(f"`{one}`" for one in arguments)
    if typing.get_origin(kind) is dict:
        return "mapping"
    if typing.get_origin(kind) is tuple:
        return f"list of {type_name(arguments[0])}"
    if arguments:
        return " or ".join(dict.fromkeys(type_name(one) for one in arguments if one is not UnsetType))
    if isinstance(kind, type) and issubclass(kind, Struct):
        return "worker" if kind.__struct_config__.tag is not None else "section"
    return _TYPES[kind]


def default_name(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, Struct):
        return "see below"
    if isinstance(value, tuple) and value:
        return "one embedded worker"
    return shown(value)


def shown(value: Any) -> str:
    """A value as in YAML."""
    return f"`{value:g}`" if isinstance(value, float) else f"`{json.dumps(value).strip(chr(34))}`"


# -- errors ----------------------------------------------------------------------------------------------------------


def errors_page() -> str:
    rows = [
        (str(kind.status), f"`{kind.code}`", f"`{_wire_type(kind)}`", _yes(kind.retryable), _summary(kind))
        for kind in sorted(_error_kinds(), key=lambda kind: (kind.status, kind.code, kind.__name__))
    ]
    return page(
        "Errors",
        "src/inferry/domain/errors.py",
        "All errors have this body; `param` is the field or header concerned, or null:",
        '```json\n{"error": {"message": "…", "type": "rate_limit_error", "param": null, "code": "queue_full"}}\n```',
        "Retryable: clients should repeat the same call. Retryable errors with status 429 and 503 have `Retry-After` "
        "in seconds, and so has `deadline_infeasible`: after that time a call could meet the same deadline. "
        "After the first byte of a stream the same object is sent in-band, see [HTTP](http.md#streams). Messages never "
        "contain prompts or outputs.",
        table(("status", "code", "type", "retryable", "meaning"), rows),
    )


def _error_kinds() -> list[type[GatewayError]]:
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, GatewayError)]
    # A subclass without its own code is the same error to clients.
    cases = {kind for kind in kinds for base in kind.__bases__ if base is not GatewayError and base in kinds}
    return [kind for kind in kinds if kind is not GatewayError and kind not in cases]


def _wire_type(kind: type[GatewayError]) -> str:
    named: str = json.loads(error_body(kind("")))["error"]["type"]
    return named


def _summary(kind: type[GatewayError]) -> str:
    return " ".join((kind.__doc__ or "").split())


# -- command line ----------------------------------------------------------------------------------------------------


def cli_page() -> str:
    sections = [part for path, command in commands() for part in _command_section(path, command)]
    return page(
        "Command line",
        "src/inferry/cli/",
        "Exit status: 0 for success, 2 for an invalid command line, configuration or ledger. "
        "All commands accept `--help`.",
        *sections,
    )


def commands() -> list[tuple[str, Any]]:
    """All commands by full name, groups before their members."""
    # Attributes instead of classes: recent releases of typer bundle click, so there is no single class to import.
    return list(_walk("inferry", typer.main.get_command(cli.app)))


def options(command: Any) -> list[tuple[list[str], Any]]:
    """The options of a command with all spellings."""
    return [
        ([*one.opts, *one.secondary_opts], one)
        for one in command.params
        if one.param_type_name == "option" and not getattr(one, "hidden", False)
    ]


def _walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _walk(f"{path} {name}", inner)


def _command_section(path: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    yield f"## `{path}`"
    yield " ".join((command.help or "").split())
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    named = "".join(f" {_argument(one)}" for one in arguments)
    yield f"```\n{path} [OPTIONS]{named}{' COMMAND [ARGS]...' if inner else ''}\n```"
    if inner:
        yield f"Commands: {codes(f'{path} {name}' for name in inner)}."
    rows = [(f"`{_argument(one)}`", _default(one), one.help or "") for one in arguments]
    rows += [(_spelling(names, one), _default(one), one.help or "") for names, one in options(command)]
    if rows:
        yield table(("option", "default", "meaning"), rows)


def _argument(argument: Any) -> str:
    name = f"{argument.metavar or argument.name.upper()}{'...' if argument.nargs != 1 else ''}"
    return name if argument.required else f"[{name}]"


def _spelling(names: list[str], option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
    return ", ".join(f"`{name}{value}`" for name in names)


def _default(option: Any) -> str:
    is_value = isinstance(option.default, str | int | float) and not isinstance(option.default, bool)
    return shown(option.default) if is_value else ""


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m inferry.cli.docs", description="Write the generated reference pages."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    parser.add_argument("--directory", type=Path, default=REFERENCE, help="directory of the pages")
    arguments_given = parser.parse_args(arguments)
    if not arguments_given.check:
        write(arguments_given.directory)
        return 0
    old = stale(arguments_given.directory)
    if old:
        sys.stdout.write(f"stale, run `make docs`: {', '.join(old)}\n")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
