"""Facts that are gathered from the history of the metrics."""

from inferry.domain.lanes import DEFAULT_LANES
from inferry.domain.workers import Capacity, Load, Phase, WorkerView
from inferry.observe.diagnosis.facts import LiveState, WorkerStatus
from inferry.observe.diagnosis.gather import gather
from inferry.observe.history import MetricHistory, SeriesReading


class Burst:
    """One worker at 48 sequences while jobs are queued, idle otherwise."""

    depth = 0.0

    def readings(self) -> list[SeriesReading]:
        lane, worker = (("lane", "P2"), ("model", "m")), (("worker", "w"),)
        busy = self.depth > 0
        return [
            SeriesReading("inferry_queue_depth", lane, self.depth),
            SeriesReading("inferry_jobs_in_flight", (), self.depth),
            SeriesReading("inferry_worker_running_sequences", worker, 48.0 if busy else 1.0),
            SeriesReading("inferry_worker_gpu_utilization_ratio", worker, 0.95 if busy else 0.02),
        ]


def test_what_a_worker_did_while_jobs_were_queued_is_known_beside_the_mean() -> None:
    source = Burst()
    history = MetricHistory(source)
    for number, depth in enumerate([0.0] * 8 + [200.0, 100.0]):
        source.depth = depth
        history.sample(5.0 * number)
    view = WorkerView(
        worker="w", models=frozenset(), phase=Phase.READY, capacity=Capacity(64), load=Load(), observed_at=0.0
    )
    facts = gather(
        history,
        300,
        lanes=DEFAULT_LANES,
        workers=[WorkerStatus(view=view, kind="embedded", drained=False, breaker="closed")],
        live=LiveState(running={}, slow_streams=0, unread_bytes=0),
    )
    (worker,) = facts.workers
    assert (worker.running, worker.running_queued, worker.running_then) == (10.4, 48.0, 48.0)
    assert (worker.utilisation_queued, worker.utilisation_then) == (0.95, 0.95)
