"""The configuration: one YAML file and environment variables, as frozen Structs per component.

Every key has a default. An unknown key or an invalid value is an error that names its path and the closest known key.
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
"""Environment variables with this prefix that are not configuration."""
ADMIN_KEY = "INFERRY_ADMIN_KEY"
MIN_ADMIN_KEY_CHARS = 16


class ConfigError(Exception):
    """The configuration is invalid; the message names the path and the reason."""


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on. Addresses other than loopback require a key, see `auth`."""
    port: int = 8000
    """Port to listen on; 0 selects a free one."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Maximum request body; larger bodies get 413 `body_too_large`."""
    body_timeout_s: float = 30.0
    """Time for a request body to arrive, in seconds."""
    idle_timeout_s: float = 75.0
    """Time a connection may stay open without a request, in seconds."""
    heartbeat_interval_s: float = 15.0
    """After this many seconds without an event a stream gets its headers and an SSE comment."""
    max_unread_bytes: int = 8 * 1024 * 1024
    """Unread bytes of a stream after which its connection is reset and its call cancelled."""
    max_queued_bytes: int = 512 * 1024 * 1024
    """Maximum bytes of request bodies in all queues; beyond it calls get 429 `queue_full`."""
    retry_slots: bool = True
    """Whether a call refused with `queue_full` gets a retry slot: a time of its own at which it is admitted before
    new calls. Without slots the time to retry is when everything queued now will have been sent."""
    drain_timeout_s: float = 30.0
    """After SIGTERM: time for accepted calls to complete, in seconds. The same for calls of a removed worker."""
    admin_key: str | None = None
    """Bearer token for `/admin/…`; INFERRY_ADMIN_KEY sets it too. null admits clients on this host only."""


class HealthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Circuit breaker, liveness checks, slow start and hedged retries of workers."""

    failure_threshold: int = 3
    """Different jobs lost in a row after which the circuit breaker opens. One job alone never opens it."""
    failure_window_s: float = 30.0
    """The breaker also opens if `failure_threshold` jobs are lost within this time (seconds) and they are at least
    `failure_ratio` of the jobs that ended there."""
    failure_ratio: float = 0.5
    """See `failure_window_s`."""
    initial_backoff_s: float = 0.25
    """Seconds until a worker with an open breaker is probed with one token; doubles with every failure."""
    max_backoff_s: float = 10.0
    """Maximum backoff, in seconds."""
    slow_start_share: float = 0.1
    """Fraction of its capacity that a recovered worker gets first; doubles until it has all of it."""
    slow_start_doubling_s: float = 1.0
    """Seconds between two doublings."""
    liveness_interval_s: float = 2.0
    """Interval at which an idle HTTP worker is polled: its metrics page, or its models. Hosted APIs (`kind:
    openai`) are not polled."""
    liveness_timeout_s: float = 1.5
    """A worker is down if two polls in a row stay unanswered and nothing else is received for this many seconds.
    Slow responses and long prompts extend it."""
    no_worker_timeout_s: float = 30.0
    """How long a call without a deadline waits for a worker of its model, in seconds, before it gets 503
    `no_worker`; 0 refuses at once. A call with a deadline waits until the deadline."""
    max_hedged_retry_ratio: float = 0.02
    """Maximum fraction of calls that are retried on another worker because their first token is overdue and their
    worker silent; 0 disables hedged retries."""


class LaneConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One lane; omitted keys keep the lane's default."""

    max_wait_ms: float | UnsetType = UNSET
    """Longest voluntary hold of a job for any reason; after it the job is sent alone."""
    coalesce_ms: float | UnsetType = UNSET
    """Longest hold of a job in a batching window, from its arrival."""
    window: Literal["adaptive", "fixed", "off"] | UnsetType = UNSET
    """`adaptive` holds only where it pays (busy workers that pad), `fixed` always holds, `off` never."""
    max_batch: int | UnsetType = UNSET
    """A batching window closes when it has this many jobs."""
    queue_limit: int | UnsetType = UNSET
    """Maximum number of queued jobs."""
    high_watermark: float | UnsetType = UNSET
    """Fraction of `queue_limit` from which new calls get 429 `queue_full`. The rest is for calls with retry slots
    and for tenants that hold less than their part of the queue."""
    share: float | UnsetType = UNSET
    """Guaranteed fraction of the admitted prompt tokens while higher lanes are busy."""
    reserve: float | UnsetType = UNSET
    """Fraction of every worker's capacity that jobs of this lane leave to higher lanes."""
    may_preempt: tuple[Literal["P0", "P1", "P2"], ...] | UnsetType = UNSET
    """Lower lanes whose running jobs may be preempted for a job of this lane; they resume later."""
    preemptible: bool | UnsetType = UNSET
    """Whether running jobs of this lane may be preempted by a lane that names it."""
    ttft_ms: float | UnsetType | None = UNSET
    """SLO target: time to first token. Measured by `inferry_slo_attainment_total`; null sets no target."""
    itl_ms: float | UnsetType | None = UNSET
    """SLO target: inter-token latency."""


class LanesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The three lanes."""

    P0: LaneConfig = LaneConfig()
    """Interactive."""
    P1: LaneConfig = LaneConfig()
    """Standard."""
    P2: LaneConfig = LaneConfig()
    """Batch."""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of `inferry serve`."""

    server: ServerConfig = ServerConfig()
    """The HTTP server."""
    lanes: LanesConfig = LanesConfig()
    """SLO targets, shares and limits per lane."""
    workers: tuple[WorkerConfig, ...] = (EmbeddedWorkerConfig(),)
    """The engines. With a `workers_file` and no `workers` there is no built-in worker."""
    workers_file: str | None = None
    """A YAML list of further workers, written as in `workers` and checked every second: workers are added, replaced
    and removed as it changes. An invalid file is logged and changes nothing."""
    health: HealthConfig = HealthConfig()
    """Failure detection and recovery of workers."""
    auth: AuthConfig = AuthConfig()
    """Whether calls need a key."""
    tenants: dict[str, TenantConfig] = {}
    """Limits by tenant name. `/admin/tenants` and `inferry tenants` add others."""
    prices: dict[str, PriceConfig] = {}
    """Prices by model name; `*` is any other model."""
    single_flight: SingleFlightConfig = SingleFlightConfig()
    """When calls share one execution."""
    ledger: str = "sqlite:///inferry.db"
    """Database of attempts and keys. One gateway at a time writes to it: a second `inferry serve` on the same file
    exits with an error. `"sqlite:///:memory:"` keeps everything in the process."""

    def configured_tenants(self) -> dict[str, Tenant]:
        return {name: one.tenant(name) for name, one in self.tenants.items()}

    def price_list(self) -> dict[str, Price]:
        return {model: one.price() for model, one in self.prices.items()}

    def lane_policies(self) -> dict[Lane, LanePolicy]:
        return {lane: _lane_policy(lane, getattr(self.lanes, lane.name)) for lane in Lane}


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
    """The name of the secret's environment variable, or asterisks."""
    return secret if secret.startswith("$") else "***"


def _lane_policy(lane: Lane, override: LaneConfig) -> LanePolicy:
    given = {name: value for name in LaneConfig.__struct_fields__ if (value := getattr(override, name)) is not UNSET}
    if "may_preempt" in given:
        given["may_preempt"] = tuple(Lane[name] for name in given["may_preempt"])
    return msgspec.structs.replace(DEFAULT_LANES[lane], **given)


def _apply_environment(raw: dict[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """INFERRY_SERVER__PORT=9000 sets server.port; values are read as YAML. An unknown name is an error."""
    raw = dict(raw)
    for name, text in env.items():
        if not name.startswith(ENV_PREFIX) or name in NON_CONFIG_VARIABLES:
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


def _check_values(config: Config) -> Iterator[str]:
    """Error messages for values of the right type that are invalid."""
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
        yield "workers is empty"
    yield from check_workers(config.workers)
    yield from check_single_flight(config.single_flight)
    yield from check_tenants(config.auth, config.tenants, config.prices)
    if config.workers_file is None:
        yield from check_pools(config.tenants, config.workers)
    if config.workers_file == "":
        yield "workers_file is empty: remove it, or name a file"
    if (problem := ledger_url_error(config.ledger)) is not None:
        yield f"ledger {problem}"


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
