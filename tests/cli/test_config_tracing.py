"""The `tracing` section: what is refused, and where secrets come from."""

import sys
from typing import Any

import pytest

from inferry.cli.config.loader import dump, parse
from inferry.cli.config.schema import ConfigError
from inferry.cli.config.tracing import TracingConfig
from inferry.cli.tracing_wiring import make_tracing
from inferry.domain.clock import SystemClock
from inferry.observe.metrics import Metrics


@pytest.mark.parametrize(
    ("tracing", "named"),
    [
        ({"endpoint": "127.0.0.1:4318"}, "tracing.endpoint"),
        ({"endpoint": "http://user:pw@127.0.0.1:4318/v1/traces"}, "tracing.endpoint"),
        ({"sample_ratio": 1.5}, "tracing.sample_ratio"),
        ({"max_traces_per_s": 0}, "tracing.max_traces_per_s"),
        ({"timeout_s": 0}, "tracing.timeout_s"),
        ({"headers": {"a b": "c"}}, "tracing.headers"),
        ({"headers": {"a": "c\r\nd"}}, "tracing.headers"),
        ({"colour": "red"}, "tracing"),
    ],
)
def test_an_invalid_value_is_named(tracing: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse({"tracing": tracing})


def test_literal_headers_are_not_printed() -> None:
    config = parse({"tracing": {"headers": {"authorization": "s3cret", "x-team": "$TEAM"}}})
    assert "s3cret" not in dump(config)
    assert "$TEAM" in dump(config)
    assert config.tracing.header_values({"TEAM": "blue"}) == {"authorization": "s3cret", "x-team": "blue"}


def test_traces_are_off_without_an_endpoint() -> None:
    assert make_tracing(TracingConfig(), SystemClock(), Metrics([], [])) is None


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    config = TracingConfig(endpoint="http://127.0.0.1:1/v1/traces", headers={"authorization": "$NO_SUCH_TOKEN"})
    with pytest.raises(ConfigError, match="NO_SUCH_TOKEN is not set"):
        make_tracing(config, SystemClock(), Metrics([], []))


def test_the_value_of_a_variable_is_trimmed_and_must_fit_in_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TracingConfig(endpoint="http://127.0.0.1:1/v1/traces", headers={"authorization": "$OTLP_TOKEN"})
    assert config.header_values({"OTLP_TOKEN": " Bearer s3cret\n"}) == {"authorization": "Bearer s3cret"}
    for value in ("Bearer s3\ncret", "Bearer s3crét", "\n"):
        monkeypatch.setenv("OTLP_TOKEN", value)
        with pytest.raises(ConfigError, match="OTLP_TOKEN is not set, or has characters no header may have") as raised:
            make_tracing(config, SystemClock(), Metrics([], []))
        assert "Bearer" not in str(raised.value)
    with pytest.raises(ConfigError, match="invalid name or value"):
        parse({"tracing": {"headers": {"authorization": " Bearer s3cret"}}})


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "inferry.observe.tracing.exporter", raising=False)
    with pytest.raises(ConfigError, match=r"inferry\[otel\]"):
        make_tracing(TracingConfig(endpoint="http://127.0.0.1:1/v1/traces"), SystemClock(), Metrics([], []))
