"""A run's attempts in time, from the ledger's rows and the calls in flight. Pure."""

from collections.abc import Callable, Iterable

from inferry.domain.attempts import Attempt
from inferry.domain.decision_words import describe
from inferry.domain.decisions import Decision, from_text
from inferry.domain.jobs import InferenceJob
from inferry.domain.ledger import LedgerEntry
from inferry.domain.prices import NANOS_PER_UNIT
from inferry.ingress.dashboard.values import TimelineStep


def timeline_steps(
    rows: Iterable[LedgerEntry],
    in_flight: Iterable[InferenceJob],
    attempt_of: Callable[[str], Attempt | None],
    epoch: float,
) -> list[TimelineStep]:
    """All attempts by arrival. `epoch` is the Unix time at 0 of the gateway's clock."""
    steps = [_recorded(row) for row in rows]
    steps += [_live(job, attempt_of(job.job_id), epoch) for job in in_flight]
    return sorted(steps, key=lambda step: (step.arrived_at, step.job_id, step.attempt))


def _recorded(row: LedgerEntry) -> TimelineStep:
    arrived_at = row.ended_at - row.total_ms / 1000
    return TimelineStep(
        step_id=row.step_id,
        job_id=row.job_id,
        attempt=row.attempt,
        status=row.outcome.value,
        lane=row.lane,
        model=row.model,
        worker=row.worker,
        arrived_at=arrived_at,
        sent_at=None if row.queue_ms is None else arrived_at + row.queue_ms / 1000,
        first_token_at=None if row.first_token_ms is None else arrived_at + row.first_token_ms / 1000,
        ended_at=row.ended_at,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        output_tokens=row.output_tokens,
        batch_size=row.batch_size,
        release_reason=row.release_reason,
        attained=row.attained,
        error=row.error_code,
        cost=None if row.cost_nanos is None else row.cost_nanos / NANOS_PER_UNIT,
        decision=_words(from_text(row.decision), row.worker),
    )


def _live(job: InferenceJob, attempt: Attempt | None, epoch: float) -> TimelineStep:
    plan = None if attempt is None else attempt.plan
    worker = None if plan is None else plan.worker
    sent_at = None if attempt is None else attempt.sent_at
    first_token_at = None if attempt is None else attempt.first_token_at
    return TimelineStep(
        step_id=job.step_id,
        job_id=job.job_id,
        attempt=job.attempt,
        status="queued" if attempt is None else attempt.state.value,
        lane=job.lane.name,
        model=job.route.model,
        worker=worker,
        arrived_at=epoch + job.arrived_at,
        sent_at=None if sent_at is None else epoch + sent_at,
        first_token_at=None if first_token_at is None else epoch + first_token_at,
        ended_at=None,
        prompt_tokens=job.footprint.prompt.expected,
        cached_tokens=0,
        output_tokens=0 if attempt is None else attempt.output_tokens,
        batch_size=None if attempt is None else attempt.batch_size,
        release_reason=None if plan is None else plan.reason.value,
        attained=None if attempt is None else attempt.slo_attained,
        error=None,
        cost=None,
        decision=None if attempt is None else _words(attempt.decision, worker),
    )


def _words(decision: Decision | None, worker: str | None) -> str | None:
    return None if decision is None else describe(decision, worker)
