"""Summaries of runs and run trees, as read from the ledger.

Tokens, GPU-seconds and cost are sums over all attempts; cached tokens are part of the prompt tokens. Jobs are counted
by the outcome of their last attempt. `gpu_seconds` and `cost_nanos` are None if unknown for every attempt. Times are
Unix seconds, durations milliseconds.
"""

from typing import Protocol

from msgspec import Struct

from inferry.domain.ledger import LedgerEntry


class RunSummary(Struct, frozen=True, kw_only=True):
    """One run of one tenant, from the arrival of its first job to the end of its last.

    `active_ms`: time with at least one job in flight. `running_ms`: time with at least one job on a worker.
    """

    tenant: str
    run_id: str
    parent_run: str | None
    lanes: tuple[str, ...]
    steps: int
    jobs: int
    attempts: int
    done: int
    failed: int
    cancelled: int
    expired: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    gpu_seconds: float | None
    cost_nanos: int | None
    queue_ms_p50: float | None
    queue_ms_mean: float | None
    queue_ms_max: float | None
    active_ms: float
    running_ms: float
    started_at: float
    ended_at: float

    @property
    def active_ratio(self) -> float | None:
        """Fraction of the run's duration with a call in flight; None if the duration is 0."""
        took_ms = (self.ended_at - self.started_at) * 1000
        return None if took_ms <= 0 else min(1.0, self.active_ms / took_ms)


class TreeSummary(Struct, frozen=True, kw_only=True):
    """A run with all its sub-runs."""

    runs: int
    jobs: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_nanos: int | None


TimelinePosition = tuple[float, str, int]
"""Arrival, job and attempt of the last row of a page."""


class TimelineRows(Struct, frozen=True):
    """A page of a run's attempts. `last` is where the next page begins; `ended_before` has the latest end on earlier
    pages, by run.
    """

    entries: list[LedgerEntry]
    last: TimelinePosition | None
    ended_before: dict[str, float]


class RunQueries(Protocol):
    """Read side of a ledger. Methods block and are not called concurrently."""

    def runs(
        self,
        *,
        limit: int,
        tenant: str | None,
        run: str | None = None,
        since: float | None = None,
        parent: str | None = None,
        before: float | None = None,
    ) -> list[RunSummary]: ...

    def tree(self, tenant: str, run: str) -> TreeSummary: ...

    def sub_runs(self, tenant: str, run: str, limit: int) -> list[str]: ...

    def has_run(self, tenant: str, run: str) -> bool: ...

    def jobs(
        self, *, limit: int, tenant: str | None = None, run: str | None = None, since: float | None = None
    ) -> list[LedgerEntry]: ...

    def timeline(self, tenant: str, run: str, *, limit: int, after: TimelinePosition | None = None) -> TimelineRows: ...

    def close(self) -> None: ...
