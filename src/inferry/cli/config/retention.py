"""The `retention` section of the configuration: how long the ledger keeps rows."""

from collections.abc import Iterator

from msgspec import Struct

from inferry.domain.ledger import RetentionPolicy

DAY_S = 86_400.0
MIN_ATTEMPTS_DAYS = 7
"""Budgets of runs are summed over the attempts of the last seven days."""
MIN_ROLLUP_DAYS = 32
"""Budgets of months are summed over attempts and roll-ups."""


class RetentionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the ledger keeps rows. Older rows are added to roll-ups and deleted, in small steps, once an hour."""

    attempts_days: float | None = 90
    """Days for which attempts are kept, at least 7; null: for good. The rows of a run are deleted together, when its
    last one is this old, or one by one when they are twice as old."""
    gpu_time_days: float | None = 90
    """Days for which the GPU time of workers is kept by interval; null: for good."""
    rollup_days: float | None = 730
    """Days for which roll-ups are kept, at least 32: sums per hour, tenant, key, model and lane, and of GPU time per
    hour, worker and kind. null: for good."""

    def policy(self) -> RetentionPolicy:
        return RetentionPolicy(
            attempts_s=_seconds(self.attempts_days),
            gpu_time_s=_seconds(self.gpu_time_days),
            rollups_s=_seconds(self.rollup_days),
        )


def check_retention(config: RetentionConfig) -> Iterator[str]:
    limits = (("attempts_days", MIN_ATTEMPTS_DAYS), ("gpu_time_days", 1), ("rollup_days", MIN_ROLLUP_DAYS))
    for name, least in limits:
        days = getattr(config, name)
        if days is not None and not days >= least:
            yield f"retention.{name} must be at least {least}"
    rolled_up = [days for days in (config.attempts_days, config.gpu_time_days) if days is not None]
    if config.rollup_days is not None and rolled_up and config.rollup_days < max(rolled_up):
        yield "retention.rollup_days must not be less than retention.attempts_days and retention.gpu_time_days"


def _seconds(days: float | None) -> float | None:
    return None if days is None else days * DAY_S
