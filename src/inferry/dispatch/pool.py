"""The workers, and what is believed of each.

One task per worker starts it, makes it generate once, and then keeps looking at it. A worker counts as ready only
after a real generation: an endpoint that answers health checks may still die at its first token. Only these tasks
change what is believed; the dispatch loop is told through `on_view`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from msgspec.structs import replace

from inferry.domain.clock import Clock
from inferry.domain.errors import GatewayError, WorkerTimeout
from inferry.domain.jobs import (
    BatchKey,
    Estimate,
    Footprint,
    InferenceJob,
    Lane,
    Payload,
    RouteKey,
    Sampling,
)
from inferry.domain.plans import BatchPlan, Phase, ReleaseReason, WorkerView
from inferry.domain.ports import ModelCard, Worker
from inferry.domain.streams import Done, Failed, Item

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
PROBE_TIMEOUT_S = 60.0
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 5.0


class Pool:
    """Workers by name, with the view the scheduler is to have of each."""

    def __init__(self, workers: Iterable[Worker], clock: Clock) -> None:
        self._workers = {worker.name: worker for worker in workers}
        self._clock = clock
        self._views = {name: self._unready(worker) for name, worker in self._workers.items()}
        self._cards = self._known_cards()
        self._looks = {name: asyncio.Event() for name in self._workers}
        self._tasks: list[asyncio.Task[None]] = []
        self._probes = 0
        self.on_view: Callable[[str], None] = lambda worker: None

    # -- what others ask ---------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self._workers)

    def worker(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def view(self, name: str) -> WorkerView:
        return self._views[name]

    def views(self) -> list[WorkerView]:
        return list(self._views.values())

    def cards(self) -> dict[str, ModelCard]:
        """The models behind the pool. Where several workers serve one, only what all of them can do counts."""
        return self._cards

    def serves(self, model: str) -> bool:
        """Is some worker of this model up right now?"""
        return any(view.phase is Phase.READY and model in view.models for view in self._views.values())

    @property
    def is_ready(self) -> bool:
        return any(view.phase is Phase.READY for view in self._views.values())

    def look_at(self, name: str) -> None:
        """A job was lost on this worker: look at it now. Whether it is down is for the worker to say: one lost job may
        be the job's own fault, and must not take the worker from everybody else.
        """
        self._looks[name].set()

    # -- what the pool does ------------------------------------------------------------------------------------------

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._care_for(worker)) for worker in self._workers.values()]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers.values()), return_exceptions=True)

    async def _care_for(self, worker: Worker) -> None:
        await self._until_it_works(worker, "start", worker.start)
        while True:
            await self._until_it_works(worker, "generate", lambda: self._probe(worker))
            log.info("worker %s is ready: %s", worker.name, ", ".join(sorted(worker.view().models)))
            while worker.view().phase is Phase.READY:
                self._believe(worker.view())
                await self._pause(worker, LOOK_EVERY_S)
            log.warning(
                "worker %s is %s: it has to generate before it gets work", worker.name, worker.view().phase.value
            )
            self._believe(self._unready(worker))

    async def _until_it_works(self, worker: Worker, what: str, attempt: Callable[[], Awaitable[None]]) -> None:
        delay = FIRST_RETRY_S
        while True:
            try:
                await attempt()
                return
            except Exception as error:
                why = error.message if isinstance(error, GatewayError) else repr(error)
                log.warning("worker %s could not %s (%s); again in %.1f s", worker.name, what, why, delay)
            self._looks[worker.name].clear()
            self._believe(self._unready(worker))
            await asyncio.sleep(delay)
            delay = min(delay * 2, LONGEST_RETRY_S)

    async def _probe(self, worker: Worker) -> None:
        """One real token, or an exception that says why not."""
        self._probes += 1
        job = _probe_job(f"probe-{worker.name}-{self._probes}", worker.cards()[0].name, self._clock.now())
        ends: list[Done | Failed] = []

        def emit(item: Item) -> None:
            if isinstance(item, Done | Failed):
                ends.append(item)

        plan = BatchPlan(
            plan_id=0,
            worker=worker.name,
            jobs=(job,),
            reason=ReleaseReason.IMMEDIATE,
            formed_at=job.arrived_at,
        )
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await worker.run(plan, emit)
        except TimeoutError:
            raise WorkerTimeout(f"no token within {PROBE_TIMEOUT_S:.0f} s") from None
        if ends and isinstance(ends[0], Failed):
            raise ends[0].error

    async def _pause(self, worker: Worker, seconds: float) -> None:
        look = self._looks[worker.name]
        try:
            async with asyncio.timeout(seconds):
                await look.wait()
        except TimeoutError:
            pass
        look.clear()

    def _believe(self, view: WorkerView) -> None:
        known = self._views.get(view.worker)
        self._views[view.worker] = view
        # A new date alone is no news to the scheduler.
        if known is None or replace(known, observed_at=view.observed_at, load=view.load) != view:
            self._cards = self._known_cards()
            self.on_view(view.worker)

    def _known_cards(self) -> dict[str, ModelCard]:
        cards: dict[str, ModelCard] = {}
        for worker in self._workers.values():
            for card in worker.cards():
                known = cards.get(card.name)
                cards[card.name] = card if known is None else _common(known, card)
        return cards

    def _unready(self, worker: Worker) -> WorkerView:
        view = worker.view()
        return replace(view, phase=Phase.STARTING) if view.phase is Phase.READY else view


def _common(a: ModelCard, b: ModelCard) -> ModelCard:
    contexts = [card.context_tokens for card in (a, b) if card.context_tokens is not None]
    return replace(
        a,
        context_tokens=min(contexts, default=None),
        vocab_size=a.vocab_size if a.vocab_size == b.vocab_size else None,
        default_output_tokens=a.default_output_tokens or b.default_output_tokens,
        features=a.features & b.features,
    )


def _probe_job(job_id: str, model: str, now: float) -> InferenceJob:
    route = RouteKey(model)
    one = Estimate.exactly(1)
    body = b'{"model":"%s","messages":[{"role":"user","content":"ping"}],"max_tokens":1}' % model.encode()
    return InferenceJob(
        job_id=job_id,
        tenant="inferry",
        run_id=job_id,
        step_id="probe",
        lane=Lane.P0,
        route=route,
        batch_key=BatchKey(route),
        footprint=Footprint(one, Estimate.exactly(0), one),
        token_budget=1,
        prompt_hash="",
        arrived_at=now,
        max_wait_s=0.0,
        payload=Payload(api="chat", body=body, sampling=Sampling(max_tokens=1, temperature=0.0), prompt_ids=(0,)),
    )
