"""The `sessions` section of the configuration."""

import pytest

from inferry.cli.config.loader import parse
from inferry.cli.config.schema import ConfigError


def test_runs_do_not_pause_by_default() -> None:
    assert parse({}).sessions.limits() is None


def test_the_longest_pause_reaches_the_scheduler() -> None:
    limits = parse({"sessions": {"pause": True, "max_pause_s": 20}}).sessions.limits()
    assert limits is not None
    assert limits.max_pause_s == 20


def test_a_pause_without_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sessions\.max_pause_s must be above 0"):
        parse({"sessions": {"pause": True, "max_pause_s": 0}})
