"""Checks of a whole configuration: values of the right type that are invalid."""

import math
from collections.abc import Iterator

from inferry.cli.config.alerts import check_alerts
from inferry.cli.config.callbacks import check_callbacks
from inferry.cli.config.checks import (
    check_groups,
    check_host,
    check_lanes,
    check_positive,
    check_range,
    check_roles,
    check_workers,
)
from inferry.cli.config.cluster import check_cluster
from inferry.cli.config.composed import check_composed, reached_models, served_models
from inferry.cli.config.histories import check_histories
from inferry.cli.config.overflow import check_overflow
from inferry.cli.config.pipelines import check_pipelines
from inferry.cli.config.retention import check_retention
from inferry.cli.config.scaling import check_scaling
from inferry.cli.config.schema import Config, HealthConfig, ServerConfig
from inferry.cli.config.sessions import check_sessions
from inferry.cli.config.single_flight import check_single_flight
from inferry.cli.config.storage import check_storage
from inferry.cli.config.tenants import check_pools, check_tenants
from inferry.cli.config.tracing import check_tracing
from inferry.cli.config.trials import check_settings
from inferry.cli.config.workers import RayWorkerConfig
from inferry.domain.ledger_urls import ledger_url_error

MIN_ADMIN_KEY_CHARS = 16


def check_config(config: Config) -> Iterator[str]:
    """Error messages for values of the right type that are invalid."""
    yield from _check_server(config.server)
    yield from check_lanes(config.lane_policies())
    yield from _check_health(config.health)
    if not config.workers and config.workers_file is None:
        yield "workers is empty"
    yield from check_workers(config.workers)
    if config.workers_file is None:
        yield from check_roles(config.workers)
        yield from check_groups(config.lane_policies(), {worker.group for worker in config.workers})
    yield from check_composed(
        config.routes,
        config.cascades,
        config.ensembles,
        config.workers,
        has_workers_file=config.workers_file is not None,
    )
    yield from check_scaling(config.scaling)
    yield from check_settings(config.settings)
    yield from check_overflow(config.overflow, config.workers, is_shared=config.cluster.redis is not None)
    yield from check_sessions(config.sessions)
    yield from check_single_flight(config.single_flight)
    yield from check_storage(config.storage)
    yield from check_histories(config.histories, config.storage.store)
    yield from check_retention(config.retention)
    yield from check_callbacks(config.callbacks, config.storage.job_ttl_s)
    yield from check_tracing(config.tracing)
    yield from check_alerts(config.alerts)
    yield from check_pipelines(
        config.pipelines,
        served_models(config.workers) | {*config.routes, *config.cascades, *config.ensembles},
        reached_models(config.routes, config.cascades, config.ensembles),
    )
    yield from check_tenants(config.auth, config.tenants, config.prices)
    if config.workers_file is None:
        yield from check_pools(config.tenants, config.workers)
    if config.workers_file == "":
        yield "workers_file is empty: remove it, or name a file"
    if (problem := ledger_url_error(config.ledger)) is not None:
        yield f"ledger {problem}"
    if config.cluster.redis is not None and any(isinstance(worker, RayWorkerConfig) for worker in config.workers):
        yield "workers of kind ray cannot be used with cluster.redis: a replica has one gateway"
    yield from check_cluster(config.cluster, config.ledger)


def _check_server(server: ServerConfig) -> Iterator[str]:
    yield from check_positive(
        "server", server, "max_body_bytes", "body_timeout_s", "idle_timeout_s", "heartbeat_interval_s"
    )
    yield from check_positive("server", server, "max_unread_bytes", "max_queued_bytes", "request_timeout_s")
    yield from check_positive("server", server, "max_prompts")
    yield from check_range("server", server, 0, 65_535, "port")
    yield from check_range("server", server, 0, math.inf, "drain_timeout_s")
    if (problem := check_host(server.host)) is not None:
        yield f"server.host {problem}"
    if server.admin_key is not None and len(server.admin_key) < MIN_ADMIN_KEY_CHARS:
        yield f"server.admin_key must have at least {MIN_ADMIN_KEY_CHARS} characters"


def _check_health(health: HealthConfig) -> Iterator[str]:
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
