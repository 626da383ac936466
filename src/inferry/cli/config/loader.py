"""One YAML file and environment variables in, a checked configuration out.

An unknown key or an invalid value is an error that names its path and the closest known key.
"""

import difflib
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from inferry.cli.config.checks import check_values
from inferry.cli.config.cluster import shown_redis_url
from inferry.cli.config.environment import apply_environment
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.sections import sections_of
from inferry.cli.config.validation import check_config
from inferry.cli.config.workers import WorkerConfig
from inferry.cli.config.yaml_file import one_line_error, read_yaml
from inferry.domain.workers_file_content import read_workers_file


def load(path: Path | None = None, env: Mapping[str, str] | None = None) -> Config:
    """Read `path` (or the defaults), apply the environment, validate."""
    raw: Any = {}
    if path is not None:
        try:
            raw = read_yaml(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8 text") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {one_line_error(error)}") from None
        raw = {} if raw is None else raw
    return parse(raw, os.environ if env is None else env)


def parse(raw: Any, env: Mapping[str, str] | None = None) -> Config:
    """A configuration from a parsed YAML document."""
    if not isinstance(raw, dict):
        raise ConfigError(f"the configuration must be a mapping of keys, not {_kind(raw)}")
    raw = apply_environment(raw, env or {})
    if raw.get("workers_file") is not None:
        raw.setdefault("workers", [])
    _refuse_unknown_keys(raw, Config, "")
    _restore_off_words(raw)
    problems = list(check_values(raw))
    if problems:
        raise ConfigError("; ".join(problems))
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_format_error(_locate_error(raw, str(error)))) from None
    problems = list(check_config(config))
    if problems:
        raise ConfigError("; ".join(problems))
    return config


def load_workers(path: Path) -> tuple[WorkerConfig, ...]:
    """The workers in a `workers_file`."""
    try:
        return parse_workers(read_workers_file(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_workers(content: bytes) -> tuple[WorkerConfig, ...]:
    """The workers in the content of a `workers_file`, validated like those of the configuration."""
    try:
        raw = read_yaml(content.decode())
    except UnicodeDecodeError:
        raise ConfigError("it is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"it is not valid YAML: {one_line_error(error)}") from None
    if not isinstance(raw, list):
        raise ConfigError(f"it must be a list of workers, not {_kind(raw)}")
    # An empty list removes all workers; an empty file is more likely an accident.
    return parse({"workers": raw}).workers if raw else ()


def duplicate_names(config: Config, workers: Sequence[WorkerConfig]) -> list[str]:
    """Names in a `workers_file` that workers of the configuration already have."""
    duplicates = {worker.name for worker in config.workers}
    return [worker.name for worker in workers if worker.name in duplicates]


def dump(config: Config) -> str:
    """The configuration as YAML, with defaults and without secrets."""
    raw = msgspec.to_builtins(config)
    raw["lanes"] = sections_of(config)["lanes"]
    if raw["server"]["admin_key"]:
        raw["server"]["admin_key"] = "***"
    if config.cluster.redis is not None:
        raw["cluster"]["redis"] = shown_redis_url(config.cluster.redis)
    if (webhook := raw["alerts"]["webhook"]) is not None:
        webhook["secret"] = _redact(webhook["secret"])
    for worker in raw["workers"]:
        for name in ("api_key", "salt_secret"):
            if worker.get(name):
                worker[name] = _redact(worker[name])
        if worker.get("api_keys"):
            worker["api_keys"] = [_redact(key) for key in worker["api_keys"]]
    raw["tracing"]["headers"] = {name: _redact(value) for name, value in raw["tracing"]["headers"].items()}
    return yaml.safe_dump(raw, sort_keys=False, default_flow_style=False)


def _redact(secret: str) -> str:
    """The name of the secret's environment variable, or asterisks."""
    return secret if secret.startswith("$") else "***"


def _restore_off_words(raw: dict[str, Any]) -> None:
    """YAML reads a bare `off` as false and `on` as true; `window` and `auth.mode` use them as modes."""
    auth = raw.get("auth")
    if isinstance(auth, dict) and isinstance(auth.get("mode"), bool):
        raw["auth"] = {**auth, "mode": "on" if auth["mode"] else "off"}
    lanes = raw.get("lanes")
    for lane in lanes.values() if isinstance(lanes, dict) else ():
        if isinstance(lane, dict) and lane.get("window") is False:
            lane["window"] = "off"


def _refuse_unknown_keys(raw: Any, kind: Any, path: str) -> None:
    """Runs before msgspec checks types, so that the message can suggest the closest key."""
    if isinstance(raw, list | tuple):
        (inner, *_) = typing.get_args(kind) or (None,)
        for index, item in enumerate(raw):
            _refuse_unknown_keys(item, inner, f"{path}[{index}]")
        return
    if typing.get_origin(kind) is dict and isinstance(raw, dict):
        for key, value in raw.items():
            _refuse_unknown_keys(value, typing.get_args(kind)[1], f"{path}.{key}")
        return
    struct = _struct_for(kind, raw)
    if struct is None or not isinstance(raw, dict):
        return
    fields = typing.get_type_hints(struct)
    tag_field = struct.__struct_config__.tag_field
    known = [*struct.__struct_fields__, *([tag_field] if tag_field else [])]
    for key, value in raw.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"; did you mean `{near[0]}`?" if near else f"; known keys are {', '.join(known)}"
            raise ConfigError(f"unknown key `{where}`{hint}")
        if key != tag_field:
            _refuse_unknown_keys(value, fields[key], where)


def _struct_for(kind: Any, raw: Any) -> type[Struct] | None:
    """The Struct of a value: for a tagged union, the one named by its tag."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    structs = [one for one in options if isinstance(one, type) and issubclass(one, Struct)]
    if len(structs) > 1 and isinstance(raw, dict):
        tag_field = structs[0].__struct_config__.tag_field
        structs = [one for one in structs if one.__struct_config__.tag == raw.get(tag_field)]
    return structs[0] if structs else None


def _locate_error(raw: dict[str, Any], message: str) -> str:
    """Resolve the `[...]` of msgspec's `$.tenants[...]` by converting each entry alone."""
    section = message.partition("`$.")[2].partition("[...]")[0]
    entries = raw.get(section) if "[...]" in message else None
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        try:
            msgspec.convert({section: {key: entry}}, Config)
        except msgspec.ValidationError as error:
            return str(error).replace("[...]", f".{key}", 1)
    return message


def _format_error(message: str) -> str:
    """msgspec's `Expected `int`, got `str` - at `$.server.port`` with the path first."""
    what, _, where = message.partition(" - at ")
    return f"{where.strip('`').removeprefix('$.')}: {what}" if where else what


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "text" if isinstance(value, str) else type(value).__name__
