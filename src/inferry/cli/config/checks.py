"""Checks of configuration values. Error messages name the path of the value."""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from inferry.cli.config.python_functions import is_function_path
from inferry.cli.config.secrets import check_literal_secrets
from inferry.cli.config.workers import (
    EmbeddedWorkerConfig,
    HttpWorkerConfig,
    OpenAIWorkerConfig,
    PythonWorkerConfig,
    RayWorkerConfig,
    UnsaltedWorkerConfig,
    VllmWorkerConfig,
    WorkerConfig,
)
from inferry.domain.keys import is_valid_tenant_name
from inferry.domain.lanes import Lane, LanePolicy

MIN_KV_TOKENS = 64

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_MAX_INT = 2**63 - 1
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def check_values(value: Any, path: str = "") -> Iterator[str]:
    """Keys that are not text, control characters and surrogates in keys and texts, and NaN, infinite and oversized
    numbers, anywhere below `path`.

    Values are not repeated: one may be a secret.
    """
    if isinstance(value, Mapping):
        for key, below in value.items():
            where = path or "the configuration"
            if not isinstance(key, str):
                yield f"{where}: the key {key} is read as {type(key).__name__}, not as text; write it in quotes"
            elif _CONTROL.search(key) or _SURROGATE.search(key):
                yield f"{where}: a key has control characters or is not valid Unicode ({key!a})"
            else:
                yield from check_values(below, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            yield from check_values(below, f"{path}[{index}]")
    elif isinstance(value, str):
        # Texts of pipelines are parts of prompts, which may have lines.
        text = value.replace("\n", "").replace("\t", "") if path.startswith("pipelines.") else value
        if _CONTROL.search(text):
            yield f"{path} has control characters or line breaks"
        elif _SURROGATE.search(value):
            yield f"{path} is not valid Unicode"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield f"{path} must be a finite number"
    elif isinstance(value, int) and not -_MAX_INT <= value <= _MAX_INT:
        yield f"{path} must be below 2^63"


def check_url(url: str) -> str | None:
    """Why this cannot be the URL of a worker; None if it can."""
    if not url.isascii() or any(char <= " " or char == "\x7f" for char in url):
        return "has spaces, control or non-ASCII characters"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "is not a URL: invalid host or port"
    if parts.scheme not in ("http", "https"):
        has = f"has scheme `{parts.scheme}` and " if parts.scheme and parts.netloc else ""
        return f"{has}must be of the form http://HOST:PORT or https://HOST"
    if "@" in parts.netloc:
        return "has a user name or password; use api_key"
    if not parts.hostname:
        return "has no host and must be of the form http://HOST:PORT or https://HOST"
    if port == 0:
        return "has port 0, which no server listens on"
    if parts.query or parts.fragment or "?" in url or "#" in url:
        return "has a query or a fragment and must be of the form http://HOST:PORT or https://HOST"
    return None


def check_host(host: str) -> str | None:
    """Why this cannot be an address to listen on; None if it can."""
    if not host:
        return "is empty; use 127.0.0.1 for this host only or 0.0.0.0 for all addresses"
    try:
        host.encode("idna")
    except UnicodeError:
        return "is not a host name or address"
    if any(char <= " " or char in "/@[]" for char in host):
        return "is not a host name or address: no spaces, brackets, slashes or user names"
    return None


def advise_on_lanes(policies: Mapping[Lane, LanePolicy]) -> Iterator[str]:
    """Warnings about settings without the expected effect."""
    for lane, policy in policies.items():
        for lower in policy.may_preempt:
            if not policies[lower].preemptible:
                yield (
                    f"lanes.{lane.name}.may_preempt names {lower.name}, whose jobs are not preempted until "
                    f"lanes.{lower.name}.preemptible is true"
                )


def check_lanes(policies: Mapping[Lane, LanePolicy]) -> Iterator[str]:
    """Error messages for lanes."""
    shares = math.fsum(policy.share for policy in policies.values())
    if shares > 1 + 1e-9:
        names = ", ".join(f"lanes.{lane.name}.share" for lane, policy in policies.items() if policy.share)
        yield f"{names} add up to {shares:g}; the sum must not exceed 1"
    for lane, policy in policies.items():
        where = f"lanes.{lane.name}"
        yield from check_range(where, policy, 0, math.inf, "max_wait_ms", "coalesce_ms", "ttft_ms_per_1k_tokens")
        yield from check_range(where, policy, 1, math.inf, "max_batch", "queue_limit", "long_output_tokens")
        yield from check_positive(where, policy, "ttft_ms", "itl_ms")
        if list(policy.prompt_buckets) != sorted({tokens for tokens in policy.prompt_buckets if tokens > 0}):
            yield f"{where}.prompt_buckets must be token counts in ascending order"
        if (policy.ttft_ms is None) != (policy.itl_ms is None):
            yield f"{where}.ttft_ms and {where}.itl_ms must be set together"
        if policy.coalesce_ms > policy.max_wait_ms:
            yield (
                f"{where}.coalesce_ms ({policy.coalesce_ms:g}) is longer than {where}.max_wait_ms "
                f"({policy.max_wait_ms:g}), which bounds it"
            )
        for lower in policy.may_preempt:
            if lower < lane:
                yield f"{where}.may_preempt names {lower.name}, which is a higher lane"
        if not 0 < policy.high_watermark <= 1:
            yield f"{where}.high_watermark must be above 0 and at most 1"
        for name in ("share", "reserve"):
            if not 0 <= getattr(policy, name) < 1:
                yield f"{where}.{name} must be at least 0 and below 1"
        if policy.groups == ():
            yield f"{where}.groups is empty: no worker could take its jobs (null allows all groups)"
        if policy.borrow_groups and policy.groups is None:
            yield f"{where}.borrow_groups needs {where}.groups: without them the lane may use all workers anyway"
        if policy.borrow_groups and policy.is_live:
            yield f"{where}.borrow_groups is for batch lanes: {where}.ttft_ms and {where}.itl_ms must be null"


def check_groups(policies: Mapping[Lane, LanePolicy], known: Collection[str]) -> Iterator[str]:
    """Groups of lanes that no worker is in."""
    for lane, policy in policies.items():
        for group in policy.groups or ():
            if group not in known:
                yield f"lanes.{lane.name}.groups names {group}, but no worker is in that group"


def _check_ray(where: str, worker: RayWorkerConfig, workers: Sequence[WorkerConfig]) -> Iterator[str]:
    """Error messages for a worker on Ray, but for its engine's."""
    yield from check_range(where, worker, 0, math.inf, "min_replicas", "cpus_per_replica", "gpus_per_replica")
    yield from check_range(where, worker, 1, math.inf, "max_replicas")
    yield from check_positive(where, worker, "max_scale_up_wait_s", "drain_timeout_s")
    if worker.min_replicas > worker.max_replicas:
        yield f"{where}.min_replicas ({worker.min_replicas}) is above {where}.max_replicas"
    others = [one for one in workers if isinstance(one, RayWorkerConfig) and one is not worker]
    if any(one.address != worker.address for one in others):
        yield f"{where}.address differs from that of another worker of kind ray"
    if any(one.app_name == worker.app_name for one in others):
        yield f"{where}.app `{worker.app_name}` is used by another worker"
    if any(one.group == worker.group for one in workers if one is not worker):
        yield f"{where}.engine.group `{worker.group}` has other workers: the gateway scales a group as a whole"
    yield from (f"{where}.engine.{problem.partition('.')[2]}" for problem in check_workers([worker.engine]))


def _check_isolation(where: str, worker: WorkerConfig) -> Iterator[str]:
    if isinstance(worker, UnsaltedWorkerConfig) and worker.pool is None and worker.isolation is None:
        yield (
            f"{where}.isolation: a server of kind {worker.__struct_config__.tag} cannot salt its prefix cache, so "
            "tenants would share it; reserve it for one tenant with `pool`, or write `isolation: none`"
        )


def check_workers(workers: Sequence[WorkerConfig]) -> Iterator[str]:
    """Error messages for workers."""
    seen: set[str] = set()
    for index, worker in enumerate(workers):
        where = f"workers[{index}]"
        if worker.name in seen:
            yield f"{where}.name `{worker.name}` is used by an earlier worker"
        seen.add(worker.name)
        if isinstance(worker, EmbeddedWorkerConfig) and worker.kv_tokens not in ("auto", None):
            yield from check_range(where, worker, MIN_KV_TOKENS, math.inf, "kv_tokens")
        if isinstance(worker, HttpWorkerConfig):
            yield from check_range(where, worker, 1, math.inf, "kv_tokens")
        if worker.pool is not None and not is_valid_tenant_name(worker.pool):
            yield f"{where}.pool must be a tenant's name"
        if not _NAME.fullmatch(worker.name):
            yield f"{where}.name must be 1 to 64 letters, digits, dots, dashes and underscores"
        counts = (
            "max_sequences",
            "prefill_tokens",
            "chunk_tokens",
            "decode_wait_ms",
            "threads",
            "context_tokens",
            "max_inputs_per_request",
            "max_adapter_rank",
            "max_batch",
            "min_prefill_tokens",
        )
        if isinstance(worker, RayWorkerConfig):
            yield from _check_ray(where, worker, workers)
        yield from check_range(where, worker, 1, math.inf, "default_output_tokens")
        yield from check_range(where, worker, 1, math.inf, *counts)
        yield from check_range(where, worker, 0, math.inf, "media_tokens", "gpus", "batch_price_factor", "max_adapters")
        yield from check_range(where, worker, 0.01, 1, "memory_share")
        yield from check_positive(where, worker, "connect_timeout_s", "first_token_timeout_s", "inter_token_timeout_s")
        yield from check_positive(where, worker, "call_timeout_s")
        yield from _check_isolation(where, worker)
        if isinstance(worker, PythonWorkerConfig) and not is_function_path(worker.function):
            yield f"{where}.function must be written as package.module:name"
        if isinstance(worker, OpenAIWorkerConfig) and worker.api_key and worker.api_keys:
            yield f"{where}.api_key and {where}.api_keys are mutually exclusive"
        if isinstance(worker, OpenAIWorkerConfig) and worker.batch_api is not None and not worker.models:
            yield f"{where}.batch_api requires {where}.models"
        yield from (f"{where}.{problem}" for problem in check_literal_secrets(worker))
        if isinstance(worker, HttpWorkerConfig) and (problem := check_url(worker.url)) is not None:
            yield f"{where}.url {problem}"
        if isinstance(worker, HttpWorkerConfig) and worker.tasks == ():
            yield f"{where}.tasks is empty: remove it to detect the tasks"
        if not all(worker.models):
            yield f"{where}.models contains an empty name"
        if isinstance(worker, HttpWorkerConfig | EmbeddedWorkerConfig) and not all(worker.adapters):
            yield f"{where}.adapters contains an empty name"
        if isinstance(worker, EmbeddedWorkerConfig):
            yield from _check_adapters(where, worker)
        if worker.precision == "":
            yield f"{where}.precision must not be empty"
        if not worker.group:
            yield f"{where}.group must not be empty"


def advise_on_precisions(workers: Sequence[WorkerConfig]) -> Iterator[str]:
    """Models that some workers serve in a stated precision and others in an unstated one."""
    served: dict[tuple[str, str | None], set[str | None]] = {}
    for worker in workers:
        for model in worker.models:
            served.setdefault((model, worker.pool), set()).add(worker.precision)
    for (model, _), precisions in served.items():
        if None in precisions and len(precisions) > 1:
            yield (
                f"some workers of model {model} state no precision: an answer that begins there may be continued in "
                "another one"
            )


def check_roles(workers: Sequence[WorkerConfig]) -> Iterator[str]:
    """Error messages for prefill workers whose KV no other worker takes over."""
    servers = [worker for worker in workers if isinstance(worker, VllmWorkerConfig)]
    for index, worker in enumerate(workers):
        if not isinstance(worker, VllmWorkerConfig) or worker.role != "prefill":
            continue
        decoding = [
            one
            for one in servers
            if one.role == "decode" and (one.pool, one.precision) == (worker.pool, worker.precision)
        ]
        # A worker without names has those that its server lists at startup.
        for model in worker.models or ("",):
            if not any(not model or not one.models or model in one.models for one in decoding):
                served = f" for the model {model}" if model else ""
                yield (
                    f"workers[{index}].role is prefill, but there is no worker of kind vllm and role decode{served} "
                    "with the same pool and precision"
                )


def _check_adapters(where: str, worker: EmbeddedWorkerConfig) -> Iterator[str]:
    if worker.max_adapters is not None and worker.max_adapters < len(worker.adapters):
        yield f"{where}.max_adapters must be at least {len(worker.adapters)}, the number of {where}.adapters"
    for name in sorted(worker.adapters.keys() & set(worker.models)):
        yield f"{where}.adapters has the name {name} of {where}.models"


def check_range(where: str, struct: Struct, low: float, high: float, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(struct, name, None)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            limit = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            yield f"{where}.{name} must be {limit}"


def check_positive(where: str, struct: Struct, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(struct, name, None)
        if value is not None and not (value > 0 and math.isfinite(value)):
            yield f"{where}.{name} must be above 0"
