"""Makes the HTTP application of a gateway."""

from inferry.cli.config.schema import Config, ServerConfig
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.tenants import TenantWatcher
from inferry.domain.clock import Clock
from inferry.domain.runs import RunQueries
from inferry.ingress.app import App
from inferry.ingress.auth import Auth
from inferry.ingress.http.limits import HttpLimits
from inferry.observe.metrics import Metrics
from inferry.observe.tracing.tracer import Tracer


def make_app(
    app_type: type[App],
    config: Config,
    gateway: Gateway,
    metrics: Metrics,
    tenants: TenantWatcher,
    run_reader: RunQueries | None,
    tracer: Tracer | None,
    clock: Clock,
) -> App:
    return app_type(
        gateway,
        metrics,
        http_limits(config.server),
        Auth(tenants, allow_remote=config.auth.allow_remote, wall=clock.wall),
        admin_key=config.server.admin_key,
        tenants=tenants,
        run_reader=run_reader,
        problem=lambda: tenants.ledger_error,
        tracer=tracer,
    )


def http_limits(server: ServerConfig) -> HttpLimits:
    return HttpLimits(
        max_body_bytes=server.max_body_bytes,
        body_timeout_s=server.body_timeout_s,
        heartbeat_interval_s=server.heartbeat_interval_s,
        max_unread_bytes=server.max_unread_bytes,
        max_prompts=server.max_prompts,
    )
