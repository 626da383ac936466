"""The workers, and what is believed of each.

A `Care` for every worker starts it, makes it generate, watches it and takes it out when it loses jobs. Workers come and
go while the gateway runs. All of it belongs to one event loop; the dispatch loop is told through `on_view` and
`on_gone`, and tells of jobs through `served` and `lost`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from inferry.dispatch.care import Care
from inferry.dispatch.values import HealthPolicy, WorkerReport
from inferry.domain.clock import Clock
from inferry.domain.errors import Draining, GatewayError, NotFound, WorkerLost, WorkerTimeout, WorkerUnreachable
from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import ModelCard, Worker
from inferry.domain.values import replace
from inferry.domain.workers import Phase, WorkerView
from inferry.observe.metrics import WorkerHealth

log = logging.getLogger(__name__)

REMOVE_GRACE_S = 30.0
IDLE_POLL_S = 0.05


class Pool:
    """Workers by name, with the view the scheduler is to have of each.

    `on_view` is called with the name of a worker whose view has changed, `on_gone` when it is no longer there at all.
    `in_flight` says how many of the gateway's jobs a worker has; unless somebody knows better, what it says itself.
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
        self._cares: dict[str, Care] = {}
        self._is_started = False
        self.on_view: Callable[[str], None] = lambda worker: None
        self.on_gone: Callable[[str], None] = lambda worker: None
        self.in_flight: Callable[[str], int] = lambda worker: self._cares[worker].worker.view().load.running
        for worker in workers:
            self._cares[worker.name] = self._care_for(worker, (kinds or {}).get(worker.name, ""))
        self._count()

    # -- what others ask ---------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self._cares)

    def worker(self, name: str) -> Worker | None:
        care = self._cares.get(name)
        return None if care is None else care.worker

    def view(self, name: str) -> WorkerView:
        return self._cares[name].view

    def views(self) -> list[WorkerView]:
        return [care.view for care in self._cares.values()]

    def cards(self, isolation: str | None = None) -> dict[str, ModelCard]:
        """The models of the workers that are a tenant's own, or of those that are everybody's. Where several workers
        serve one, only what all of them can do counts.
        """
        return self._cards.get(isolation, {})

    def serves(self, model: str) -> bool:
        """Is some worker of this model up right now?"""
        return model in self._up

    def serves_besides(self, model: str, avoid: Collection[str]) -> bool:
        """Is some worker of this model up that is none of these?"""
        return any(
            view.phase is Phase.READY and model in view.models and view.worker not in avoid for view in self.views()
        )

    def is_out(self, model: str) -> bool:
        """Whether no worker of this model is up, and one that has been is expected back."""
        return model not in self._up and any(
            care.was_up and not care.is_drained and model in care.view.models for care in self._cares.values()
        )

    def is_stranded(self, job: InferenceJob) -> bool:
        """Whether a worker that lost the job is still down: what the job holds there cannot be known."""
        return any((care := self._cares.get(name)) is not None and care.is_down for name in job.route.avoid)

    def serving(self, model: str) -> int:
        """How many workers serve the model, up or not."""
        return self._serving[model]

    @property
    def is_ready(self) -> bool:
        return any(care.view.phase is Phase.READY for care in self._cares.values())

    def health(self) -> list[WorkerHealth]:
        now = self._clock.now()
        return [
            WorkerHealth(name, care.breaker.state.value, care.breaker.opens, care.breaker.share(now), care.overdue)
            for name, care in self._cares.items()
        ]

    def report(self) -> list[WorkerReport]:
        now = self._clock.now()
        return [
            WorkerReport(
                name=name,
                kind=care.kind,
                group=care.view.group,
                phase=care.view.phase.value,
                since=care.since,
                drained=care.is_drained,
                breaker=care.breaker.state.value,
                opens=care.breaker.opens,
                share=care.breaker.share(now),
                room=care.view.room,
                load=care.worker.view().load,
                models=tuple(sorted(care.view.models)),
            )
            for name, care in self._cares.items()
        ]

    # -- what the dispatch loop tells --------------------------------------------------------------------------------

    def served(self, name: str) -> None:
        """A job ended well on this worker. Called once a job."""
        care = self._cares.get(name)
        if care is not None:
            care.breaker.served()

    def lost(self, name: str, job_id: str, error: GatewayError) -> None:
        """A job was lost on this worker. One may be the job's own fault; when several are lost the worker's view says
        before this returns that it gets no more.
        """
        care = self._cares.get(name)
        if care is not None and isinstance(error, WorkerLost | WorkerTimeout | WorkerUnreachable):
            care.lost(job_id)

    def heard_at(self, name: str) -> float | None:
        """The worker's last sign of life; None where it is not watched."""
        care = self._cares.get(name)
        return None if care is None else care.worker.view().heard_at

    def suspect(self, name: str, confirmation: "asyncio.Future[frozenset[str]]") -> None:
        """A call there is overdue and was retried elsewhere: no new work for the worker until its cancel has come to
        something.
        """
        care = self._cares.get(name)
        if care is not None:
            care.suspect(confirmation)

    def look_at(self, name: str) -> None:
        """Look at this worker now: whether it is down is for itself to say."""
        care = self._cares.get(name)
        if care is not None:
            care.wake()

    # -- what an operator does ---------------------------------------------------------------------------------------

    def drain(self, name: str) -> None:
        """No new work for this worker; what runs there goes on to its end."""
        self._of(name).is_drained = True
        self._of(name).refresh()

    def readmit(self, name: str) -> None:
        """New work is welcome there again."""
        care = self._of(name)
        if care.is_leaving:
            raise Draining(f"worker {name} is being removed")
        care.is_drained = False
        care.refresh()

    def add(self, worker: Worker, kind: str = "") -> None:
        """One more worker; it gets work once it has generated."""
        if worker.name in self._cares:
            raise ValueError(f"there is a worker {worker.name} already")
        care = self._cares[worker.name] = self._care_for(worker, kind)
        self._told(care)
        if self._is_started:
            care.task = asyncio.get_running_loop().create_task(care.live())

    async def remove(self, name: str, grace_s: float = REMOVE_GRACE_S) -> None:
        """Drain this worker, wait until its jobs have ended or the grace is over, and close it. Jobs it still has then
        are lost, as if it had died.
        """
        care = self._of(name)
        if care.is_leaving:
            raise Draining(f"worker {name} is being removed already")
        care.is_leaving = True
        self.drain(name)
        give_up_at = self._clock.now() + grace_s
        while self.in_flight(name) and self._clock.now() < give_up_at:  # noqa: ASYNC110 (once in a worker's life)
            await asyncio.sleep(IDLE_POLL_S)
        await _stop(care)
        self._cares.pop(name, None)
        self._count()
        self.on_gone(name)

    # -- its life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._is_started = True
        loop = asyncio.get_running_loop()
        for care in self._cares.values():
            care.task = loop.create_task(care.live())

    async def close(self) -> None:
        await asyncio.gather(*(_stop(care) for care in self._cares.values()), return_exceptions=True)

    def _care_for(self, worker: Worker, kind: str) -> Care:
        return Care(worker, kind, self._clock, self.policy, self._told)

    def _of(self, name: str) -> Care:
        care = self._cares.get(name)
        if care is None:
            raise NotFound("there is no worker of this name")
        return care

    def _told(self, care: Care) -> None:
        self._count()
        self.on_view(care.worker.name)

    def _count(self) -> None:
        """Of all workers, what is asked for with every call."""
        cards: dict[str | None, dict[str, ModelCard]] = {}
        serving: Counter[str] = Counter()
        for care in self._cares.values():
            serving.update(care.view.models)
            its_own = cards.setdefault(care.view.isolation, {})
            for card in care.worker.cards():
                known = its_own.get(card.name)
                its_own[card.name] = card if known is None else _common(known, card)
        self._cards = cards
        self._serving = serving
        self._up = frozenset(model for view in self.views() if view.phase is Phase.READY for model in view.models)


async def _stop(care: Care) -> None:
    if care.task is not None:
        care.task.cancel()
        await asyncio.gather(care.task, return_exceptions=True)
    try:
        await care.worker.close()
    except Exception:
        log.exception("worker %s could not be closed", care.worker.name)


def _common(a: ModelCard, b: ModelCard) -> ModelCard:
    contexts = [card.context_tokens for card in (a, b) if card.context_tokens is not None]
    return replace(
        a,
        context_tokens=min(contexts, default=None),
        vocab_size=a.vocab_size if a.vocab_size == b.vocab_size else None,
        default_output_tokens=a.default_output_tokens or b.default_output_tokens,
        features=a.features & b.features,
        continues=a.continues and b.continues,
        continues_seeds=a.continues_seeds and b.continues_seeds,
    )
