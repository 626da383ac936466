"""Mistakes in `ledger` and `retention`."""

from typing import Any

import pytest

from inferry.cli.config.loader import parse
from inferry.cli.config.schema import ConfigError

LEDGER_FORMS = "ledger must be a URL of the form sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
LEDGER_PASSWORD = "ledger is not a valid URL: special characters in the password must be percent-encoded"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"retention": {"attempts_days": 6.9}}, "retention.attempts_days must be at least 7"),
        ({"retention": {"gpu_time_days": 0}}, "retention.gpu_time_days must be at least 1"),
        ({"retention": {"rollup_days": 31}}, "retention.rollup_days must be at least 32"),
        (
            {"retention": {"rollup_days": 40}},
            "retention.rollup_days must not be less than retention.attempts_days and retention.gpu_time_days",
        ),
        ({"ledger": "mysql://host/db"}, LEDGER_FORMS),
        ({"ledger": "postgresql://host"}, "ledger names no database: postgresql://USER:PASSWORD@HOST:PORT/DATABASE"),
        ({"ledger": "postgresql://me:sec/ret@host/db"}, LEDGER_PASSWORD),
        ({"ledger": "postgresql://me:sec:ret/x@host/db"}, LEDGER_PASSWORD),
    ],
)
def test_a_mistake_is_named_without_the_password(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    assert message in str(caught.value).split("; ")
    assert "ret@" not in str(caught.value)


def test_days_become_seconds_and_null_keeps_rows_for_good() -> None:
    policy = parse({"retention": {"attempts_days": 7, "gpu_time_days": None}}).retention.policy()
    assert (policy.attempts_s, policy.gpu_time_s, policy.rollups_s) == (604_800.0, None, 730 * 86_400.0)
