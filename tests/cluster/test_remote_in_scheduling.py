"""What a worker that passes jobs on changes in the process before it: nothing is held, grouped or timed there."""

import asyncio

import pytest

from inferry.dispatch.deadlines import Deadlines
from inferry.domain.attempts import Attempt
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.routes import Task
from inferry.domain.streams import Delta
from inferry.domain.values import replace
from inferry.scheduling.scheduler import Scheduler
from inferry.streams.fan_out import FanOut, HistoryBudget, Reader
from inferry.streams.mailbox import JobStream, MergeCounter
from scheduling.scheduler_harness import a_scheduler, offer, placements, sent
from support.builders import a_job, a_policy, a_view

REMOTE = replace(a_view("owner"), is_remote=True)


def test_a_remote_worker_takes_jobs_of_every_lane() -> None:
    policy = a_policy(groups=("interactive",))
    scheduler = Scheduler(dict.fromkeys(Lane, policy))
    scheduler.observe(REMOTE, 0.0)
    offer(scheduler, a_job("1", lane=Lane.P0), a_job("2", lane=Lane.P2))
    assert placements(scheduler.tick(0.0)) == {"1": "owner", "2": "owner"}


def test_no_job_is_held_before_a_remote_worker() -> None:
    scheduler = a_scheduler(REMOTE, P1=a_policy(window="adaptive", coalesce_ms=10))

    def an_embedding(name: str) -> InferenceJob:
        job = a_job(name, output=0)
        route = replace(job.route, pooled=True)
        return replace(job, route=route, batch_key=replace(job.batch_key, route=route, task=Task.EMBED))

    offer(scheduler, an_embedding("1"))
    assert sent(scheduler.tick(0.0)) == ["1"]
    offer(scheduler, an_embedding("2"))
    assert sent(scheduler.tick(0.0)) == ["2"]


def test_the_owner_watches_the_deadline_of_a_job_that_it_has() -> None:
    async def scenario() -> None:
        deadlines = Deadlines(60.0, lambda: 0.0, lambda worker: worker == "owner")
        for worker, watched in (("owner", 0), ("own", 1)):
            job = a_job(deadline=10.0)
            attempt = Attempt(job)
            deadlines.queued(attempt, 0.0)
            assert len(deadlines) == 1
            plan = BatchPlan(plan_id=1, worker=worker, jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=0.0)
            attempt.sent(plan, 0.0)
            deadlines.sent(attempt, 0.0)
            assert len(deadlines) == watched
        deadlines.close()

    asyncio.run(scenario())


@pytest.mark.plain
def test_a_reader_that_is_not_remote_gets_no_token_ids_of_a_shared_execution() -> None:
    leader = a_job("leader")
    leader = replace(leader, payload=replace(leader.payload, keeps_ids=True))
    asking = a_job("asking")
    asking = replace(asking, payload=replace(asking.payload, body=b'{"return_token_ids":true}'))
    stream = JobStream(Attempt(leader), MergeCounter())

    class OnlyDeltas(FanOut):
        def _on_end(self, end: object) -> None:
            raise NotImplementedError

        def _on_reader_detached(self, reader: Reader) -> None:
            raise NotImplementedError

    shared = OnlyDeltas(stream, HistoryBudget(10_000, 10_000))
    readers = [Reader(job, stream.attempt, MergeCounter()) for job in (leader, a_job("local"), asking)]
    shared.join(readers[0])
    shared.join(readers[1])
    raw = b'data: {"choices":[{"token_ids":[1, 2]}],"prompt_token_ids":[3]}\n\n'
    plain = b'data: {"choices":[{"token_ids":null}],"prompt_token_ids":null}\n\n'
    stream.push(Delta("leader", leader.run_id, leader.step_id, 0, tokens=1, raw=raw))
    shared.join(readers[2])  # and one that joins later
    late = Reader(a_job("late"), stream.attempt, MergeCounter())
    shared.join(late)
    found = [reader.take_nowait()[0] for reader in (*readers, late)]
    assert [None if delta is None else delta.raw for delta in found] == [raw, plain, raw, plain]
    kept = shared.merged_history()
    assert kept is not None
    assert kept.raw == plain
