"""What observes the running gateway: the history of its metrics, and what follows each of its samples."""

from collections.abc import Callable

from inferry.dispatch.periodic_task import PeriodicTask
from inferry.domain.clock import Clock
from inferry.observe.history import INTERVAL_S, MetricHistory
from inferry.observe.metrics import Metrics

OnSample = Callable[[float], None]


class Observation:
    """Owns the task that samples the metrics. `followers` are called with the gateway's time after each sample."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self.history = MetricHistory(metrics)
        self.followers: list[OnSample] = []
        self._clock = clock
        self._sampling = PeriodicTask(self._sample, INTERVAL_S, "metrics")

    def start(self) -> None:
        self.history.sample(self._clock.now())
        self._sampling.start()

    async def close(self) -> None:
        await self._sampling.close()

    async def _sample(self) -> None:
        now = self._clock.now()
        self.history.sample(now)
        for follow in self.followers:
            follow(now)
