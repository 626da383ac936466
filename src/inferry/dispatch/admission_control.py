"""Admission of jobs: each admitted job has a run and a permit, and returns both when it ends.

`runs.registry` and `admission.quota_gate` decide what is admitted; this holds the session of every admitted job.
"""

from collections.abc import Callable
from typing import Final

from inferry.admission.permits import Permit
from inferry.admission.quota_gate import QuotaGate
from inferry.domain.attempts import Attempt
from inferry.domain.callers import Caller
from inferry.domain.clock import Clock
from inferry.domain.errors import (
    CallAborted,
    ClientClosed,
    DeadlineExceeded,
    Draining,
    GatewayError,
    IngressLost,
    InvalidApiKey,
    RunCancelled,
)
from inferry.domain.jobs import Estimate, Footprint, InferenceJob
from inferry.domain.streams import Done, Usage
from inferry.domain.values import replace
from inferry.runs.registry import Run, RunRegistry

_EMPTY_FOOTPRINT: Final = Footprint(Estimate.exactly(0), Estimate.exactly(0), Estimate.exactly(0))


class AdmissionSession:
    __slots__ = ("permit", "run")

    def __init__(self, permit: Permit, run: Run) -> None:
        self.permit = permit
        self.run = run


class AdmissionControl:
    """The sessions of admitted jobs. Implements the loop's `Budget`."""

    def __init__(self, gate: QuotaGate, runs: RunRegistry, clock: Clock) -> None:
        self.gate = gate
        self.runs = runs
        self.clock = clock
        self.on_renewed: Callable[[], None] | None = None
        self._sessions: dict[str, AdmissionSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def admit(self, job: InferenceJob, caller: Caller) -> tuple[InferenceJob, int, int]:
        """Admit the job. Returns the job as it may run, the tokens it may write for now, and the batch of watermarks
        that must be in the database before it runs (0: none).

        Raises the GatewayError that refuses it; then only its run's count of refusals has changed.
        """
        if job.job_id in self._sessions:
            raise ValueError(f"job {job.job_id} has a session already")
        now = self.clock.now()
        run = self.runs.admit(job, now)
        try:
            permit = self.gate.admit(job, caller, run.lineage, now, self.clock.wall())
        except BaseException:
            self.runs.reject(run, job.job_id, now)
            raise
        self._sessions[job.job_id] = AdmissionSession(permit, run)
        if run.parent is not None and run.parent.run_id != job.parent_run:
            # The ledger gets the parent that counts, since links are restored from it.
            job = replace(job, parent_run=run.parent.run_id)
        if permit.output_cap < job.token_budget:
            job = _capped(job, permit.output_cap)
        limits = caller.tenant.limits
        if limits.max_kv_tokens is not None and not caller.tenant.shadow:
            job = replace(job, max_kv_tokens=limits.max_kv_tokens)
        if limits.run_max_kv_tokens is not None and not caller.tenant.shadow:
            job = replace(job, run_kv_quota=(permit.run_id, limits.run_max_kv_tokens))
        return job, permit.granted_tokens, permit.watermark_batch

    def admit_follower(self, job: InferenceJob, caller: Caller) -> "FollowerSession":
        """Admit a job that shares another's execution: it counts as a request, and for no tokens.

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
        """The job was refused after its admission."""
        session = self._sessions.pop(job_id)
        now = self.clock.now()
        self.gate.settle(session.permit, None, now, self.clock.wall())
        self.runs.reject(session.run, job_id, now)

    def uncovered(self, job_ids: list[str]) -> set[str]:
        """Of jobs that waited for watermarks or grants, those that did not get all of them."""
        waiting = [job_id for job_id in job_ids if job_id in self._sessions]
        watermarks = self.gate.watermarks
        if watermarks is None:
            return set()
        found = watermarks.uncovered([self._sessions[job_id].permit for job_id in waiting])
        return {waiting[number] for number in found}

    def uncovered_error(self, job_id: str) -> GatewayError | None:
        """Why a job that is not covered is refused; None where it waits on."""
        watermarks = self.gate.watermarks
        return None if watermarks is None else watermarks.uncovered_error(self._sessions[job_id].permit)

    # -- while it runs -----------------------------------------------------------------------------------------------

    def renew_grant(self, job_id: str, written: int) -> int:
        granted_tokens = self.gate.renew(self._sessions[job_id].permit, written)
        if self.on_renewed is not None:
            self.on_renewed()
        return granted_tokens

    def charges_gpu_time(self) -> bool:
        return self.gate.charges_gpu_time

    def lease_gpu_time(self, job_id: str, gpu_seconds: float) -> bool:
        is_within = self.gate.lease_gpu_time(self._sessions[job_id].permit, gpu_seconds)
        if self.on_renewed is not None:
            self.on_renewed()
        return is_within

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
        cost = self.gate.settle(session.permit, usage if _is_billable(attempt) else None, now, self.clock.wall())
        self.runs.job_ended(session.run, attempt, usage, cost, now)
        return cost


class FollowerSession:
    """The session of a job that has no execution of its own."""

    __slots__ = ("_admission_control", "_job_id", "_session")

    def __init__(self, admission_control: AdmissionControl, session: AdmissionSession, job_id: str) -> None:
        self._admission_control = admission_control
        self._session = session
        self._job_id = job_id

    def ended(self, attempt: Attempt) -> None:
        """The job has ended as this attempt, which used nothing."""
        admission_control, session = self._admission_control, self._session
        now = admission_control.clock.now()
        cost = admission_control.gate.settle(session.permit, Usage(), now, admission_control.clock.wall())
        admission_control.runs.job_ended(session.run, attempt, Usage(), cost, now)

    def withdraw(self) -> None:
        """The job gets an execution of its own, and is admitted again."""
        admission_control, session = self._admission_control, self._session
        now = admission_control.clock.now()
        admission_control.gate.settle(session.permit, None, now, admission_control.clock.wall())
        admission_control.runs.reject(session.run, self._job_id, now)


def _is_billable(attempt: Attempt) -> bool:
    """Whether the tenant pays: for answers, for started calls that ended for the client's own reason (it left, its run
    was cancelled, its key was revoked, its deadline passed), and for the part of a stream that was delivered before the
    gateway stopped or another prompt of the call failed. Calls lost by a worker or an ingress process are free."""
    end = attempt.end
    if isinstance(end, Done):
        return True
    if end is None or isinstance(end.error, IngressLost):
        return False
    if isinstance(end.error, Draining | CallAborted):
        return attempt.has_delivered_output
    is_client_caused = isinstance(end.error, ClientClosed | DeadlineExceeded | RunCancelled | InvalidApiKey)
    return is_client_caused and (attempt.first_token_at is not None or attempt.job.resume_point is not None)


def _capped(job: InferenceJob, cap: int) -> InferenceJob:
    """The job with its output capped to what is left of its budget."""
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
