"""What a ledger tells of runs: one run by itself, and a whole tree of them.

Tokens and GPU-seconds are those of all attempts, since all were paid for; the cached tokens are part of the prompt's.
Jobs count by how their last attempt ended. `gpu_seconds` and `cost_nanos` are sums of what is known, None where nothing
is. Times are seconds since the Unix epoch, spans are milliseconds.
"""

from typing import Protocol

from msgspec import Struct

from inferry.domain.ledger import LedgerEntry


class RunSummary(Struct, frozen=True, kw_only=True):
    """One run of one tenant, from the arrival of its first job to the end of its last.

    `active_ms` is how long at least one of its jobs was in flight, and `running_ms` how long one was on a worker.
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
        """Which part of its time the run waited for the model; None for one that took no time."""
        took_ms = (self.ended_at - self.started_at) * 1000
        return None if took_ms <= 0 else min(1.0, self.active_ms / took_ms)


class TreeSummary(Struct, frozen=True, kw_only=True):
    """A run and everything below it."""

    runs: int
    jobs: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_nanos: int | None


class RunQueries(Protocol):
    """The read side of a ledger, for pages about runs. Its methods block, and are called one at a time."""

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

    def close(self) -> None: ...
