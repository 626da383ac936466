"""Environment variables that set configuration keys."""

from collections.abc import Mapping
from typing import Any

import yaml

from inferry.cli.config.schema import ConfigError, ServerConfig
from inferry.cli.config.yaml_file import read_yaml
from inferry.domain.lanes import Lane

ENV_PREFIX = "INFERRY_"
ADMIN_KEY = "INFERRY_ADMIN_KEY"
WORKER_KEY = "INFERRY_WORKER_KEY"
"""Read by `inferry worker`, and by gateways that name it; no configuration key."""


def apply_environment(raw: dict[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """INFERRY_SERVER__PORT=9000 sets server.port; values are read as YAML. An unknown name is an error."""
    raw = dict(raw)
    for name, text in env.items():
        if not name.startswith(ENV_PREFIX) or name == WORKER_KEY:
            continue
        if name == ADMIN_KEY:
            # Not read as YAML: a key that looks like a number is a string.
            server = raw.get("server") or {}
            raw["server"] = {**server, "admin_key": text} if isinstance(server, dict) else server
            continue
        if "__" not in name and name.removeprefix(ENV_PREFIX) not in ("LEDGER", "WORKERS_FILE"):
            leaf = name.removeprefix(ENV_PREFIX)
            hint = (
                f"; did you mean {ENV_PREFIX}SERVER__{leaf}?" if leaf.lower() in ServerConfig.__struct_fields__ else ""
            )
            raise ConfigError(f"the environment variable {name} sets no configuration key{hint}")
        if name == f"{ENV_PREFIX}LEDGER":
            raw["ledger"] = text  # not read as YAML: sqlite:///:memory: ends with a colon
            continue
        *parents, leaf = name.removeprefix(ENV_PREFIX).split("__")
        # Lanes are the only upper-case keys.
        parents = [part if part in Lane.__members__ else part.lower() for part in parents]
        here = raw
        for part in parents:
            child = here.get(part)
            if child is not None and not isinstance(child, dict):
                raise ConfigError(f"{name} sets a key below {part}, which is not a mapping")
            here[part] = here = dict(child or {})
        try:
            here[leaf.lower()] = read_yaml(text)
        except yaml.YAMLError:
            raise ConfigError(f"the environment variable {name} is not valid YAML, or sets a key twice") from None
    return raw
