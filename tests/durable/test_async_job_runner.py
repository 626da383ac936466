"""Async jobs in virtual time: every job ends once, whatever is refused, lost, cancelled or stopped."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from durable.async_work import OK, ScriptedExecute, a_job, a_runner, stores, until
from inferry.domain.async_jobs import AsyncJob, AsyncJobDetail
from inferry.domain.errors import LedgerUnavailable
from inferry.durable.execute import CallAnswer, StoredCall
from inferry.ledger.stores.attempts import AttemptStore
from ledger.builders import an_entry
from support.virtual_time import CreepingLoop, run_virtual

ERROR = CallAnswer(status=404, body=b'{"error":{}}')


def run_jobs(execute: ScriptedExecute, *jobs: AsyncJob, concurrency: int = 64) -> list[AsyncJob]:
    """The jobs after their end."""

    async def run() -> list[AsyncJob]:
        async with stores() as found:
            runner = a_runner(found, execute, concurrency=concurrency)
            runner.start()
            for job in jobs:
                found.jobs.create(job, b"{}", None, None)
                runner.add(job)
            await until(lambda: not found.jobs.unfinished())
            await runner.close()
            ended = [found.jobs.get(job.tenant, job.id, 0.0) for job in jobs]
            assert all(job is not None for job in ended)
            assert runner.ended == Counter(job.status for job in ended if job is not None)
            return [job for job in ended if job is not None]

    return run_virtual(run())


def test_a_job_is_called_with_what_was_stored_and_keeps_its_answer() -> None:
    execute = ScriptedExecute()
    detail = AsyncJobDetail(run_id="r", step_id="s", headers={"x-inferry-template-id": "x"})
    (job,) = run_jobs(execute, a_job(lane="P1", key_id="k", detail=detail))
    assert (job.status, job.answer_status, job.request_id, job.size) == ("completed", 200, "req", 2 + len(OK.body))
    assert job.ended_at is not None
    assert job.expires_at == job.ended_at + 500.0
    (call,) = execute.calls
    assert call == StoredCall(
        tenant="t",
        key_id="k",
        path="/v1/chat/completions",
        body=b"{}",
        job_id="job_1-0",
        run_id="r",
        step_id="s",
        lane="P1",
        headers={b"x-inferry-template-id": b"x"},
    )


def test_an_error_of_the_request_fails_the_job_with_that_answer() -> None:
    (job,) = run_jobs(ScriptedExecute(lambda _: ERROR), a_job())
    assert (job.status, job.answer_status) == ("failed", 404)


def test_a_call_that_broke_off_is_retried_and_then_fails_with_an_error_as_its_answer() -> None:
    def break_off(call: StoredCall) -> CallAnswer:
        raise ConnectionAbortedError

    async def run() -> bytes | None:
        async with stores() as found:
            runner = a_runner(found, execute)
            runner.start()
            found.jobs.create(a_job(), b"{}", None, None)
            runner.add(a_job())
            await until(lambda: not found.jobs.unfinished())
            await runner.close()
            return found.jobs.answer("job_1")

    execute = ScriptedExecute(break_off)
    answer = run_virtual(run())
    assert answer is not None
    assert b"internal_error" in answer
    assert execute.job_ids == [f"job_1-{n}" for n in range(5)], "each try is a job of its own"


def test_a_cancelled_run_cancels_its_job() -> None:
    (job,) = run_jobs(ScriptedExecute(lambda _: CallAnswer(status=409, body=b"{}", code="run_cancelled")), a_job())
    assert (job.status, job.answer_status) == ("cancelled", None)


def test_refused_jobs_wait_and_run_under_new_job_ids() -> None:
    refusals = {"job_1-0", "job_1-1"}

    def refuse(call: StoredCall) -> CallAnswer:
        return CallAnswer(status=429, body=b"", retry_after_s=30.0) if call.job_id in refusals else OK

    execute = ScriptedExecute(refuse)
    (job,) = run_jobs(execute, a_job())
    assert (job.status, job.tries) == ("completed", 2)
    assert execute.job_ids == ["job_1-0", "job_1-1", "job_1-2"]
    assert (job.ended_at or 0.0) - job.created_at >= 60.0


def test_a_timer_that_fires_early_does_not_leave_a_refused_job_waiting() -> None:
    answers = [CallAnswer(status=429, body=b"", retry_after_s=1.0)] * 100
    execute = ScriptedExecute(lambda _: answers.pop() if answers else OK)

    async def run() -> None:
        async with stores() as found:
            runner = a_runner(found, execute)
            runner.start()
            found.jobs.create(a_job(), b"{}", None, None)
            runner.add(a_job())
            await until(lambda: not found.jobs.unfinished())
            await runner.close()

    with asyncio.Runner(loop_factory=CreepingLoop) as runner:
        runner.run(run())
    assert len(execute.calls) == 101


def test_few_calls_are_refused_where_a_tenant_may_have_few_in_flight() -> None:
    limit = 3

    def admit(call: StoredCall) -> CallAnswer:
        return CallAnswer(status=429, body=b"", retry_after_s=1.0) if execute.in_flight > limit else OK

    execute = ScriptedExecute(admit)
    ended = run_jobs(execute, *(a_job(f"job_{n}") for n in range(200)))
    assert {job.status for job in ended} == {"completed"}
    assert len(execute.calls) < 2 * 200


def test_the_number_of_jobs_in_flight_is_bounded() -> None:
    execute = ScriptedExecute()
    run_jobs(execute, *(a_job(f"job_{n}") for n in range(50)), concurrency=4)
    assert execute.most_in_flight == 4


def test_a_job_that_has_not_ended_at_its_deadline_expires_and_its_call_is_cancelled() -> None:
    async def run() -> None:
        never: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
        execute = ScriptedExecute(lambda _: never)
        async with stores() as found:
            runner = a_runner(found, execute, concurrency=1)
            runner.start()
            detail = AsyncJobDetail(run_id="r", step_id="s", has_deadline=True)
            jobs = [a_job(f"job_{n}", deadline=1060.0, detail=detail) for n in range(2)]
            for job in jobs:
                found.jobs.create(job, b"{}", None, None)
                runner.add(job)
            await asyncio.sleep(59.0)
            assert len(found.jobs.unfinished()) == 2
            await asyncio.sleep(2.0)
            for job in jobs:
                ended = found.jobs.get("t", job.id, 0.0)
                assert ended is not None
                assert ended.status == "expired"
                assert ended.ended_at == pytest.approx(1060.0, abs=0.1)
            assert execute.cancelled == ["job_0-0"], "the other one never began"
            (call,) = execute.calls
            assert 59_000 < int(call.headers[b"x-inferry-deadline-ms"]) <= 60_000
            await runner.close()

    run_virtual(run())


def test_a_stopped_job_frees_its_place_and_is_not_answered() -> None:
    async def run() -> None:
        never: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
        execute = ScriptedExecute(lambda call: never if call.job_id == "job_0-0" else OK)
        async with stores() as found:
            runner = a_runner(found, execute, concurrency=1)
            runner.start()
            for n in range(3):
                found.jobs.create(a_job(f"job_{n}"), b"{}", None, None)
                runner.add(a_job(f"job_{n}"))
            await asyncio.sleep(5.0)
            for id in ("job_0", "job_1"):  # one in flight, one waiting
                assert found.jobs.end(runner.end_of(id, "cancelled"))
                runner.stop(id)
            await until(lambda: not found.jobs.unfinished())
            assert execute.cancelled == ["job_0-0"]
            assert execute.job_ids == ["job_0-0", "job_2-0"]
            await runner.close()

    run_virtual(run())


def test_what_a_stopped_gateway_left_runs_again_under_the_same_job_id_and_ends_once() -> None:
    async def run() -> None:
        never: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
        async with stores() as found:
            first = a_runner(found, ScriptedExecute(lambda _: never))
            first.start()
            for n in range(10):
                found.jobs.create(a_job(f"job_{n}", tries=n), b"{}", None, None)
                first.add(a_job(f"job_{n}"))
            await asyncio.sleep(1.0)
            await first.close()
            assert len(found.jobs.unfinished()) == 10
            execute = ScriptedExecute()
            second = a_runner(found, execute)
            second.start()
            await until(lambda: not found.jobs.unfinished())
            assert sorted(execute.job_ids) == [f"job_{n}-{n}" for n in range(10)]
            await second.close()

    run_virtual(run())


def test_a_try_that_a_killed_process_charged_keeps_its_job_id_whatever_refuses_it_later(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    ledger = AttemptStore(url)
    ledger.append([an_entry(job_id="job_1-3")])
    ledger.close()
    answers = [CallAnswer(status=429, body=b"", retry_after_s=1.0), CallAnswer(status=502, body=b""), OK]
    execute = ScriptedExecute(lambda _: answers.pop(0))

    async def run() -> None:
        async with stores(url) as found:
            found.jobs.create(a_job(tries=3), b"{}", None, None)
            runner = a_runner(found, execute)
            runner.start()
            await until(lambda: not found.jobs.unfinished())
            await runner.close()

    run_virtual(run())
    assert execute.job_ids == ["job_1-3"] * 3


def test_a_failure_of_the_database_delays_a_job_and_does_not_lose_it() -> None:
    async def run() -> None:
        execute = ScriptedExecute()
        async with stores() as found:
            failures = iter([LedgerUnavailable("down"), LedgerUnavailable("down")])

            def fail_twice() -> None:
                for error in failures:
                    raise error

            ended: list[int] = []
            runner = a_runner(found, execute, write_ledger=fail_twice, on_end=lambda: ended.append(1))
            runner.start()
            found.jobs.create(a_job(), b"{}", None, None)
            runner.add(a_job())
            await until(lambda: not found.jobs.unfinished())
            await until(lambda: bool(ended))
            assert execute.job_ids == ["job_1-0"]
            await runner.close()

    run_virtual(run())
