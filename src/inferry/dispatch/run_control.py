"""One cancel for a whole tree of runs: what is queued is gone at once, what runs is stopped at its worker.

The tombstone comes first, so that nothing of the run enters any more, nor is tried again; then everything that is in
flight is told to end: what runs first, so that its workers are at it meanwhile. The queue is emptied in one go, so that
nothing of it takes the place of what was stopped; whoever waits for it is told afterwards, a few at a time.
"""

import asyncio
from collections.abc import Callable, Iterable

from inferry.admission.runs import Runs
from inferry.dispatch.values import CancelReport
from inferry.domain.attempts import Attempt
from inferry.domain.clock import Clock
from inferry.domain.errors import GatewayError, RunCancelled
from inferry.domain.streams import Done

LOOK_S = 0.002
"""How often the ends of running jobs are looked for."""
TURNS_TO_SEND = 3
"""Turns of the event loop until cancels are on their way: to gather them, to let plans begin, to send."""
AT_ONCE = 64
"""How many clients are told before anybody else gets a turn."""


class RunControl:
    """Ends runs. Belongs to the event loop of the gateway whose jobs it ends."""

    def __init__(
        self,
        runs: Runs,
        clock: Clock,
        cancel: Callable[[str, GatewayError], None],
        take_out: Callable[[Iterable[str]], set[str]],
        attempt_of: Callable[[str], Attempt | None],
    ) -> None:
        self._runs = runs
        self._clock = clock
        self._cancel = cancel
        self._take_out = take_out
        self._telling: set[asyncio.Task[None]] = set()
        self._attempt_of = attempt_of

    async def cancel_run(
        self, tenant: str, run_id: str, *, wait_s: float = 1.0, is_known: bool = False
    ) -> CancelReport:
        """End a run and everything below it; answers when all of that has ended, or the time is over.

        Raises RunNotFound, unless somebody else knows that there was such a run (`is_known`).
        """
        now = self._clock.now()
        jobs = self._runs.cancel(tenant, run_id, now, is_known=is_known)
        error = RunCancelled(f"run `{run_id}` was cancelled")
        attempts = [(job_id, self._attempt_of(job_id)) for job_id in jobs]
        told = {job_id for job_id, attempt in attempts if attempt is not None and attempt.plan is not None}
        for job_id in told:
            self._cancel(job_id, error)
        # These go out now, in one call to each worker: it is at it while the queue is cleared.
        for _ in range(TURNS_TO_SEND):
            await asyncio.sleep(0)
        taken_out = self._take_out(job_id for job_id in jobs if job_id not in told)
        for job_id in jobs:
            if job_id not in told and job_id not in taken_out:
                self._cancel(job_id, error)
        telling = asyncio.get_running_loop().create_task(self._tell(taken_out, error))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        watched = [attempt for job_id, attempt in attempts if attempt is not None and job_id not in taken_out]
        until = now + wait_s
        # To be told of every end would cost all jobs something; this costs the few that are cancelled.
        while (left := [one for one in watched if not one.is_ended]) and self._clock.now() < until:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return _report(attempts, left, now, self._clock.now())

    async def _tell(self, job_ids: Iterable[str], error: GatewayError) -> None:
        """Tell the clients of jobs that are dead already."""
        for number, job_id in enumerate(job_ids):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            self._cancel(job_id, error)


def _report(attempts: list[tuple[str, Attempt | None]], left: list[Attempt], began: float, now: float) -> CancelReport:
    sent = [(one, one.sent_at) for _, one in attempts if one is not None and one.sent_at is not None]
    wasted = [(one, then) for one, then in sent if not isinstance(one.end, Done)]  # some are done before they are told
    return CancelReport(
        queued=len(attempts) - len(sent),
        running=len(sent),
        freed=sum(one.is_ended for one, _ in sent),
        wasted_tokens=sum(
            max(one.output_tokens, 0 if one.end is None else one.end.usage.output_tokens) for one, _ in wasted
        ),
        wasted_ms=round(sum(((one.ended_at or now) - then) * 1000 for one, then in wasted), 1),
        unconfirmed=len(left),
        took_ms=round((now - began) * 1000, 3),
    )
