"""Metrics of decision records: voluntary holds, and the limits that kept jobs waiting."""

from typing import Final

from inferry.domain.decisions import FLEET_LIMITS, WORKER_LIMITS, Decision
from inferry.domain.lanes import Lane
from inferry.observe.metric_families import Counters, Histograms

NO_WORKER: Final = "none"
OTHER: Final = "other"


class DecisionMetrics:
    """Belongs to `Metrics`, which names workers and models. A job that was not held and did not wait costs little."""

    def __init__(self) -> None:
        self._batching_wait = Histograms("inferry_batching_wait_seconds")
        self._binding_limits = Counters("inferry_binding_limit_total")
        self._workers = {NO_WORKER}
        for limit in FLEET_LIMITS:
            self._binding_limits.at(NO_WORKER, limit)
        self.families: tuple[Counters | Histograms, ...] = (self._batching_wait, self._binding_limits)

    def register_worker(self, worker: str) -> None:
        self._workers.add(worker)
        for limit in WORKER_LIMITS:
            self._binding_limits.at(worker, limit)

    def register_model(self, model: str) -> None:
        for lane in Lane:
            self._batching_wait.at(lane.name, model)

    def remove_worker(self, worker: str) -> None:
        self._workers.discard(worker)
        for limit in (*WORKER_LIMITS, *FLEET_LIMITS):
            self._binding_limits.drop(worker, limit)

    def sent(self, lane: Lane, model: str, decision: Decision) -> None:
        if decision.held_by is not None:
            self._batching_wait.at(lane.name, model).observe(decision.held_s)
        if decision.limit is not None:
            worker = decision.limit_worker or NO_WORKER
            self._binding_limits.at(worker if worker in self._workers else OTHER, decision.limit).value += 1
