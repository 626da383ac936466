"""The workers, the view of each, and which models have one that is up.

A `WorkerSupervisor` for every worker starts it, probes it, watches it and takes it out when it loses jobs. Workers may
be added and removed while the gateway runs. All of it belongs to one event loop. The pool reports through `on_view` and
`on_removed`, and subscribes to `ended`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from inferry.dispatch.supervisor import WorkerSupervisor, unknown_worker
from inferry.dispatch.values import HealthPolicy, WorkerReport
from inferry.domain.attempts import Attempt
from inferry.domain.clock import Clock
from inferry.domain.errors import (
    ConnectFailed,
    Draining,
    NotFound,
    Prefilled,
    WorkerLost,
    WorkerTimeout,
    WorkerUnreachable,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import ModelCard, RunKeeper, TokenCounter, Worker
from inferry.domain.streams import Done
from inferry.domain.values import replace
from inferry.domain.workers import Phase, WorkerView
from inferry.observe.worker_states import WorkerHealth

log = logging.getLogger(__name__)

DRAIN_GRACE_S: Final = 30.0


class Pool:
    """Workers by name, with the view the scheduler is to have of each.

    `on_view` is called with the name of a worker whose view has changed, `on_removed` after a worker was removed.
    `in_flight` says how many of the gateway's jobs a worker has; by default, what the worker reports.
    """

    def __init__(
        self,
        workers: Iterable[Worker],
        clock: Clock,
        *,
        health: HealthPolicy | None = None,
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        self._clock = clock
        self.policy = health or HealthPolicy()
        self._supervisors: dict[str, WorkerSupervisor] = {}
        self._is_started = False
        self.on_view: Callable[[str], None] = lambda worker: None
        self.on_removed: Callable[[str], None] = lambda worker: None
        self.in_flight: Callable[[str], int] = lambda worker: self._supervisors[worker].worker.view().load.running
        for worker in workers:
            self._supervisors[worker.name] = self._supervisor_for(worker, (kinds or {}).get(worker.name, ""))
        self._index_workers()

    # -- queries -----------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self._supervisors)

    def worker(self, name: str) -> Worker | None:
        supervisor = self._supervisors.get(name)
        return None if supervisor is None else supervisor.worker

    def view(self, name: str) -> WorkerView:
        return self._supervisors[name].view

    def reported_view(self, name: str) -> WorkerView | None:
        """The worker's own present view; None where there is no such worker."""
        supervisor = self._supervisors.get(name)
        return None if supervisor is None else supervisor.worker.view()

    def views(self) -> list[WorkerView]:
        return [supervisor.view for supervisor in self._supervisors.values()]

    def cards(self, isolation: str | None = None) -> dict[str, ModelCard]:
        """The models of a tenant's own workers, or of the shared ones. A model's card has what all its workers
        support; those for overflow count only where there is no other.
        """
        return self._cards.get(isolation, {})

    def overflow_card(self, model: str, isolation: str | None) -> ModelCard | None:
        """What all workers for overflow of this model support; None where there is none."""
        return self._overflow_cards.get(isolation, {}).get(model)

    def is_remote(self, name: str) -> bool:
        """Whether the worker passes jobs on to a process that owns the engines."""
        supervisor = self._supervisors.get(name)
        return supervisor is not None and supervisor.view.is_remote

    def serves(self, model: str) -> bool:
        """Whether some worker of this model is up, those for overflow or prefill aside."""
        return model in self._models_up

    def serves_elsewhere(self, model: str, avoid: Collection[str], precision: str | None = None) -> bool:
        """Whether some other worker of this model and precision is up, those for overflow or prefill aside."""
        return any(
            view.phase is Phase.READY and _serves(view, model, precision) and view.worker not in avoid
            for view in self.views()
        )

    def is_model_out(self, model: str, precision: str | None = None) -> bool:
        """Whether no worker of this model and precision is up, and one that has been up, or is started on demand, is
        expected.
        """
        is_up = model in self._models_up if precision is None else self.serves_elsewhere(model, (), precision)
        return not is_up and any(
            (supervisor.was_up or supervisor.view.scale_up_wait_s is not None)
            and not supervisor.is_drained
            and _serves(supervisor.view, model, precision)
            for supervisor in self._supervisors.values()
        )

    def is_drained(self, model: str, isolation: str | None) -> bool:
        """Whether operators have drained every worker of this model in the pool."""
        workers = [one for one in self._supervisors.values() if _is_in_pool(one.view, model, isolation)]
        return bool(workers) and all(one.is_drained for one in workers)

    def outage_timeout_s(self, model: str) -> float:
        """How long a queued job waits for a worker of the model to come up."""
        waits = [view.scale_up_wait_s or 0.0 for view in self.views() if model in view.models]
        return max(self.policy.no_worker_timeout_s, *waits, 0.0)

    def is_stranded(self, job: InferenceJob) -> bool:
        """Whether a worker that lost the job is still down, so that what the job holds there is unknown."""
        return any(
            (supervisor := self._supervisors.get(name)) is not None and supervisor.is_down for name in job.route.avoid
        )

    def worker_count(self, model: str) -> int:
        """How many workers serve the model, up or not, those for overflow aside. One that passes jobs on counts as
        two: it is replaced.
        """
        return self._serving[model]

    async def count_tokens(self, model: str, isolation: str | None, body: bytes) -> int | None:
        """Prompt tokens of a chat request, counted by a worker of the model; None where no worker can."""
        for view in self.views():
            worker = self.worker(view.worker)
            if (
                view.phase is Phase.READY
                and model in view.models
                and view.isolation == isolation
                and isinstance(worker, TokenCounter)
            ):
                count: int | None = await worker.count_tokens(body)
                if count is not None:
                    return count
        return None

    def end_run(self, tenant: str, run_id: str) -> None:
        """The run is over: workers keep nothing for its next call."""
        for name in self._supervisors:
            worker = self.worker(name)
            if isinstance(worker, RunKeeper):
                worker.end_run(tenant, run_id)

    @property
    def is_ready(self) -> bool:
        """Whether a worker is up, or can be started on demand."""
        views = self.views()
        return any(
            (view.phase is Phase.READY and view.role != "prefill") or view.scale_up_wait_s is not None for view in views
        )

    def health(self) -> list[WorkerHealth]:
        now = self._clock.now()
        return [
            WorkerHealth(
                name,
                supervisor.breaker.state.value,
                supervisor.breaker.opens,
                supervisor.breaker.share(now),
                supervisor.overdue,
            )
            for name, supervisor in self._supervisors.items()
        ]

    def report(self) -> list[WorkerReport]:
        now = self._clock.now()
        return [
            WorkerReport(
                name=name,
                kind=supervisor.kind,
                group=supervisor.view.group,
                phase=supervisor.view.phase.value,
                since=supervisor.since,
                drained=supervisor.is_drained,
                breaker=supervisor.breaker.state.value,
                opens=supervisor.breaker.opens,
                share=supervisor.breaker.share(now),
                capacity=supervisor.view.capacity,
                load=supervisor.worker.view().load,
                models=tuple(sorted(supervisor.view.models)),
            )
            for name, supervisor in self._supervisors.items()
        ]

    # -- events ------------------------------------------------------------------------------------------------------

    def ended(self, attempt: Attempt, now: float) -> None:
        """Count the job for or against its worker. One lost job may be the job's own fault, but not a connection that
        was not accepted; after several, the worker's view says before this returns that it gets no more.
        """
        supervisor = None if attempt.plan is None else self._supervisors.get(attempt.plan.worker)
        if supervisor is None:
            return
        end = attempt.end
        if isinstance(end, Done) or (end is not None and isinstance(end.error, Prefilled)):
            supervisor.breaker.served()
        elif (
            end is not None
            and end.error.can_failover
            and isinstance(end.error, WorkerLost | WorkerTimeout | WorkerUnreachable)
        ):
            job = attempt.job
            if isinstance(end.error, ConnectFailed):
                supervisor.lost(f"{job.job_id}/{job.attempt}", str(end.error))
            else:
                supervisor.lost(job.job_id, end.error.code)
        if supervisor.is_being_removed:
            supervisor.job_ended.set()

    def last_activity_at(self, name: str) -> float | None:
        """The worker's last sign of life; None where it is not watched."""
        supervisor = self._supervisors.get(name)
        return None if supervisor is None else supervisor.worker.view().last_activity_at

    def suspect(self, name: str, confirmation: "asyncio.Future[frozenset[str]]") -> None:
        """A call there is overdue and was retried elsewhere: no new work for the worker until its cancel was
        answered.
        """
        supervisor = self._supervisors.get(name)
        if supervisor is not None:
            supervisor.suspect(confirmation)

    def refresh_view(self, name: str) -> None:
        """What the worker serves has changed."""
        supervisor = self._supervisors.get(name)
        if supervisor is not None:
            supervisor.refresh()

    def refresh_worker(self, name: str) -> None:
        """Check this worker now."""
        supervisor = self._supervisors.get(name)
        if supervisor is not None:
            supervisor.wake()

    # -- administration ----------------------------------------------------------------------------------------------

    def drain(self, name: str) -> None:
        """Give this worker no new work; running jobs complete."""
        self._get(name).is_drained = True
        self._get(name).refresh()

    def readmit(self, name: str) -> None:
        """Give this worker new work again."""
        supervisor = self._get(name)
        if supervisor.is_being_removed:
            raise Draining(f"worker {name} is being removed")
        supervisor.is_drained = False
        supervisor.refresh()

    def add(self, worker: Worker, kind: str = "", *, was_up: bool = False) -> None:
        """Add a worker; it gets work once it has generated a token. `was_up`: until then, calls wait for it."""
        if worker.name in self._supervisors:
            raise ValueError(f"there is a worker {worker.name} already")
        supervisor = self._supervisors[worker.name] = self._supervisor_for(worker, kind)
        supervisor.was_up = was_up
        self._view_changed(supervisor)
        if self._is_started:
            supervisor.task = asyncio.get_running_loop().create_task(supervisor.run_forever())

    async def remove(self, name: str, grace_s: float = DRAIN_GRACE_S) -> None:
        """Drain this worker, wait until its jobs have ended or the grace period is over, and close it. Jobs that it
        still has then are lost, as if it had failed. A removal that is cancelled may be begun again.
        """
        supervisor = self._get(name)
        if supervisor.is_being_removed:
            raise Draining(f"worker {name} is being removed already")
        supervisor.is_being_removed = True
        self.drain(name)
        try:
            try:
                async with asyncio.timeout(grace_s):
                    while self.in_flight(name):
                        supervisor.job_ended.clear()
                        await supervisor.job_ended.wait()
            except TimeoutError:
                pass
            await _stop(supervisor)
        except asyncio.CancelledError:
            supervisor.is_being_removed = False
            raise
        self._supervisors.pop(name, None)
        self._index_workers()
        self.on_removed(name)

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._is_started = True
        loop = asyncio.get_running_loop()
        for supervisor in self._supervisors.values():
            supervisor.task = loop.create_task(supervisor.run_forever())

    async def close(self) -> None:
        await asyncio.gather(*(_stop(supervisor) for supervisor in self._supervisors.values()), return_exceptions=True)

    def _supervisor_for(self, worker: Worker, kind: str) -> WorkerSupervisor:
        return WorkerSupervisor(worker, kind, self._clock, self.policy, self._view_changed)

    def _get(self, name: str) -> WorkerSupervisor:
        supervisor = self._supervisors.get(name)
        if supervisor is None:
            raise NotFound(unknown_worker(name, self._supervisors))
        return supervisor

    def _view_changed(self, supervisor: WorkerSupervisor) -> None:
        self._index_workers()
        self.on_view(supervisor.worker.name)

    def _index_workers(self) -> None:
        """Precompute what every call asks."""
        cards: dict[str | None, dict[str, ModelCard]] = {}
        overflow_cards: dict[str | None, dict[str, ModelCard]] = {}
        worker_count: Counter[str] = Counter()
        for supervisor in self._supervisors.values():
            view = supervisor.view
            if not view.overflow and view.role != "prefill":
                worker_count.update(view.models)
            if view.is_remote:
                worker_count.update(view.models)
            pool_cards = (overflow_cards if view.overflow else cards).setdefault(view.isolation, {})
            for card in supervisor.worker.cards():
                known = pool_cards.get(card.name)
                pool_cards[card.name] = card if known is None else _common_card(known, card)
        for isolation, hosted in overflow_cards.items():
            cards[isolation] = hosted | cards.get(isolation, {})
        self._cards = cards
        self._overflow_cards = overflow_cards
        self._serving = worker_count
        self._models_up = frozenset(
            model for view in self.views() if view.phase is Phase.READY and _takes_calls(view) for model in view.models
        )


def _takes_calls(view: WorkerView) -> bool:
    """Whether the worker takes whole calls that do not overflow."""
    return not view.overflow and view.role != "prefill"


def _serves(view: WorkerView, model: str, precision: str | None) -> bool:
    """Whether the worker takes whole calls of the model; of any precision where None."""
    return model in view.models and precision in (None, view.precision) and _takes_calls(view)


def _is_in_pool(view: WorkerView, model: str, isolation: str | None) -> bool:
    return model in view.models and view.isolation == isolation and _takes_calls(view)


async def _stop(supervisor: WorkerSupervisor) -> None:
    if supervisor.task is not None:
        supervisor.task.cancel()
        await asyncio.gather(supervisor.task, return_exceptions=True)
    try:
        await supervisor.worker.close()
    except Exception:
        log.exception("worker %s could not be closed", supervisor.worker.name)


def _common_card(a: ModelCard, b: ModelCard) -> ModelCard:
    contexts = [card.context_tokens for card in (a, b) if card.context_tokens is not None]
    return replace(
        a,
        context_tokens=min(contexts, default=None),
        vocab_size=a.vocab_size if a.vocab_size == b.vocab_size else None,
        default_output_tokens=a.default_output_tokens or b.default_output_tokens,
        features=a.features & b.features,
        fields=a.fields if b.fields is None else b.fields if a.fields is None else a.fields & b.fields,
        media_tokens=max(a.media_tokens, b.media_tokens),
        tasks=a.tasks & b.tasks,
        can_resume=a.can_resume and b.can_resume,
        can_resume_seeded=a.can_resume_seeded and b.can_resume_seeded,
        can_resume_constrained=a.can_resume_constrained and b.can_resume_constrained,
        can_resume_logprobs=a.can_resume_logprobs and b.can_resume_logprobs,
    )
