"""How long queued jobs wait for a worker of their model to come up.

Belongs to the dispatch loop. While a model is out (`Pool.is_model_out`), a queued job of it waits for the model's
timeout (`Pool.outage_timeout_s`), counted from its arrival or from the beginning of the outage, whichever is later. A
job with a deadline waits until that.
"""

import asyncio
import math
from collections.abc import Callable, Iterable

from inferry.domain.attempts import Attempt
from inferry.domain.errors import GatewayError, NoWorker, WorkerLost
from inferry.domain.jobs import InferenceJob

RETRY_AFTER_S = 2.0
"""Told to the client. Engines take longer to start, and when this one began is not known."""

MIN_TIMER_S = 0.1


class OutageTimeout:
    """`timeout_s` is the timeout of a model, `waiting` are its queued attempts; `end_job` ends a job."""

    def __init__(
        self,
        timeout_s: Callable[[str], float],
        now: Callable[[], float],
        is_model_out: Callable[[str], bool],
        waiting: Callable[[str], Iterable[Attempt]],
        end_job: Callable[[str, GatewayError], object],
    ) -> None:
        self._timeout_s = timeout_s
        self._now = now
        self._is_model_out = is_model_out
        self._waiting = waiting
        self._end_job = end_job
        self._loop = asyncio.get_running_loop()
        self._out_since: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def models_changed(self, models: Iterable[str]) -> None:
        """The workers of these models have changed."""
        for model in models:
            if not self._is_model_out(model):
                self._out_since.pop(model, None)
                if model in self._timers:
                    self._timers.pop(model).cancel()
            elif model not in self._out_since:
                self._out_since[model] = self._now()
                self._timers[model] = self._loop.call_later(self._timeout_s(model), self._expire, model)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _expire(self, model: str) -> None:
        now, since = self._now(), self._out_since[model]
        next_s = timeout_s = self._timeout_s(model)
        for attempt in self._waiting(model):
            job = attempt.job
            left_s = outage_deadline(job, since, timeout_s) - now
            if left_s <= 0:
                self._end_job(job.job_id, outage_error(job, timeout_s))
            else:
                next_s = min(next_s, left_s)
        # A job that arrives later is not due before this either.
        self._timers[model] = self._loop.call_later(max(next_s, MIN_TIMER_S), self._expire, model)


def outage_deadline(job: InferenceJob, out_since: float, no_worker_timeout_s: float) -> float:
    """When a queued job has waited long enough for a model that is out since `out_since`. The scheduler watches
    deadlines."""
    return max(out_since, job.arrived_at) + no_worker_timeout_s if job.deadline is None else math.inf


def outage_error(job: InferenceJob, no_worker_timeout_s: float) -> GatewayError:
    """Why the job ends: a worker lost it where it had begun, else no worker is up."""
    text = f"no worker of model `{job.route.model}` came up within {no_worker_timeout_s:g} s"
    if job.attempt - 1 > job.preemptions + job.unreachable_attempts:
        return WorkerLost(f"the worker was lost, and {text}")
    return NoWorker(text, retry_after_s=RETRY_AFTER_S)
