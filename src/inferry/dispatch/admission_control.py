"""The door of the gateway: every job that comes in has a run and a permit, and gives both back when it ends.

What may enter is decided next door (`runs.registry`, `admission.quota_gate`); here is who is inside, and what each of
them is told and charged.
"""

from collections.abc import Callable
from typing import NamedTuple

from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.domain.attempts import Attempt
from inferry.domain.callers import Caller
from inferry.domain.clock import Clock
from inferry.domain.errors import ClientClosed, GatewayError, InvalidApiKey, RunCancelled
from inferry.domain.jobs import Estimate, Footprint, InferenceJob
from inferry.domain.streams import Done, Usage
from inferry.domain.values import replace
from inferry.runs.registry import Run, RunRegistry

_EMPTY_FOOTPRINT = Footprint(Estimate.exactly(0), Estimate.exactly(0), Estimate.exactly(0))


class AdmissionSession(NamedTuple):
    permit: Permit
    run: Run


class AdmissionControl:
    """Who is inside. Implements the loop's `Budget`."""

    def __init__(self, gate: QuotaGate, runs: RunRegistry, clock: Clock) -> None:
        self.gate = gate
        self.runs = runs
        self.clock = clock
        self.on_renewed: Callable[[], None] | None = None
        self._sessions: dict[str, AdmissionSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def admit(self, job: InferenceJob, caller: Caller) -> tuple[InferenceJob, int, int]:
        """Let the job in: the job as it may run, how many tokens it may write for now, and the batch of marks that must
        be in the database before it runs (0: none).

        Raises the GatewayError that says why not, and then it has left no trace but in its run's count of refusals.
        """
        now = self.clock.now()
        run = self.runs.admit(job, now)
        try:
            permit = self.gate.admit(job, caller, run.lineage, now, self.clock.wall())
        except BaseException:
            self.runs.reject(run, job.job_id, now)
            raise
        self._sessions[job.job_id] = AdmissionSession(permit, run)
        if permit.output_cap < job.token_budget:
            job = _capped(job, permit.output_cap)
        return job, permit.granted_tokens, permit.watermark_batch

    def admit_follower(self, job: InferenceJob, caller: Caller) -> "FollowerSession":
        """Let in a job that shares another's execution: it counts as a request, and for no tokens.

        Raises as `admit` does.
        """
        unmetered = replace(job, token_budget=0, footprint=_EMPTY_FOOTPRINT)
        now = self.clock.now()
        run = self.runs.admit(job, now)
        try:
            permit = self.gate.admit(unmetered, caller, run.lineage, now, self.clock.wall())
        except BaseException:
            self.runs.reject(run, job.job_id, now)
            raise
        return FollowerSession(self, AdmissionSession(permit, run), job.job_id)

    def reject(self, job_id: str) -> None:
        """Somebody further in has refused it."""
        permit, run = self._sessions.pop(job_id)
        now = self.clock.now()
        self.gate.settle(permit, None, now, self.clock.wall())
        self.runs.reject(run, job_id, now)

    # -- while it is inside ------------------------------------------------------------------------------------------

    def renew_grant(self, job_id: str, written: int) -> int:
        granted_tokens = self.gate.renew(self._sessions[job_id].permit, written)
        if self.on_renewed is not None:
            self.on_renewed()
        return granted_tokens

    def exhausted_error(self, job_id: str) -> GatewayError:
        return self.gate.exhausted_error(self._sessions[job_id].permit)

    def retry_refusal(self, job: InferenceJob) -> GatewayError | None:
        session = self._sessions.get(job.job_id)
        if session is not None and self.runs.is_cancelled(session.run):
            return RunCancelled(f"run `{job.run_id}` was cancelled")
        return None

    # -- its end -----------------------------------------------------------------------------------------------------

    def ended(self, attempt: Attempt, usage: Usage, now: float) -> int | None:
        session = self._sessions.pop(attempt.job.job_id, None)
        if session is None:
            return None
        permit, run = session
        cost = self.gate.settle(permit, usage if _is_billable(attempt) else None, now, self.clock.wall())
        self.runs.job_ended(run, attempt, usage, cost, now)
        return cost


class FollowerSession:
    """The right to be there of a job that has no execution of its own."""

    __slots__ = ("_admission_control", "_job_id", "_sessions")

    def __init__(self, admission_control: AdmissionControl, session: AdmissionSession, job_id: str) -> None:
        self._admission_control = admission_control
        self._sessions = session
        self._job_id = job_id

    def ended(self, attempt: Attempt) -> None:
        """The job has its end, as this attempt that used nothing."""
        admission_control, (permit, run) = self._admission_control, self._sessions
        now = admission_control.clock.now()
        cost = admission_control.gate.settle(permit, Usage(), now, admission_control.clock.wall())
        admission_control.runs.job_ended(run, attempt, Usage(), cost, now)

    def withdraw(self) -> None:
        """It is to have an execution of its own after all, and comes in anew."""
        admission_control, (permit, run) = self._admission_control, self._sessions
        now = admission_control.clock.now()
        admission_control.gate.settle(permit, None, now, admission_control.clock.wall())
        admission_control.runs.reject(run, self._job_id, now)


def _is_billable(attempt: Attempt) -> bool:
    """Answers are paid for, and what a client had computed that left, or whose key ended, before the end. What we or a
    worker lost is not, nor what never got to a first token."""
    end = attempt.end
    if isinstance(end, Done):
        return True
    is_client_caused = end is not None and isinstance(end.error, ClientClosed | RunCancelled | InvalidApiKey)
    return is_client_caused and (attempt.first_token_at is not None or attempt.job.resume_point is not None)


def _capped(job: InferenceJob, cap: int) -> InferenceJob:
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
