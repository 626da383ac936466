"""The owner as a worker: it runs plans by passing their jobs on.

Order, capacity, queue limits and deadlines belong to the owner, so the view has no limits. There is one worker for each
isolation and precision of the owner's workers, because these decide which jobs may come here. All share one link.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from inferry.cluster.frames import EndRun, ServedModels
from inferry.domain.clock import Clock
from inferry.domain.errors import WorkerUnreachable
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.streams import Done, Failed, FinishReason, Usage
from inferry.domain.workers import Capacity, Phase, WorkerView
from inferry.workers.plan_completion import PlanCompletion
from inferry.workers.remote.owner_link import OwnerLink

_PROBE_PLAN: Final = 0
"""Number of a plan that only asks whether the worker generates. The owner probes its own workers."""
_UNLIMITED = Capacity()


class RemoteWorker:
    """`served` is what the owner said last; it stays while the owner is away, so that calls wait for it.

    `link` leads to the present owner.
    """

    def __init__(self, name: str, link: OwnerLink, served: ServedModels, clock: Clock) -> None:
        self._name = name
        self.link = link
        self._clock = clock
        self.served = served

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_up(self) -> bool:
        return self.link.is_connected and self.served.is_up

    def cards(self) -> Sequence[ModelCard]:
        return self.served.cards

    def view(self) -> WorkerView:
        served = self.served
        return WorkerView(
            worker=self._name,
            models=served.models,
            phase=Phase.READY if self.is_up else Phase.DOWN,
            capacity=_UNLIMITED,
            observed_at=self._clock.now(),
            adapters=served.adapters,
            precision=served.precision,
            isolation=served.isolation,
            gpus=0,
            is_remote=True,
        )

    async def start(self) -> None:
        self.link.start()
        await self.link.wait_connected()

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        if plan.plan_id == _PROBE_PLAN:
            self._answer_probe(plan, emit)
            return
        completion = PlanCompletion(len(plan.jobs))
        for job in plan.jobs:
            if not self.link.submit(job, emit, completion):
                emit(Failed(job.job_id, WorkerUnreachable("the process that owns the workers is away")))
                completion.job_ended()
        try:
            await completion.finished
        finally:
            self.link.drop(completion)

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        return await self.link.cancel(job_ids)

    def end_run(self, tenant: str, run_id: str) -> None:
        """While the owner is away nothing is said: what it keeps for the run ends with its timeout, or with it."""
        self.link.send(EndRun(tenant, run_id))

    async def close(self) -> None:
        """The link is closed by its owner, since other workers share it."""

    def _answer_probe(self, plan: BatchPlan, emit: Emit) -> None:
        for job in plan.jobs:
            if self.is_up:
                emit(Done(job.job_id, FinishReason.LENGTH, Usage()))
            else:
                emit(Failed(job.job_id, WorkerUnreachable("the process that owns the workers is away")))
