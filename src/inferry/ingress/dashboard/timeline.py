"""A run's attempts in time, as the dashboard shows them. Pure."""

from collections.abc import Iterable

from inferry.domain.decision_words import describe
from inferry.domain.prices import NANOS_PER_UNIT
from inferry.ingress.dashboard.values import TimelineStep
from inferry.ingress.run_timeline import TimelineCall


def timeline_steps(calls: Iterable[TimelineCall]) -> list[TimelineStep]:
    """All attempts by arrival."""
    return [_step(call) for call in sorted(calls, key=lambda one: (one.arrived_at, one.job_id, one.attempt))]


def _step(call: TimelineCall) -> TimelineStep:
    prompt_tokens, cached_tokens, output_tokens = call.tokens
    return TimelineStep(
        step_id=call.step_id,
        job_id=call.job_id,
        attempt=call.attempt,
        status=call.status,
        lane=call.lane,
        model=call.model,
        worker=call.worker,
        arrived_at=call.arrived_at,
        sent_at=call.sent_at,
        first_token_at=call.first_token_at,
        ended_at=call.ended_at,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        batch_size=call.batch_size,
        release_reason=call.release_reason,
        attained=call.attained,
        error=call.error,
        cost=None if call.cost_nanos is None else call.cost_nanos / NANOS_PER_UNIT,
        decision=None if call.decision is None else describe(call.decision, call.worker),
    )
