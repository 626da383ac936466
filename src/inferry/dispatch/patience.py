"""How long queued jobs wait for a worker of their model to come up.

Belongs to the dispatch loop. While a model is out (`Pool.is_out`), a queued job of it waits for `patience_s`, counted
from its arrival or from the beginning of the outage, whichever is later. A job with a deadline waits until that.
"""

import asyncio
import math
from collections.abc import Callable, Iterable

from inferry.domain.errors import GatewayError, NoWorker, WorkerLost
from inferry.domain.jobs import InferenceJob

RETRY_AFTER_S = 2.0
"""What a client is told: engines take longer to start, and when this one began to is not known."""

LEAST_S = 0.1


class Patience:
    """`waiting` are the queued jobs of a model; `give_up` ends one of them."""

    def __init__(
        self,
        patience_s: float,
        now: Callable[[], float],
        is_out: Callable[[str], bool],
        waiting: Callable[[str], Iterable[InferenceJob]],
        give_up: Callable[[str, GatewayError], None],
    ) -> None:
        self._patience_s = patience_s
        self._now = now
        self._is_out = is_out
        self._waiting = waiting
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._out_since: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def look(self, models: Iterable[str]) -> None:
        """The workers of these models have changed."""
        for model in models:
            if not self._is_out(model):
                self._out_since.pop(model, None)
                if model in self._timers:
                    self._timers.pop(model).cancel()
            elif model not in self._out_since:
                self._out_since[model] = self._now()
                self._timers[model] = self._loop.call_later(self._patience_s, self._run_out, model)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _run_out(self, model: str) -> None:
        now, since = self._now(), self._out_since[model]
        next_s = self._patience_s
        for job in list(self._waiting(model)):
            left_s = waits_until(job, since, self._patience_s) - now
            if left_s <= 0:
                self._give_up(job.job_id, out_of_patience(job, self._patience_s))
            else:
                next_s = min(next_s, left_s)
        # A job that comes later is not due before this either.
        self._timers[model] = self._loop.call_later(max(next_s, LEAST_S), self._run_out, model)


def waits_until(job: InferenceJob, out_since: float, patience_s: float) -> float:
    """When a queued job has waited long enough for a model that is out since then. A deadline is the scheduler's to
    watch."""
    return max(out_since, job.arrived_at) + patience_s if job.deadline is None else math.inf


def out_of_patience(job: InferenceJob, patience_s: float) -> GatewayError:
    """Why the job ends: that a worker lost it where it had begun, else that there is none."""
    text = f"no worker of model `{job.route.model}` came up within {patience_s:g} s"
    if job.attempt - 1 > job.preemptions + job.unreached:
        return WorkerLost(f"the worker was lost, and {text}")
    return NoWorker(text, retry_after_s=RETRY_AFTER_S)
