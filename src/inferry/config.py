"""One YAML file (and the environment) in, frozen per-component configuration out.

Every key has a default. A key that does not exist, or a value that cannot be, is an error that names its path and,
where there is one, the key that was probably meant.
"""

import difflib
import math
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import UNSET, Struct, UnsetType

from inferry.domain.jobs import DEFAULT_LANES, Lane, LanePolicy

ENV_PREFIX = "INFERRY_"
NOT_KEYS = frozenset({"INFERRY_HOME"})
"""Environment variables of the same family that are read elsewhere."""
LEAST_KV_TOKENS = 64
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


class ConfigError(Exception):
    """The configuration cannot be used; the message says where and why."""


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP surface."""

    host: str = "127.0.0.1"
    """Address to listen on. There is no authentication yet: keep it on loopback or behind something that has it."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Largest request body; more is answered with 413 `body_too_large`."""
    body_timeout_s: float = 30.0
    """How long a request body may take to arrive."""
    idle_timeout_s: float = 75.0
    """How long a connection may stay open without a request."""
    heartbeat_s: float = 15.0
    """A stream that has nothing to say for this long gets its headers and an SSE comment."""
    max_unread_bytes: int = 8 * 1024 * 1024
    """How far a client may fall behind its stream; one that leaves more unread is cut off and its call cancelled."""
    drain_grace_s: float = 30.0
    """After SIGTERM: how long accepted calls may still run before they are ended with an error."""


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
    """Most jobs queued in the lane; one more is answered with 429 `queue_full`."""
    share: float | UnsetType = UNSET
    """Part of the admitted prompt tokens this lane is owed while higher lanes are busy."""
    reserve: float | UnsetType = UNSET
    """Part of every worker's room that jobs of this lane leave to higher lanes."""
    ttft_ms: float | UnsetType | None = UNSET
    """Promise: time to the first token. Measured as `inferry_promises_total`; null promises nothing."""
    gap_ms: float | UnsetType | None = UNSET
    """Promise: time each further token may take."""


class LanesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The three lanes."""

    P0: LaneConfig = LaneConfig()
    """Interactive."""
    P1: LaneConfig = LaneConfig()
    """Standard."""
    P2: LaneConfig = LaneConfig()
    """Batch."""


class EmbeddedWorkerConfig(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="embedded"
):
    """Inferry's own engine in a process of its own (needs the `engine` extra)."""

    name: str = "local"
    """How the worker is called in headers, metrics and the ledger."""
    model: str | None = None
    """A Hugging Face model directory; null makes and uses the small built-in model."""
    models: tuple[str, ...] = ()
    """Names the model is served under; none: the directory's name, or `inferry-tiny`."""
    group: str = "default"
    """Worker group."""
    max_sequences: int = 64
    """Most sequences that run at once."""
    kv_tokens: int = 65_536
    """Room of the KV cache, in tokens."""
    chunk_tokens: int = 256
    """Most prompt tokens computed in one engine step: smaller keeps live token gaps short, larger prefills faster."""
    room: Literal["adaptive", "fixed"] = "adaptive"
    """How much of the engine is used: computed from what lanes promise and what it is seen to do, or always all."""
    threads: int | None = None
    """CPU threads of the engine; null picks."""
    default_output_tokens: int = 512
    """Output limit of a call that names none."""


class VllmWorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="vllm"):
    """A vLLM server, or anything else that speaks the OpenAI API, over HTTP."""

    name: str
    """How the worker is called in headers, metrics and the ledger."""
    url: str
    """Where the server is, without `/v1`."""
    models: tuple[str, ...] = ()
    """Models to send to it; none: what its `/v1/models` lists at start."""
    group: str = "default"
    """Worker group."""
    api_key: str | None = None
    """Sent upstream as a bearer token. Client keys never are."""
    max_sequences: int = 256
    """Most calls in flight to this server."""
    kv_tokens: int | None = None
    """Most KV tokens the calls in flight may be expected to need; null does not bound it."""
    prefill_tokens: int | None = None
    """Most prompt tokens sent and still without a first token, those expected in its prefix cache not counted; this is
    what first tokens of live calls wait behind. null does not bound it."""
    room: Literal["adaptive", "fixed"] = "adaptive"
    """How much of the server is used: computed from what lanes promise and what it is seen to do, within the figures
    above; or always all they allow."""
    chunk_tokens: int | None = None
    """What the server computes in one step (vLLM's `--max-num-batched-tokens`); null where it is not known."""
    engine_priority: bool = True
    """Tell the server each call's lane as its `priority`, where it takes that (vLLM's `--scheduling-policy priority`).
    It is asked once, at the start."""
    connect_timeout_s: float = 5.0
    """How long a connection may take."""
    silence_timeout_s: float = 120.0
    """How long the server may say nothing before the call fails with 504 `worker_timeout`."""


WorkerConfig = EmbeddedWorkerConfig | VllmWorkerConfig


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `inferry serve` needs to know."""

    server: ServerConfig = ServerConfig()
    """The HTTP surface."""
    lanes: LanesConfig = LanesConfig()
    """The promises, per lane."""
    workers: tuple[WorkerConfig, ...] = (EmbeddedWorkerConfig(),)
    """What runs the work."""
    ledger: str = "sqlite:///inferry.db"
    """Where one row per attempt is kept."""

    def lane_policies(self) -> dict[Lane, LanePolicy]:
        return {lane: _lane_policy(lane, getattr(self.lanes, lane.name)) for lane in Lane}


def load(path: Path | None = None, env: Mapping[str, str] | None = None) -> Config:
    """Read `path` (or nothing but defaults), lay the environment over it, check it."""
    raw: Any = {}
    if path is not None:
        try:
            raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8 text") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        raw = {} if raw is None else raw
    return parse(raw, os.environ if env is None else env)


def parse(raw: Any, env: Mapping[str, str] | None = None) -> Config:
    """A configuration from what a YAML document holds."""
    if not isinstance(raw, dict):
        raise ConfigError(f"the configuration must be a mapping of keys, not {_kind(raw)}")
    raw = _with_environment(raw, env or {})
    _refuse_unknown_keys(raw, Config, "")
    _read_off_as_a_word(raw)
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_plain(str(error))) from None
    problems = list(_impossible(config))
    if problems:
        raise ConfigError("; ".join(problems))
    return config


def dump(config: Config) -> str:
    """The whole configuration as YAML, defaults included; secrets are left out."""
    raw = msgspec.to_builtins(config)
    raw["lanes"] = {
        lane.name: {name: getattr(policy, name) for name in LaneConfig.__struct_fields__}
        for lane, policy in config.lane_policies().items()
    }
    for worker in raw["workers"]:
        if worker.get("api_key"):
            worker["api_key"] = "***"
    return yaml.safe_dump(raw, sort_keys=False, default_flow_style=False)


def _lane_policy(lane: Lane, override: LaneConfig) -> LanePolicy:
    given = {name: value for name in LaneConfig.__struct_fields__ if (value := getattr(override, name)) is not UNSET}
    return msgspec.structs.replace(DEFAULT_LANES[lane], **given)


def _with_environment(raw: dict[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """INFERRY_SERVER__PORT=9000 sets server.port; values are read as YAML. A name that sets nothing is an error."""
    raw = dict(raw)
    for name, text in env.items():
        if not name.startswith(ENV_PREFIX) or name in NOT_KEYS:
            continue
        if "__" not in name and name != ENV_PREFIX + "LEDGER":
            leaf = name.removeprefix(ENV_PREFIX)
            hint = (
                f"; did you mean {ENV_PREFIX}SERVER__{leaf}?" if leaf.lower() in ServerConfig.__struct_fields__ else ""
            )
            raise ConfigError(f"the environment variable {name} sets nothing{hint}")
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
            here[leaf.lower()] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"the environment variable {name} is not valid YAML") from None
    return raw


def _read_off_as_a_word(raw: dict[str, Any]) -> None:
    """YAML reads a bare `off` as false; for a window it is a mode."""
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


def _impossible(config: Config) -> Iterator[str]:
    """Everything that is of the right type and cannot be, as sentences."""
    server = config.server
    yield from _not_above_zero("server", server, "max_body_bytes", "body_timeout_s", "idle_timeout_s", "heartbeat_s")
    yield from _not_above_zero("server", server, "max_unread_bytes")
    yield from _outside("server", server, 0, 65_535, "port")
    yield from _outside("server", server, 0, math.inf, "drain_grace_s")
    for lane, policy in config.lane_policies().items():
        where = f"lanes.{lane.name}"
        yield from _outside(where, policy, 0, math.inf, "max_wait_ms", "coalesce_ms")
        yield from _outside(where, policy, 1, math.inf, "max_batch", "queue_limit")
        yield from _not_above_zero(where, policy, "ttft_ms", "gap_ms")
        if policy.coalesce_ms > policy.max_wait_ms:
            yield (
                f"{where}.coalesce_ms ({policy.coalesce_ms:g}) is longer than {where}.max_wait_ms "
                f"({policy.max_wait_ms:g}), which bounds it"
            )
        for name in ("share", "reserve"):
            if not 0 <= getattr(policy, name) < 1:
                yield f"{where}.{name} must be at least 0 and below 1"
    if not config.workers:
        yield "workers is empty: nothing would run"
    seen: set[str] = set()
    for index, worker in enumerate(config.workers):
        where = f"workers[{index}]"
        if worker.name in seen:
            yield f"{where}.name `{worker.name}` is taken by an earlier worker"
        seen.add(worker.name)
        if isinstance(worker, EmbeddedWorkerConfig) and worker.kv_tokens < LEAST_KV_TOKENS:
            yield f"{where}.kv_tokens must be at least {LEAST_KV_TOKENS}"
        if not _NAME.fullmatch(worker.name):
            yield f"{where}.name must be 1 to 64 letters, digits, dots, dashes and underscores"
        counts = ("max_sequences", "kv_tokens", "prefill_tokens", "chunk_tokens", "threads", "default_output_tokens")
        yield from _outside(where, worker, 1, math.inf, *counts)
        yield from _not_above_zero(where, worker, "connect_timeout_s", "silence_timeout_s")
        if isinstance(worker, VllmWorkerConfig) and not _is_address(worker.url):
            yield f"{where}.url must be of the form http://HOST:PORT or https://HOST"
    if not config.ledger.startswith("sqlite:///"):
        yield "ledger must be a URL of the form sqlite:///PATH"


def _outside(where: str, struct: Struct, low: float, high: float, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(struct, name, None)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            limit = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            yield f"{where}.{name} must be {limit}"


def _not_above_zero(where: str, struct: Struct, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(struct, name, None)
        if value is not None and not (value > 0 and math.isfinite(value)):
            yield f"{where}.{name} must be above 0"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        )
    except ValueError:
        return False


def _plain(message: str) -> str:
    """msgspec's `Expected `int`, got `str` - at `$.server.port`` with the path first."""
    what, _, where = message.partition(" - at ")
    return f"{where.strip('`').removeprefix('$.')}: {what}" if where else what


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "text" if isinstance(value, str) else type(value).__name__
