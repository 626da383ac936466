"""Stands in the pool for replicas that do not run: its models are known, and calls for them wait for a replica."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from inferry.domain.clock import Clock
from inferry.domain.errors import WorkerLost
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, ModelCard, Worker
from inferry.domain.streams import Failed
from inferry.domain.values import replace
from inferry.domain.workers import Capacity, Phase, WorkerView


class Standby:
    """`template` is a worker as replicas are, never started. `replicas` are those of the gateway now, by name. The
    cards are those of a replica that is up, or was the last.
    """

    def __init__(
        self, name: str, template: Worker, replicas: Mapping[str, Worker], scale_up_wait_s: float, clock: Clock
    ) -> None:
        self._name = name
        self._replicas = replicas
        self._cards = list(template.cards())
        self._view = replace(
            template.view(),
            worker=name,
            phase=Phase.DRAINING,
            capacity=Capacity(sequences=0),
            kv_capacity=None,
            gpus=0,
            controlled=False,
            observed_at=clock.now(),
            scale_up_wait_s=scale_up_wait_s,
        )

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Never returns: there is nothing to start."""
        await asyncio.Event().wait()

    def view(self) -> WorkerView:
        return self._view

    def cards(self) -> Sequence[ModelCard]:
        for replica in self._replicas.values():
            if replica.view().phase is Phase.READY:
                self._cards = list(replica.cards())
                break
        return self._cards

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        for job in plan.jobs:
            emit(Failed(job.job_id, WorkerLost(f"{self._name} has no replica")))

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        return frozenset()

    async def close(self) -> None:
        pass
