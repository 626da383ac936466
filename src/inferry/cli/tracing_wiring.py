"""Makes the tracer and its exporter from the configuration. Part of the composition root."""

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from inferry._version import __version__
from inferry.cli.config.schema import ConfigError
from inferry.cli.config.tracing import TracingConfig, unusable_variables
from inferry.domain.clock import Clock
from inferry.observe.metrics import Metrics
from inferry.observe.tracing.tracer import Tracer

if TYPE_CHECKING:
    from inferry.observe.tracing.exporter import SpanExporter


class Tracing(NamedTuple):
    tracer: Tracer
    exporter: "SpanExporter"

    async def close(self) -> None:
        await asyncio.to_thread(self.exporter.close)


def make_tracing(config: TracingConfig, clock: Clock, metrics: Metrics) -> Tracing | None:
    """The tracer and its exporter; None where no endpoint is configured."""
    if config.endpoint is None:
        return None
    if unusable := unusable_variables(config):
        raise ConfigError(
            f"tracing.headers: the environment variable {unusable[0]} is not set, or has characters no header may have"
        )
    try:
        from inferry.observe.tracing.exporter import SpanExporter, otlp_exporter
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracing needs {error.name}: install the `otel` extra "
            "(pip install 'inferry[otel]', in a clone pip install '.[otel]')"
        ) from None
    exporter = SpanExporter(
        otlp_exporter(config.endpoint, config.header_values(), config.timeout_s), config.service_name, __version__
    )
    metrics.watch(
        {
            "inferry_trace_spans_exported_total": lambda: exporter.exported,
            "inferry_trace_spans_failed_total": lambda: exporter.failed,
            "inferry_traces_dropped_total": lambda: exporter.dropped_calls,
        }
    )
    return Tracing(Tracer(config.sample_ratio, clock, exporter.export, max_per_s=config.max_traces_per_s), exporter)
