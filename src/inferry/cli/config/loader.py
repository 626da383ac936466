"""One YAML file and environment variables in, a checked configuration out.

An unknown key or an invalid value is an error that names its path and the closest known key.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from inferry.cli.config.cluster import shown_redis_url
from inferry.cli.config.conversion import convert_config
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
    config = convert_config(raw)
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


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "text" if isinstance(value, str) else type(value).__name__
