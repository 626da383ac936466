"""Overflow: jobs that own workers cannot serve in time go to hosted workers, within a ceiling of cost.

A job is considered once, when it arrives. Its cost is reserved before it is queued for a hosted worker and settled when
its attempt has ended. Where a watermark of the budget must be raised, the job is held until it is in the database.
Belongs to the dispatch loop.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from inferry.admission.overflow_budget import OverflowBudget, OverflowReservation
from inferry.domain.attempts import Attempt
from inferry.domain.clock import Clock
from inferry.domain.decisions import Overflow
from inferry.domain.errors import NoWorker
from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import ModelCard
from inferry.domain.prices import NANOS_PER_UNIT
from inferry.domain.streams import Done
from inferry.domain.values import replace
from inferry.domain.workers import Phase, WorkerView
from inferry.prediction.model_waits import ModelWaits
from inferry.prediction.overflow_rule import OverflowRule

CAPACITY = "capacity"


class Fleet(Protocol):
    """What the router asks of the pool."""

    def serves(self, model: str) -> bool: ...
    def views(self) -> Sequence[WorkerView]: ...
    def overflow_card(self, model: str, isolation: str | None) -> ModelCard | None: ...


class OverflowRouter:
    """Chooses the jobs that overflow. `root_of` names the root run of a tenant's run.

    `overflowed` counts jobs by what they would have missed; `refused` counts jobs that stayed, by the limit that kept
    them: a ceiling, or the capacity of the hosted workers.
    """

    def __init__(
        self,
        rule: OverflowRule,
        budget: OverflowBudget,
        clock: Clock,
        pool: Fleet,
        *,
        root_of: Callable[[str, str], str] = lambda tenant, run_id: run_id,
    ) -> None:
        self.rule = rule
        self._budget = budget
        self._pool = pool
        self._clock = clock
        self._root_of = root_of
        self.waits = ModelWaits()
        self._reservations: dict[str, OverflowReservation] = {}
        self._reserved: Counter[str] = Counter()
        self.overflowed: dict[str, int] = {}
        self.refused: dict[str, int] = {}

    @property
    def cost(self) -> float:
        """What overflow has cost since the start, in units of the currency."""
        return self._budget.spent_nanos / NANOS_PER_UNIT

    def may_take(self, job: InferenceJob) -> bool:
        """Whether a hosted worker that is up could serve the job."""
        return bool(self._hosted(job))

    def redirect(self, job: InferenceJob, wait_s: float, now: float, *, is_served: bool = True) -> InferenceJob | None:
        """The job for a hosted worker, with its cost reserved; None where it stays with own workers. `is_served`:
        whether own workers could take it at all.
        """
        is_up = is_served and self._pool.serves(job.route.model)
        reason = self.rule.missed(job, wait_s if is_up else inf, now)
        if reason is None or not (hosted := self._hosted(job)):
            return None
        reservation: OverflowReservation | str = CAPACITY
        if self._has_capacity(hosted):
            run_id = self._root_of(job.tenant, job.run_id)
            reservation = self._budget.reserve(job, run_id, now, self._clock.wall())
        if isinstance(reservation, str):
            self.refused[reservation] = self.refused.get(reservation, 0) + 1
            return None
        self._reservations[job.job_id] = reservation
        self._reserved[job.route.model] += 1
        self.overflowed[reason] = self.overflowed.get(reason, 0) + 1
        route = replace(job.route, overflow=True)
        return replace(
            job,
            route=route,
            batch_key=replace(job.batch_key, route=route),
            max_wait_s=0.0,
            overflow=Overflow(reason, wait_s if is_up else None),
        )

    def watermark_batch(self, job_id: str) -> int:
        """The batch of watermarks that must be in the database before a job that overflows is sent; 0 for none."""
        return self._reservations[job_id].watermark_batch

    def settle(self, attempt: Attempt) -> None:
        """Charge an ended attempt and note the cost in its decision. A job that was never sent costs nothing."""
        reservation = self._reservations.pop(attempt.job.job_id, None)
        if reservation is None:
            return
        self._reserved[attempt.job.route.model] -= 1
        cost_nanos = _cost_nanos(attempt, reservation)
        self._budget.settle(reservation, cost_nanos)
        decision = attempt.decision
        if decision is not None and decision.overflow is not None:
            attempt.decision = replace(decision, overflow=replace(decision.overflow, cost_nanos=cost_nanos))

    def _hosted(self, job: InferenceJob) -> list[WorkerView]:
        """The hosted workers that are up for the job; none where one of the model lacks what the job needs."""
        route = job.route
        card = self._pool.overflow_card(route.model, route.isolation)
        if card is None or not _supports(card, job):
            return []
        return [
            view
            for view in self._pool.views()
            if view.overflow
            and view.phase is Phase.READY
            and route.model in view.models
            and route.isolation == view.isolation
            and (route.precision is None or route.precision == view.precision)
            and (route.adapter is None or route.adapter in view.adapters)
        ]

    def _has_capacity(self, hosted: Sequence[WorkerView]) -> bool:
        """Whether these workers take another call, beside the calls of all models that they serve."""
        capacity = sum(inf if view.capacity.sequences is None else view.capacity.sequences for view in hosted)
        models = frozenset[str]().union(*(view.models for view in hosted))
        return sum(self._reserved[model] for model in models) < capacity


def _supports(card: ModelCard, job: InferenceJob) -> bool:
    context, tokens = card.context_tokens, job.footprint.prompt.expected + job.token_budget
    return (
        card.features.issuperset(job.features)
        and job.batch_key.task in card.tasks
        and (context is None or tokens <= context)
    )


def _cost_nanos(attempt: Attempt, reservation: OverflowReservation) -> int:
    """By the usage that the provider reported. Without one, all that was reserved: it may have been charged."""
    end = attempt.end
    if attempt.sent_at is None or end is None:
        return 0
    usage = end.usage
    if isinstance(end, Done) and usage.prompt_tokens:
        cost = reservation.tariff.cost(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, None)
        return reservation.nanos if cost is None else cost
    if not isinstance(end, Done) and isinstance(end.error, NoWorker) and attempt.first_token_at is None:
        return 0  # refused by the provider, or not reached
    return reservation.nanos
