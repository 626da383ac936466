"""A job that its worker has passed on to another process."""

from dispatch.loop_harness import a_house_of
from inferry.domain.callers import Caller
from inferry.domain.jobs import ResumePoint
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, Done, FinishReason, Placed, Restarted, Usage
from inferry.domain.tenants import Limits, Tenant
from support.loop_helpers import read, run
from support.scripted_worker import ScriptedWorker


class PassingOnWorker(ScriptedWorker):
    """Passes its job on to a process where it shares an execution that is resumed after two tokens."""

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        (job,) = plan.jobs
        emit(Placed(job.job_id, "remote", 0.0, 1, shared_with="leader"))
        emit(Delta(job.job_id, job.run_id, job.step_id, 0, "one two", (1, 2), 2))
        emit(Restarted(job.job_id, 2, ResumePoint((7, 8, 9), (1, 2))))
        emit(Delta(job.job_id, job.run_id, job.step_id, 0, " three", (3,), 1))
        emit(Done(job.job_id, FinishReason.STOP, Usage(5, 0, 1, 0.5)))


def test_a_shared_execution_that_is_resumed_elsewhere_is_free_and_its_usage_whole() -> None:
    async def scenario() -> None:
        async with a_house_of(PassingOnWorker()) as house:
            job = house.job()
            caller = Caller(Tenant(name=job.tenant, limits=Limits(day_token_ceiling=10_000)))
            deltas, end = await read(house.gateway.submit(job, caller))
            assert "".join(delta.text for delta in deltas) == "one two three"
            assert house.gateway._admission.gate.report(job.tenant)[0].spent_tokens == 0
            assert isinstance(end, Done)
            assert (end.usage.prompt_tokens, end.usage.output_tokens) == (3, 3)
            (row,) = house.entries()
            assert (row.prompt_tokens, row.output_tokens, row.gpu_seconds, row.shared_with) == (0, 0, 0.0, "leader")

    run(scenario())
