"""Refusals by budgets in the ledger: one row per run, so that reports can count runs that reached their budget.

Other refusals have no row. A client that repeats a refused call adds no row for `REPEAT_AFTER_S`.
"""

from typing import Final

from inferry.domain.attempts import Attempt
from inferry.domain.errors import GatewayError, RunBudgetExhausted, TenantBudgetExhausted
from inferry.domain.jobs import InferenceJob
from inferry.domain.ledger import LedgerEntry
from inferry.domain.streams import Failed

REPEAT_AFTER_S: Final = 3600.0
MAX_REMEMBERED: Final = 10_000


class BudgetRefusals:
    """Remembers the runs whose refusal is in the ledger, the oldest first. Memory is bounded."""

    __slots__ = ("_recorded",)

    def __init__(self) -> None:
        self._recorded: dict[tuple[str, str], float] = {}

    def entry(self, job: InferenceJob, error: GatewayError, now: float, wall: float) -> LedgerEntry | None:
        """The row of a refused call; None for other refusals, and where the run has one already."""
        if not isinstance(error, RunBudgetExhausted | TenantBudgetExhausted):
            return None
        # A call without a run id is a run of its own: such calls count together, as one.
        key = (job.tenant, error.code if job.run_id == job.job_id else job.run_id)
        recorded_at = self._recorded.pop(key, None)
        if recorded_at is not None and now - recorded_at < REPEAT_AFTER_S:
            self._recorded[key] = recorded_at
            return None
        self._recorded[key] = now
        if len(self._recorded) > MAX_REMEMBERED:
            del self._recorded[next(iter(self._recorded))]
        attempt = Attempt(job)
        attempt.ended(Failed(job.job_id, error), now)
        return attempt.entry(wall)
