"""The door of the gateway: every job that comes in has a run and a permit, and gives both back when it ends.

What may enter is decided next door (`admission.runs`, `admission.gate`); here is who is inside, and what each of them
is told and charged.
"""

from collections.abc import Callable
from typing import NamedTuple

from inferry.admission.gate import Gate
from inferry.admission.permits import Permit
from inferry.admission.runs import Run, Runs
from inferry.domain.attempts import Attempt
from inferry.domain.callers import Caller
from inferry.domain.clock import Clock
from inferry.domain.errors import ClientClosed, GatewayError, InvalidApiKey, RunCancelled
from inferry.domain.jobs import Estimate, Footprint, InferenceJob
from inferry.domain.streams import Done, Usage
from inferry.domain.values import replace

_NOTHING = Footprint(Estimate.exactly(0), Estimate.exactly(0), Estimate.exactly(0))


class _Inside(NamedTuple):
    permit: Permit
    run: Run


class Entrance:
    """Who is inside. Implements the loop's `Budget`."""

    def __init__(self, gate: Gate, runs: Runs, clock: Clock) -> None:
        self.gate = gate
        self.runs = runs
        self.clock = clock
        self.on_renewed: Callable[[], None] | None = None
        self._inside: dict[str, _Inside] = {}

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, job: InferenceJob, caller: Caller) -> tuple[InferenceJob, int, int]:
        """Let the job in: the job as it may run, how many tokens it may write for now, and the batch of marks that must
        be in the database before it runs (0: none).

        Raises the GatewayError that says why not, and then it has left no trace but in its run's count of refusals.
        """
        now = self.clock.now()
        run = self.runs.enter(job, now)
        try:
            permit = self.gate.admit(job, caller, run.lineage, now, self.clock.wall())
        except BaseException:
            self.runs.turned_away(run, job.job_id, now)
            raise
        self._inside[job.job_id] = _Inside(permit, run)
        if permit.output_cap < job.token_budget:
            job = _cut(job, permit.output_cap)
        return job, permit.may_write, permit.batch

    def enter_free(self, job: InferenceJob, caller: Caller) -> "FreeTicket":
        """Let in a job that shares another's execution: it counts as a request, and for no tokens.

        Raises as `enter` does.
        """
        free = replace(job, token_budget=0, footprint=_NOTHING)
        now = self.clock.now()
        run = self.runs.enter(job, now)
        try:
            permit = self.gate.admit(free, caller, run.lineage, now, self.clock.wall())
        except BaseException:
            self.runs.turned_away(run, job.job_id, now)
            raise
        return FreeTicket(self, _Inside(permit, run), job.job_id)

    def turn_away(self, job_id: str) -> None:
        """Somebody further in has refused it."""
        permit, run = self._inside.pop(job_id)
        now = self.clock.now()
        self.gate.settle(permit, None, now, self.clock.wall())
        self.runs.turned_away(run, job_id, now)

    # -- while it is inside ------------------------------------------------------------------------------------------

    def more(self, job_id: str, written: int) -> int:
        may_write = self.gate.renew(self._inside[job_id].permit, written)
        if self.on_renewed is not None:
            self.on_renewed()
        return may_write

    def why(self, job_id: str) -> GatewayError:
        return self.gate.exhausted(self._inside[job_id].permit)

    def is_welcome(self, job: InferenceJob) -> GatewayError | None:
        inside = self._inside.get(job.job_id)
        if inside is not None and self.runs.is_cancelled(inside.run):
            return RunCancelled(f"run `{job.run_id}` was cancelled")
        return None

    # -- its end -----------------------------------------------------------------------------------------------------

    def ended(self, attempt: Attempt, usage: Usage, now: float) -> int | None:
        inside = self._inside.pop(attempt.job.job_id, None)
        if inside is None:
            return None
        permit, run = inside
        cost = self.gate.settle(permit, usage if _is_charged(attempt) else None, now, self.clock.wall())
        self.runs.left(run, attempt, usage, cost, now)
        return cost


class FreeTicket:
    """The right to be there of a job that has no execution of its own."""

    __slots__ = ("_entrance", "_inside", "_job_id")

    def __init__(self, entrance: Entrance, inside: _Inside, job_id: str) -> None:
        self._entrance = entrance
        self._inside = inside
        self._job_id = job_id

    def ended(self, attempt: Attempt) -> None:
        """The job has its end, as this attempt that used nothing."""
        entrance, (permit, run) = self._entrance, self._inside
        now = entrance.clock.now()
        cost = entrance.gate.settle(permit, Usage(), now, entrance.clock.wall())
        entrance.runs.left(run, attempt, Usage(), cost, now)

    def withdraw(self) -> None:
        """It is to have an execution of its own after all, and comes in anew."""
        entrance, (permit, run) = self._entrance, self._inside
        now = entrance.clock.now()
        entrance.gate.settle(permit, None, now, entrance.clock.wall())
        entrance.runs.turned_away(run, self._job_id, now)


def _is_charged(attempt: Attempt) -> bool:
    """Answers are paid for, and what a client had computed that left, or whose key ended, before the end. What we or a
    worker lost is not, nor what never got to a first token."""
    end = attempt.end
    if isinstance(end, Done):
        return True
    was_theirs = end is not None and isinstance(end.error, ClientClosed | RunCancelled | InvalidApiKey)
    return was_theirs and (attempt.first_token_at is not None or attempt.job.so_far is not None)


def _cut(job: InferenceJob, cap: int) -> InferenceJob:
    """The job with no more output than is left of its budget."""
    payload = job.payload
    output = job.footprint.output
    return replace(
        job,
        token_budget=cap,
        footprint=Footprint(
            job.footprint.prompt,
            job.footprint.cached,
            Estimate(min(output.low, cap), min(output.expected, cap), min(output.high, cap)),
        ),
        payload=replace(
            payload,
            output_cap=cap,
            output_limit=cap * payload.choices,
            sampling=replace(payload.sampling, max_tokens=min(cap, payload.sampling.max_tokens)),
        ),
    )
