"""States that are read when metrics are scraped or sampled: queue depths, limits, stored work."""

from collections.abc import Callable, Mapping

from inferry.domain.lanes import Lane
from inferry.observe.metric_families import SPECS, Rows

LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent",
    "max_concurrent_runs",
    "max_kv_tokens",
    "run_max_kv_tokens",
    *(f"{period}_{unit}_ceiling" for period in ("run", "day", "month") for unit in ("token", "money")),
)
"""The limits that a call may be refused for, by their names in the configuration."""

Labels = str | Lane | tuple[str, ...]
Read = Callable[[], float | Mapping[Lane, float] | Mapping[str, float] | Mapping[tuple[str, ...], float]]
"""The value of a metric without labels, or values by the label (a lane counts as its name), or by all labels."""


class WatchedStates:
    """Readers by the name of their metric. A later reader replaces an earlier one."""

    def __init__(self) -> None:
        self._readers: dict[str, Read] = {}

    def watch(self, readers: Mapping[str, Read]) -> None:
        unknown = readers.keys() - SPECS.keys()
        assert not unknown, f"metrics that are not in the table: {unknown}"
        self._readers |= readers

    def rows(self) -> dict[str, Rows]:
        return {name: _rows(read()) for name, read in self._readers.items()}


def _rows(value: float | Mapping[Lane, float] | Mapping[str, float] | Mapping[tuple[str, ...], float]) -> Rows:
    if not isinstance(value, Mapping):
        return [((), value)]
    return [(_labels(key), one) for key, one in value.items()]


def _labels(key: Labels) -> tuple[str, ...]:
    if isinstance(key, tuple):
        return key
    return (key.name if isinstance(key, Lane) else key,)


def by_lane(values: Mapping[Lane, float]) -> dict[Lane, float]:
    """The values with zero for every other lane: a series must not disappear."""
    return {lane: values.get(lane, 0) for lane in Lane}


def by_limit(counts: Mapping[str, int]) -> dict[str, int]:
    """Refusals by limit, with zero for every other limit."""
    return dict.fromkeys(LIMITS, 0) | dict(counts)
