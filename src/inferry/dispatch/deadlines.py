"""Ends calls that run past their deadline or past the gateway's request timeout.

Subscribes to `queued`, `sent` and `ended`. The scheduler expires a job whose deadline passes in the queue; a deadline
is watched here from the moment its job is sent, the request timeout from the job's arrival. A call with neither costs
two comparisons; others have one timer.
"""

import asyncio
from collections.abc import Callable

from inferry.domain.attempts import Attempt
from inferry.domain.errors import DeadlineExceeded, GatewayError, RequestTimeout
from inferry.domain.jobs import InferenceJob


class Deadlines:
    """`on_expired` cancels a job for an error; the owner sets it. `is_remote` says whether a worker passes jobs on to a
    process that watches them itself.
    """

    def __init__(
        self,
        request_timeout_s: float | None,
        now: Callable[[], float],
        is_remote: Callable[[str], bool] = lambda worker: False,
    ) -> None:
        self._timeout_s = request_timeout_s
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_remote = is_remote
        self.on_expired: Callable[[str, GatewayError], object] = lambda job_id, error: None

    def __len__(self) -> int:
        return len(self._timers)

    def expiry(self, job: InferenceJob) -> tuple[float, GatewayError] | None:
        """When the job is to end at the latest, and with which error; None for a job without a limit."""
        at = None if self._timeout_s is None else job.arrived_at + self._timeout_s
        deadline = job.deadline
        if deadline is not None and (at is None or deadline <= at):
            allowed_ms = (deadline - job.arrived_at) * 1000
            return deadline, DeadlineExceeded(f"the call was not complete within its deadline of {allowed_ms:.0f} ms")
        if at is None:
            return None
        return at, RequestTimeout(f"the call was not complete within {self._timeout_s:g} s")

    # -- events ------------------------------------------------------------------------------------------------------

    def queued(self, attempt: Attempt, now: float) -> None:
        job_id = attempt.job.job_id
        if self._timeout_s is not None and job_id not in self._timers:
            left_s = attempt.job.arrived_at + self._timeout_s - now
            self._watch(job_id, left_s, RequestTimeout(f"the call was not complete within {self._timeout_s:g} s"))

    def sent(self, attempt: Attempt, now: float) -> None:
        is_watched = self._timers or attempt.job.deadline is not None
        if is_watched and attempt.plan is not None and self._is_remote(attempt.plan.worker):
            self._forget(attempt.job.job_id)  # the process that runs the job ends it in time
            return
        if attempt.job.deadline is not None and (expiry := self.expiry(attempt.job)) is not None:
            self._watch(attempt.job.job_id, expiry[0] - now, expiry[1])

    def ended(self, attempt: Attempt, now: float) -> None:
        if self._timers and attempt.resumed is None:
            self._forget(attempt.job.job_id)

    def _forget(self, job_id: str) -> None:
        timer = self._timers.pop(job_id, None)
        if timer is not None:
            timer.cancel()

    def _watch(self, job_id: str, left_s: float, error: GatewayError) -> None:
        self._forget(job_id)
        self._timers[job_id] = self._loop.call_later(max(0.0, left_s), self._expire, job_id, error)

    def _expire(self, job_id: str, error: GatewayError) -> None:
        self._timers.pop(job_id, None)
        self.on_expired(job_id, error)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
