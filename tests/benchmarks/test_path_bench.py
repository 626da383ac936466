"""The arms of the benchmark of a call's path."""

from benchmarks.path import ADMIN_KEY, LIMITS, TENANT, config_for_backend, config_with_everything
from inferry.cli.config.loader import parse


def test_the_arm_with_everything_has_what_an_operator_may_add() -> None:
    config = parse(config_with_everything(config_for_backend(9), 9) | {"tenants": {TENANT: LIMITS}})
    assert (config.tracing.endpoint, config.tracing.sample_ratio) == ("http://127.0.0.1:9/v1/completions", 1.0)
    assert config.alerts.webhook is not None
    assert len(config.alerts.webhook.key()) >= 16
    assert (config.prices["*"].gpu_hour, config.prices["*"].price().is_per_token) == (2.0, False)
    assert config.server.admin_key == ADMIN_KEY
