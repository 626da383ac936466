"""One YAML file (and the environment) in, frozen per-component configuration out.

Every key has a default. A key that does not exist, or a value that cannot be, is an error that names its path and,
where there is one, the key that was probably meant.
"""

import difflib
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import UNSET, Struct, UnsetType

from inferry.cli.config.checks import check_host, check_lanes, check_positive, check_range, check_values, check_workers
from inferry.cli.config.single_flight import SingleFlightConfig, check_single_flight
from inferry.cli.config.tenants import AuthConfig, PriceConfig, TenantConfig, check_pools, check_tenants
from inferry.cli.config.workers import (
    HTTP_KINDS,
    EmbeddedWorkerConfig,
    HttpWorker,
    HttpWorkerConfig,
    OpenAIWorkerConfig,
    SglangWorkerConfig,
    TgiWorkerConfig,
    TrtllmWorkerConfig,
    VllmInProcessWorkerConfig,
    VllmWorkerConfig,
    WorkerConfig,
)
from inferry.cli.config.yaml_file import one_line_error, read_yaml
from inferry.domain.lanes import DEFAULT_LANES, Lane, LanePolicy
from inferry.domain.ledger_urls import ledger_url_error
from inferry.domain.tenants import Price, Tenant

__all__ = [
    "ADMIN_KEY",
    "ENV_PREFIX",
    "HTTP_KINDS",
    "AuthConfig",
    "Config",
    "ConfigError",
    "EmbeddedWorkerConfig",
    "HealthConfig",
    "HttpWorker",
    "HttpWorkerConfig",
    "LaneConfig",
    "LanesConfig",
    "OpenAIWorkerConfig",
    "PriceConfig",
    "ServerConfig",
    "SglangWorkerConfig",
    "SingleFlightConfig",
    "TenantConfig",
    "TgiWorkerConfig",
    "TrtllmWorkerConfig",
    "VllmInProcessWorkerConfig",
    "VllmWorkerConfig",
    "WorkerConfig",
    "dump",
    "duplicate_names",
    "load",
    "load_workers",
    "parse",
    "parse_workers",
]

ENV_PREFIX = "INFERRY_"
NON_CONFIG_VARIABLES = frozenset({"INFERRY_HOME"})
"""Environment variables of the same family that are read elsewhere."""
ADMIN_KEY = "INFERRY_ADMIN_KEY"
MIN_ADMIN_KEY_CHARS = 16


class ConfigError(Exception):
    """The configuration cannot be used; the message says where and why."""


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP surface."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback that takes a key, see `auth`."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Largest request body; more is answered with 413 `body_too_large`."""
    body_timeout_s: float = 30.0
    """How long a request body may take to arrive."""
    idle_timeout_s: float = 75.0
    """How long a connection may stay open without a request."""
    heartbeat_interval_s: float = 15.0
    """A stream that has nothing to say for this long gets its headers and an SSE comment."""
    max_unread_bytes: int = 8 * 1024 * 1024
    """How far a client may fall behind its stream; one that leaves more unread is cut off and its call cancelled."""
    max_queued_bytes: int = 512 * 1024 * 1024
    """Most bytes of request bodies in all queues together; beyond it calls are answered with 429 `queue_full`."""
    retry_slots: bool = True
    """Whether a call that was answered with `queue_full` goes before others when it comes back at the time it was told.
    Without, that time is when all that is queued will have gone, and who comes first is first."""
    drain_timeout_s: float = 30.0
    """After SIGTERM: how long accepted calls may still run before they are ended with an error. The same for those of a
    worker that is removed."""
    admin_key: str | None = None
    """What `/admin/…` asks for as a bearer token; INFERRY_ADMIN_KEY sets it too. null lets clients on this machine in,
    and nobody else."""


class HealthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a worker is taken out, when it is asked again, and how fast it is trusted again."""

    failure_threshold: int = 3
    """Different jobs lost on a worker, with none served in between, that take it out. One job alone never does."""
    failure_window_s: float = 30.0
    """As many failure_threshold within this time take it out as well, where they are at least `failure_ratio` of what
    ended there."""
    failure_ratio: float = 0.5
    """See `failure_window_s`."""
    initial_backoff_s: float = 0.25
    """Until a worker that was taken out is asked for a token; doubles with every failure."""
    max_backoff_s: float = 10.0
    """That pause grows no longer than this."""
    slow_start_share: float = 0.1
    """Part of its room that a worker gets when it has come back; doubles until it has all of it."""
    slow_start_doubling_s: float = 1.0
    """How long each of those parts is kept."""
    liveness_interval_s: float = 2.0
    """How often a server without calls is asked whether it is alive: for its metrics page, or for its models. Hosted
    APIs (`kind: openai`) are not asked."""
    liveness_timeout_s: float = 1.5
    """A server that is asked twice in a row and from which nothing at all is heard for this long is down. One that
    answers slowly, or has long prompts to read first, is given more."""
    no_worker_timeout_s: float = 30.0
    """How long a call without a deadline waits for a worker of its model to come back up, before it is answered with
    503 `no_worker`; 0 refuses at once. A call with a deadline waits until that."""
    max_hedged_retry_ratio: float = 0.02
    """Part of all calls that may be retried on another worker because their first token is overdue and their worker
    silent; 0 retries none before the worker is down."""


class LaneConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One lane; what is left out keeps that lane's default."""

    max_wait_ms: float | UnsetType = UNSET
    """Longest voluntary hold of a job, whatever the reason; after it the job goes alone."""
    coalesce_ms: float | UnsetType = UNSET
    """Longest a job is held for company, counted from its arrival."""
    window: Literal["adaptive", "fixed", "off"] | UnsetType = UNSET
    """`adaptive` holds only where it pays (busy workers that pad), `fixed` always holds, `off` never."""
    max_batch: int | UnsetType = UNSET
    """A group held for company is released when it has this many jobs."""
    queue_limit: int | UnsetType = UNSET
    """Most jobs queued in the lane."""
    high_watermark: float | UnsetType = UNSET
    """Part of `queue_limit` from which newcomers are answered with 429 `queue_full`. The rest is for calls that come
    back when they were told to, and for tenants with less than their part of the queue."""
    share: float | UnsetType = UNSET
    """Part of the admitted prompt tokens this lane is owed while higher lanes are busy."""
    reserve: float | UnsetType = UNSET
    """Part of every worker's room that jobs of this lane leave to higher lanes."""
    may_preempt: tuple[Literal["P0", "P1", "P2"], ...] | UnsetType = UNSET
    """Lower lanes whose running jobs may be stopped for one of this lane that finds no room; they go on later, where
    they were."""
    preemptible: bool | UnsetType = UNSET
    """Whether running jobs of this lane may be stopped for those of a lane that names it."""
    ttft_ms: float | UnsetType | None = UNSET
    """Promise: time to the first token. Measured as `inferry_slo_attainment_total`; null promises nothing."""
    itl_ms: float | UnsetType | None = UNSET
    """Promise: time each further token may take."""


class LanesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The three lanes."""

    P0: LaneConfig = LaneConfig()
    """Interactive."""
    P1: LaneConfig = LaneConfig()
    """Standard."""
    P2: LaneConfig = LaneConfig()
    """Batch."""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `inferry serve` needs to know."""

    server: ServerConfig = ServerConfig()
    """The HTTP surface."""
    lanes: LanesConfig = LanesConfig()
    """The promises, per lane."""
    workers: tuple[WorkerConfig, ...] = (EmbeddedWorkerConfig(),)
    """What runs the work. With a `workers_file`, none but those in it unless they are named here."""
    workers_file: str | None = None
    """A YAML list of more workers, written as in `workers`. It is looked at every second: workers are added, replaced
    and removed as it changes. One that cannot be used is told to the log and changes nothing."""
    health: HealthConfig = HealthConfig()
    """When workers are trusted."""
    auth: AuthConfig = AuthConfig()
    """Whether callers need a key."""
    tenants: dict[str, TenantConfig] = {}
    """What callers may use, by the tenant's name. `/admin/tenants` and `inferry tenants` add others."""
    prices: dict[str, PriceConfig] = {}
    """What models cost, by their names; `*` is every other."""
    single_flight: SingleFlightConfig = SingleFlightConfig()
    """When one execution answers several calls."""
    ledger: str = "sqlite:///inferry.db"
    """The database where one row per attempt is kept, and the keys. One gateway at a time writes to it: a second
    `inferry serve` on the same file ends with an error. `"sqlite:///:memory:"` keeps nothing beyond the process."""

    def configured_tenants(self) -> dict[str, Tenant]:
        return {name: one.tenant(name) for name, one in self.tenants.items()}

    def price_list(self) -> dict[str, Price]:
        return {model: one.price() for model, one in self.prices.items()}

    def lane_policies(self) -> dict[Lane, LanePolicy]:
        return {lane: _lane_policy(lane, getattr(self.lanes, lane.name)) for lane in Lane}


def load(path: Path | None = None, env: Mapping[str, str] | None = None) -> Config:
    """Read `path` (or nothing but defaults), lay the environment over it, check it."""
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
    """A configuration from what a YAML document holds."""
    if not isinstance(raw, dict):
        raise ConfigError(f"the configuration must be a mapping of keys, not {_kind(raw)}")
    raw = _apply_environment(raw, env or {})
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
    problems = list(_check_values(config))
    if problems:
        raise ConfigError("; ".join(problems))
    return config


def load_workers(path: Path) -> tuple[WorkerConfig, ...]:
    """The workers in a `workers_file`."""
    try:
        return parse_workers(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_workers(content: bytes) -> tuple[WorkerConfig, ...]:
    """Workers from what a `workers_file` holds, checked like those of the configuration."""
    try:
        raw = read_yaml(content.decode())
    except UnicodeDecodeError:
        raise ConfigError("it is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"it is not valid YAML: {one_line_error(error)}") from None
    if not isinstance(raw, list):
        raise ConfigError(f"it must be a list of workers, not {_kind(raw)}")
    # An empty list is a fleet that is gone; an empty file is more likely an accident.
    return parse({"workers": raw}).workers if raw else ()


def duplicate_names(config: Config, workers: Sequence[WorkerConfig]) -> list[str]:
    """Names in a `workers_file` that the configuration has given to workers of its own."""
    duplicates = {worker.name for worker in config.workers}
    return [worker.name for worker in workers if worker.name in duplicates]


def dump(config: Config) -> str:
    """The whole configuration as YAML, defaults included; secrets are left out."""
    raw = msgspec.to_builtins(config)
    raw["lanes"] = {
        lane.name: {name: getattr(policy, name) for name in LaneConfig.__struct_fields__}
        for lane, policy in config.lane_policies().items()
    }
    for lane in raw["lanes"].values():
        lane["may_preempt"] = [lower.name for lower in lane["may_preempt"]]
    if raw["server"]["admin_key"]:
        raw["server"]["admin_key"] = "***"
    for worker in raw["workers"]:
        for name in ("api_key", "salt_secret"):
            if worker.get(name):
                worker[name] = _redact(worker[name])
        if worker.get("api_keys"):
            worker["api_keys"] = [_redact(key) for key in worker["api_keys"]]
    return yaml.safe_dump(raw, sort_keys=False, default_flow_style=False)


def _redact(secret: str) -> str:
    """A secret as it may be shown: where it comes from, or nothing of it."""
    return secret if secret.startswith("$") else "***"


def _lane_policy(lane: Lane, override: LaneConfig) -> LanePolicy:
    given = {name: value for name in LaneConfig.__struct_fields__ if (value := getattr(override, name)) is not UNSET}
    if "may_preempt" in given:
        given["may_preempt"] = tuple(Lane[name] for name in given["may_preempt"])
    return msgspec.structs.replace(DEFAULT_LANES[lane], **given)


def _apply_environment(raw: dict[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """INFERRY_SERVER__PORT=9000 sets server.port; values are read as YAML. A name that sets nothing is an error."""
    raw = dict(raw)
    for name, text in env.items():
        if not name.startswith(ENV_PREFIX) or name in NON_CONFIG_VARIABLES:
            continue
        if name == ADMIN_KEY:
            # As it is: a key that looks like a number is still a key.
            server = raw.get("server") or {}
            raw["server"] = {**server, "admin_key": text} if isinstance(server, dict) else server
            continue
        if "__" not in name and name.removeprefix(ENV_PREFIX) not in ("LEDGER", "WORKERS_FILE"):
            leaf = name.removeprefix(ENV_PREFIX)
            hint = (
                f"; did you mean {ENV_PREFIX}SERVER__{leaf}?" if leaf.lower() in ServerConfig.__struct_fields__ else ""
            )
            raise ConfigError(f"the environment variable {name} sets nothing{hint}")
        if name == f"{ENV_PREFIX}LEDGER":
            raw["ledger"] = text  # as it is: YAML would read the colon at the end of sqlite:///:memory: as its own
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


def _restore_off_words(raw: dict[str, Any]) -> None:
    """YAML reads a bare `off` as false and `on` as true; for a window and for `auth` they are modes."""
    auth = raw.get("auth")
    if isinstance(auth, dict) and isinstance(auth.get("mode"), bool):
        raw["auth"] = {**auth, "mode": "on" if auth["mode"] else "off"}
    lanes = raw.get("lanes")
    for lane in lanes.values() if isinstance(lanes, dict) else ():
        if isinstance(lane, dict) and lane.get("window") is False:
            lane["window"] = "off"


def _refuse_unknown_keys(raw: Any, kind: Any, path: str) -> None:
    """Before msgspec looks at types, so that the message can say which key was probably meant."""
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
    """The Struct a value would become: for a tagged union, the one its tag names."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    structs = [one for one in options if isinstance(one, type) and issubclass(one, Struct)]
    if len(structs) > 1 and isinstance(raw, dict):
        tag_field = structs[0].__struct_config__.tag_field
        structs = [one for one in structs if one.__struct_config__.tag == raw.get(tag_field)]
    return structs[0] if structs else None


def _check_values(config: Config) -> Iterator[str]:
    """Everything that is of the right type and cannot be, as sentences."""
    server = config.server
    yield from check_positive(
        "server", server, "max_body_bytes", "body_timeout_s", "idle_timeout_s", "heartbeat_interval_s"
    )
    yield from check_positive("server", server, "max_unread_bytes", "max_queued_bytes")
    yield from check_range("server", server, 0, 65_535, "port")
    yield from check_range("server", server, 0, math.inf, "drain_timeout_s")
    if (problem := check_host(server.host)) is not None:
        yield f"server.host {problem}"
    yield from check_lanes(config.lane_policies())
    if server.admin_key is not None and len(server.admin_key) < MIN_ADMIN_KEY_CHARS:
        yield f"server.admin_key must have at least {MIN_ADMIN_KEY_CHARS} characters"
    health = config.health
    yield from check_range("health", health, 2, math.inf, "failure_threshold")
    yield from check_positive(
        "health", health, "failure_window_s", "initial_backoff_s", "max_backoff_s", "slow_start_doubling_s"
    )
    yield from check_positive("health", health, "liveness_interval_s", "liveness_timeout_s")
    yield from check_range("health", health, 0, math.inf, "no_worker_timeout_s")
    yield from check_range("health", health, 0, 1, "max_hedged_retry_ratio")
    if health.max_backoff_s < health.initial_backoff_s:
        yield f"health.max_backoff_s ({health.max_backoff_s:g}) is shorter than health.initial_backoff_s"
    for name in ("failure_ratio", "slow_start_share"):
        if not 0 < getattr(health, name) <= 1:
            yield f"health.{name} must be above 0 and at most 1"
    if not config.workers and config.workers_file is None:
        yield "workers is empty: nothing would run"
    yield from check_workers(config.workers)
    yield from check_single_flight(config.single_flight)
    yield from check_tenants(config.auth, config.tenants, config.prices)
    if config.workers_file is None:
        yield from check_pools(config.tenants, config.workers)
    if config.workers_file == "":
        yield "workers_file is empty: leave it out, or name a file"
    if (problem := ledger_url_error(config.ledger)) is not None:
        yield f"ledger {problem}"


def _locate_error(raw: dict[str, Any], message: str) -> str:
    """msgspec says `$.tenants[...]`: which of them, is found by trying each alone."""
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
