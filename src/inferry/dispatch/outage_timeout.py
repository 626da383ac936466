"""How long queued jobs wait for a worker of their model to come up.

Belongs to the dispatch loop. While a model is out (`Pool.is_model_out`), a queued job of it waits for the model's
timeout (`Pool.outage_timeout_s`), counted from its arrival or from the beginning of the outage, whichever is later. A
job with a deadline waits until that. A precision of a model may be out while others are up: then the jobs that require
it wait likewise.
"""

import asyncio
import math
from collections.abc import Callable, Iterable
from itertools import product

from inferry.domain.attempts import Attempt
from inferry.domain.errors import GatewayError, NoWorker, WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.workers import WorkerView

RETRY_AFTER_S = 2.0
"""Told to the client. Engines take longer to start, and when this one began is not known."""

MIN_TIMER_S = 0.1


class OutageTimeout:
    """`timeout_s` is the timeout of a model, `waiting` are its queued attempts; `end_job` ends a job."""

    def __init__(
        self,
        timeout_s: Callable[[str], float],
        now: Callable[[], float],
        is_model_out: Callable[[str, str | None], bool],
        waiting: Callable[[str], Iterable[Attempt]],
        end_job: Callable[[str, GatewayError], object],
    ) -> None:
        self._timeout_s = timeout_s
        self._now = now
        self._is_model_out = is_model_out
        self._waiting = waiting
        self._end_job = end_job
        self._loop = asyncio.get_running_loop()
        # By model and precision; None stands for any.
        self._out_since: dict[tuple[str, str | None], float] = {}
        self._timers: dict[tuple[str, str | None], asyncio.TimerHandle] = {}

    def worker_changed(self, view: WorkerView) -> None:
        for key in product(view.models, {None, view.precision}):
            if not self._is_model_out(*key):
                self._out_since.pop(key, None)
                if key in self._timers:
                    self._timers.pop(key).cancel()
            elif key not in self._out_since:
                self._out_since[key] = self._now()
                self._timers[key] = self._loop.call_later(self._timeout_s(key[0]), self._expire, *key)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _expire(self, model: str, precision: str | None) -> None:
        key = model, precision
        now, since = self._now(), self._out_since[key]
        next_s = timeout_s = self._timeout_s(model)
        for attempt in self._waiting(model):
            job = attempt.job
            if precision not in (None, job.route.precision):
                continue
            left_s = outage_deadline(job, since, timeout_s) - now
            if left_s <= 0:
                self._end_job(job.job_id, outage_error(job, timeout_s))
            else:
                next_s = min(next_s, left_s)
        # A job that arrives later is not due before this either.
        self._timers[key] = self._loop.call_later(max(next_s, MIN_TIMER_S), self._expire, *key)


def outage_deadline(job: InferenceJob, out_since: float, no_worker_timeout_s: float) -> float:
    """When a queued job has waited long enough for a model that is out since `out_since`. The scheduler watches
    deadlines."""
    return max(out_since, job.arrived_at) + no_worker_timeout_s if job.deadline is None else math.inf


def outage_error(job: InferenceJob, no_worker_timeout_s: float) -> GatewayError:
    """Why the job ends: a worker lost it where it had begun, else no worker is up."""
    precision = "" if job.route.precision is None else f" with precision {job.route.precision}"
    text = f"no worker of model `{job.route.model}`{precision} came up within {no_worker_timeout_s:g} s"
    if job.attempt - 1 > job.preemptions + job.unreachable_attempts:
        return WorkerLost(f"the worker was lost, and {text}")
    return NoWorker(text, retry_after_s=RETRY_AFTER_S)
