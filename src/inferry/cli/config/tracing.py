"""The `tracing` section of the configuration: where spans are exported to."""

import os
import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from inferry.cli.config.checks import check_positive, check_range, check_url

_HEADER_NAME = re.compile(r"[A-Za-z0-9-]+")
_HEADER_VALUE = re.compile(r"([\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?)?")


class TracingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry traces. They need the extra `otel`; spans hold nothing of prompts and outputs."""

    endpoint: str | None = None
    """URL of an OTLP/HTTP receiver for traces, for example `http://127.0.0.1:4318/v1/traces`. null: no traces."""
    sample_ratio: float = 1.0
    """Fraction of traces that begin in the gateway and are exported, from 0 to 1. A call with a `traceparent` is
    exported if its client says so, whatever the fraction."""
    max_traces_per_s: float | None = 100.0
    """Most traces per second that begin in the gateway and are exported: a trace costs some 0.2 ms of CPU time.
    null: no limit. Calls with a `traceparent` are not limited."""
    headers: dict[str, str] = {}
    """Headers of export requests, for example for authorization. A value `$NAME` is read from the environment."""
    service_name: str = "inferry"
    """`service.name` of the spans."""
    timeout_s: float = 10.0
    """Maximum time of one export request and its retries, in seconds."""

    def header_values(self, env: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The headers with the values of environment variables, without blanks and line ends around them."""
        return {
            name: env.get(value[1:], "").strip() if value.startswith("$") else value
            for name, value in self.headers.items()
        }


def check_tracing(config: TracingConfig) -> Iterator[str]:
    yield from check_range("tracing", config, 0, 1, "sample_ratio")
    yield from check_positive("tracing", config, "timeout_s")
    if config.max_traces_per_s is not None:
        yield from check_positive("tracing", config, "max_traces_per_s")
    if config.endpoint is not None and (problem := check_url(config.endpoint)) is not None:
        yield f"tracing.endpoint {problem}"
    for name, value in config.headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            yield "tracing.headers has an invalid name or value"


def unusable_variables(config: TracingConfig, env: Mapping[str, str] = os.environ) -> list[str]:
    """The environment variables that headers name and that are not set, or hold what no header may have. HTTP clients
    would quote such a value in their errors."""
    values = config.header_values(env)
    return [
        given[1:]
        for name, given in config.headers.items()
        if given.startswith("$") and (not values[name] or not _HEADER_VALUE.fullmatch(values[name]))
    ]
