"""The `settings` section of the configuration: trials of other settings and their guardrails."""

from collections.abc import Iterator

from msgspec import Struct

from inferry.cli.config.checks import check_positive, check_range
from inferry.domain.settings_versions import Guardrails


class SettingsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When other settings (`inferry config apply`) are rolled back: in a trial, and after they were applied."""

    max_attainment_drop: float = 0.02
    """A trial is rolled back when the attainment of a lane is lower by more than this, as a fraction of its calls. Here
    and below the whole confidence interval of the difference must lie beyond the limit."""
    max_error_rise: float = 0.01
    """A trial is rolled back when the fraction of failed and expired calls is higher by more than this."""
    max_cost_rise: float = 0.10
    """A trial is rolled back when an output token costs more by more than this fraction: in money, or in GPU-seconds
    where there are no prices."""
    false_alarm: float = 0.05
    """Probability that a trial within all limits is rolled back, over its whole duration."""
    min_runs: int = 30
    """Runs that each version must have before it is judged."""
    check_interval_s: float = 5.0
    """Interval at which a trial is judged, in seconds."""
    max_trial_s: float = 86_400.0
    """A trial that was not ended after this many seconds is rolled back."""
    watch_s: float | None = 3600.0
    """A version that was applied to all runs is compared for this many seconds with the version before it, as that was
    in the same time before the change, and rolled back by the same limits. null: only trials are judged."""

    def guardrails(self) -> Guardrails:
        return Guardrails(**{name: getattr(self, name) for name in self.__struct_fields__})


def check_settings(settings: SettingsConfig) -> Iterator[str]:
    """Error messages for invalid values."""
    yield from check_range("settings", settings, 0, 1, "max_attainment_drop", "max_error_rise")
    yield from check_range("settings", settings, 0, 100, "max_cost_rise")
    yield from check_range("settings", settings, 1e-6, 0.5, "false_alarm")
    yield from check_range("settings", settings, 2, 1_000_000, "min_runs")
    yield from check_positive("settings", settings, "check_interval_s", "max_trial_s")
    if settings.watch_s is not None:
        yield from check_positive("settings", settings, "watch_s")
