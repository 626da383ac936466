"""Admitted jobs: output limits exactly at their budgets, and which job is charged."""

import pytest

from admission.builders import a_call, a_caller, used
from inferry.admission.quota_gate import QuotaGate
from inferry.dispatch.admission_control import AdmissionControl
from inferry.domain.attempts import Attempt
from inferry.domain.callers import Caller
from inferry.domain.errors import (
    CallAborted,
    ClientClosed,
    Draining,
    GatewayError,
    IngressLost,
    RateLimited,
    RunBudgetExhausted,
    RunCancelled,
    WorkerLost,
)
from inferry.domain.jobs import ResumePoint
from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.streams import Done, End, Failed, FinishReason
from inferry.domain.tenants import Limits
from inferry.domain.values import replace
from inferry.runs.registry import RunRegistry


class StillClock:
    def now(self) -> float:
        return 100.0

    def wall(self) -> float:
        return 1_773_576_000.0


def an_entrance() -> AdmissionControl:
    return AdmissionControl(QuotaGate({}), RunRegistry(), StillClock())


def spent(admission_control: AdmissionControl, tenant: str = "a") -> int:
    return admission_control.gate.report(tenant)[0].spent_tokens


def test_a_budget_one_token_too_small_caps_the_output() -> None:
    job = a_call(10, 20)
    enough, _, _ = an_entrance().admit(job, a_caller(day_token_ceiling=30))
    assert enough is job
    cut, _, _ = an_entrance().admit(job, a_caller(day_token_ceiling=29))
    assert (cut.token_budget, cut.payload.output_cap, cut.payload.output_limit) == (19, 19, 19)
    assert cut.payload.sampling.max_tokens == 19
    assert cut.footprint.output.high == 19


def test_choices_share_the_remaining_budget_and_may_use_all_of_it() -> None:
    job = a_call(10, 20, choices=3)
    cut, granted_tokens, _ = an_entrance().admit(job, a_caller(day_token_ceiling=10 + 31))
    assert (cut.token_budget, cut.payload.output_cap, cut.payload.output_limit) == (10, 10, 30)
    assert granted_tokens <= 30


def test_a_job_carries_the_kv_quotas_that_engines_enforce_too() -> None:
    job = replace(a_call(run="sub"), parent_run="root")
    admitted, _, _ = an_entrance().admit(job, a_caller(max_kv_tokens=500, run_max_kv_tokens=300))
    assert (admitted.max_kv_tokens, admitted.run_kv_quota) == (500, ("root", 300)), "a run counts with its sub-runs"
    shadowed, _, _ = an_entrance().admit(job, a_caller(max_kv_tokens=500, run_max_kv_tokens=300, shadow=True))
    assert (shadowed.max_kv_tokens, shadowed.run_kv_quota) == (None, None)


def test_a_job_of_a_cancelled_run_is_not_retried() -> None:
    admission_control = an_entrance()
    job, other = a_call(run="mine"), a_call(run="other")
    admission_control.admit(job, a_caller())
    admission_control.admit(other, a_caller())
    assert admission_control.retry_refusal(job) is None
    admission_control.runs.cancel("a", "mine", 100.0)
    assert isinstance(admission_control.retry_refusal(job), RunCancelled)
    assert admission_control.retry_refusal(other) is None


@pytest.mark.parametrize("free", [False, True])
def test_a_refused_job_is_not_in_flight_in_its_run(free: bool) -> None:
    admission_control = an_entrance()
    caller = a_caller(requests_per_minute=0)
    with pytest.raises(RateLimited):
        (admission_control.admit_follower if free else admission_control.admit)(a_call(run="mine"), caller)
    run = admission_control.runs.admit(a_call(run="mine"), 100.0)
    assert len(run.in_flight) == 1, "the one that has just come in"


# -- who pays --------------------------------------------------------------------------------------------------------


def end_of(caller: Caller, error: GatewayError | None, *, resumed: bool, has_token: bool, stream: bool = False) -> int:
    """What is charged for a job of 10 prompt tokens that ends so, having used all of them and 5 of output."""
    admission_control = an_entrance()
    job, _, _ = admission_control.admit(replace(a_call(10, 20), stream=stream), caller)
    if resumed:
        job = replace(job, attempt=2, resume_point=ResumePoint(tuple(range(10)), (1, 2)))
    attempt = Attempt(job)
    plan = BatchPlan(plan_id=1, worker="w", jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)
    attempt.sent(plan, 100.0)
    if has_token:
        attempt.first_token(100.0)
    usage = used(10, 5)
    end: End = Done(job.job_id, FinishReason.STOP, usage) if error is None else Failed(job.job_id, error, usage)
    attempt.ended(end, 101.0)
    admission_control.ended(attempt, usage, 101.0)
    assert len(admission_control) == 0
    return spent(admission_control)


@pytest.mark.parametrize(
    ("error", "resumed", "has_token", "charged"),
    [
        (None, False, True, 15),
        (None, True, True, 15),
        (ClientClosed("left"), False, True, 15),
        (ClientClosed("left"), False, False, 0),  # nothing had come
        (ClientClosed("left"), True, False, 15),  # an earlier attempt had delivered
        (IngressLost("left"), False, True, 0),  # the call is offered again, and its last attempt pays
        (IngressLost("left"), True, True, 0),
        (RunCancelled("x"), True, False, 15),
        (WorkerLost("gone"), True, True, 0),
        (WorkerLost("gone"), False, True, 0),
    ],
)
@pytest.mark.parametrize("caller", [a_caller(day_token_ceiling=1000)])
def test_a_disconnected_client_is_charged_for_what_it_received(
    caller: Caller, error: GatewayError | None, resumed: bool, has_token: bool, charged: int
) -> None:
    assert end_of(caller, error, resumed=resumed, has_token=has_token) == charged


@pytest.mark.parametrize(
    ("stream", "resumed", "has_token", "charged"),
    [(True, False, True, 15), (True, True, False, 15), (True, False, False, 0), (False, False, True, 0)],
)
@pytest.mark.parametrize("error", [Draining("stopped"), CallAborted("another prompt failed")])
def test_what_was_delivered_before_the_gateway_ended_the_job_is_charged(
    error: GatewayError, stream: bool, resumed: bool, has_token: bool, charged: int
) -> None:
    caller = a_caller(day_token_ceiling=1000)
    assert end_of(caller, error, resumed=resumed, has_token=has_token, stream=stream) == charged


def test_a_follower_takes_one_request_of_tenant_and_key_and_no_tokens() -> None:
    caller = a_caller(tokens_per_minute=100, key=Limits(requests_per_minute=2, tokens_per_minute=50))
    admission_control = an_entrance()
    ticket = admission_control.admit_follower(a_call(10, 20), caller)
    rate_limit_status = admission_control.gate.rate_limit_status(caller, 100.0)
    assert rate_limit_status is not None
    assert (rate_limit_status.requests_left, rate_limit_status.tokens_left) == (1, 50)
    ticket.withdraw()
    rate_limit_status = admission_control.gate.rate_limit_status(caller, 100.0)
    assert rate_limit_status is not None
    assert (rate_limit_status.requests_left, rate_limit_status.tokens_left) == (2, 50)


def test_a_job_is_recorded_with_the_first_parent_of_its_run() -> None:
    admission_control = an_entrance()
    found = [
        admission_control.admit(replace(a_call(10, 20, run="run"), parent_run=parent), a_caller())[0].parent_run
        for parent in ("first", "second", None)
    ]
    assert found == ["first"] * 3


def test_a_run_that_was_forgotten_is_limited_by_its_root() -> None:
    admission_control = an_entrance()
    caller = a_caller(run_token_ceiling=55)

    def call(run: str, parent: str | None = None) -> None:
        job, _, _ = admission_control.admit(replace(a_call(10, 20, run=run), parent_run=parent), caller)
        attempt, usage = Attempt(job), used(10, 20)
        attempt.ended(Done(job.job_id, FinishReason.STOP, usage), 101.0)
        admission_control.ended(attempt, usage, 101.0)

    call("run", "root")
    admission_control.runs.expire(10_000.0)
    assert not admission_control.runs.has_run("a", "run")
    call("root")
    with pytest.raises(RunBudgetExhausted):
        call("run")
