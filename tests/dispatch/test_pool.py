"""The pool in virtual time: workers that fail, recover, are drained, added and removed."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from inferry.dispatch.pool import Pool
from inferry.dispatch.supervisor import unknown_worker
from inferry.dispatch.values import HealthPolicy
from inferry.domain.attempts import Attempt
from inferry.domain.errors import ClientClosed, Draining, GatewayError, NotFound, WorkerLost, WorkerTimeout
from inferry.domain.lanes import ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit
from inferry.domain.streams import Done, End, Failed, FinishReason, Usage
from inferry.domain.workers import Capacity, Phase
from inferry.scheduling.scheduler import Scheduler
from support.builders import a_job, a_policy
from support.scripted_worker import ScriptedWorker
from support.virtual_time import LoopClock, run_virtual
from support.waiting import async_until

POLICY = HealthPolicy(initial_backoff_s=1.0, max_backoff_s=16.0, jitter=0.0)
LOST = WorkerLost("gone")


class Moody(ScriptedWorker):
    """Generates only while `is_well`, and notes when it was asked to. Its own word is always that it is ready."""

    def __init__(self, name: str = "w", **script: Any) -> None:
        super().__init__(name, clock=LoopClock(), **script)
        self.is_well = True
        self.probed_at: list[float] = []
        self.closed_at: float | None = None

    async def run(self, plan: BatchPlan, emit: Emit) -> None:
        if plan.jobs[0].step_id == "probe":
            self.probed_at.append(now())
            if not self.is_well:
                raise WorkerLost("not well")
        await super().run(plan, emit)

    async def close(self) -> None:
        self.closed_at = now()
        await super().close()


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def a_pool(*workers: ScriptedWorker) -> AsyncIterator[Pool]:
    pool = Pool(workers, LoopClock(), health=POLICY, kinds={worker.name: "scripted" for worker in workers})
    pool.start()
    if workers:
        await async_until(lambda: all(view.phase is Phase.READY for view in pool.views()))
    yield pool
    await pool.close()


def lose(pool: Pool, worker: str, job_id: str, error: GatewayError) -> None:
    _end(pool, worker, Failed(job_id, error))


def _end(pool: Pool, worker: str, end: End) -> None:
    job = a_job(end.job_id)
    attempt = Attempt(job)
    attempt.sent(
        BatchPlan(plan_id=1, worker=worker, jobs=(job,), reason=ReleaseReason.IMMEDIATE, formed_at=now()), now()
    )
    attempt.ended(end, now())
    pool.ended(attempt, now())


def test_lost_jobs_open_the_breaker_before_the_call_returns() -> None:
    async def scenario() -> None:
        told: list[Phase] = []
        async with a_pool(Moody()) as pool:
            pool.on_view = lambda name: told.append(pool.view(name).phase)
            lose(pool, "w", "a", LOST)
            lose(pool, "w", "b", WorkerTimeout("silent"))
            assert pool.view("w").phase is Phase.READY
            assert not pool.view("w").breaker_open
            lose(pool, "w", "c", LOST)
            assert pool.view("w").phase is Phase.DOWN
            assert pool.view("w").breaker_open
            assert told == [Phase.DOWN]
            assert not pool.serves("m")
            (health,) = pool.health()
            assert (health.breaker, health.opens) == ("open", 1)

    run_virtual(scenario())


def test_errors_of_jobs_never_open_the_breaker() -> None:
    async def scenario() -> None:
        async with a_pool(Moody()) as pool:
            for number in range(20):
                lose(pool, "w", f"job-{number}", ClientClosed("left"))
                lose(pool, "w", "one-and-the-same", LOST)
                lose(pool, "nobody", f"job-{number}", LOST)
                _end(pool, "nobody", Done("a", FinishReason.STOP, Usage()))
                pool.refresh_worker("nobody")
            assert pool.view("w").phase is Phase.READY

    run_virtual(scenario())


def test_a_worker_that_passes_its_probe_regains_capacity_step_by_step() -> None:
    async def scenario() -> None:
        worker = Moody(capacity=Capacity(sequences=100))
        async with a_pool(worker) as pool:
            capacities: list[tuple[float, int | None]] = []
            fell_at = now()
            for job in "abc":
                lose(pool, "w", job, LOST)
            pool.on_view = lambda name: capacities.append(
                (round(now() - fell_at, 1), pool.view(name).capacity.sequences)
            )
            await async_until(lambda: pool.view("w").phase is Phase.READY)
            assert worker.probed_at[-1] - fell_at == pytest.approx(1.0, abs=0.02)
            assert len(worker.probed_at) == 2
            await async_until(lambda: pool.view("w").capacity.sequences == 100)
            assert [sequences for _, sequences in capacities] == [10, 20, 40, 80, 100]
            assert 4.9 <= capacities[-1][0] <= 5.5

    run_virtual(scenario())


def test_a_failing_worker_is_probed_with_growing_backoff() -> None:
    async def scenario() -> None:
        worker = Moody()
        async with a_pool(worker) as pool:
            worker.is_well = False
            for job in "abc":
                lose(pool, "w", job, LOST)
            await asyncio.sleep(50.0)
            times = worker.probed_at[1:]
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            assert gaps == pytest.approx([2.0, 4.0, 8.0, 16.0, 16.0], abs=0.05)
            assert pool.view("w").phase is Phase.DOWN
            worker.is_well = True
            await async_until(lambda: pool.view("w").phase is Phase.READY)

    run_virtual(scenario())


def test_a_worker_is_probed_as_soon_as_it_reports_up() -> None:
    async def scenario() -> None:
        worker = Moody()
        async with a_pool(worker) as pool:
            worker.is_well, worker.phase = False, Phase.DOWN
            await async_until(lambda: pool.view("w").phase is Phase.DOWN)
            await asyncio.sleep(20.0)  # by now it is asked every sixteen seconds
            worker.is_well, worker.phase = True, Phase.READY
            came_at = now()
            await async_until(lambda: pool.view("w").phase is Phase.READY)
            assert now() - came_at < 0.5
            assert pool.health()[0].opens == 1

    run_virtual(scenario())


def test_a_starting_worker_is_not_probed() -> None:
    async def scenario() -> None:
        worker = Moody()
        async with a_pool(worker) as pool:
            worker.phase = Phase.STARTING
            await async_until(lambda: not pool.is_ready)
            await asyncio.sleep(60.0)
            assert len(worker.probed_at) == 1
            worker.phase = Phase.READY
            await asyncio.sleep(0.5)
            assert pool.is_ready
            assert len(worker.probed_at) == 2

    run_virtual(scenario())


def test_a_worker_that_cannot_start_is_tried_again() -> None:
    async def scenario() -> None:
        worker = Moody()
        begin, tries = worker.start, list[float]()

        async def start() -> None:
            tries.append(now())
            if len(tries) < 3:
                raise WorkerLost("nobody listens")
            await begin()

        worker.start = start  # type: ignore[method-assign]
        async with a_pool(worker) as pool:
            assert pool.is_ready
            assert [later - tries[0] for later in tries] == pytest.approx([0.0, 1.0, 3.0])
            assert pool.health()[0].share == 1.0  # it has lost nothing yet

    run_virtual(scenario())


def test_a_drained_worker_gets_nothing_new_until_it_is_readmitted() -> None:
    async def scenario() -> None:
        async with a_pool(Moody("a"), Moody("b")) as pool:
            pool.drain("a")
            pool.drain("a")
            assert [view.phase for view in pool.views()] == [Phase.DRAINING, Phase.READY]
            assert pool.serves("m")
            assert not pool.is_drained("m", None), "one of two is drained"
            pool.drain("b")
            assert not pool.serves("m")
            assert pool.is_drained("m", None)
            assert not pool.is_drained("m", "acme"), "workers of other pools are not told of"
            assert not pool.is_drained("unknown", None)
            assert not pool.is_ready
            await asyncio.sleep(10.0)
            assert [report.phase for report in pool.report()] == ["draining", "draining"]
            pool.readmit("a")
            assert pool.view("a").phase is Phase.READY
            assert pool.report()[0].capacity == Capacity(sequences=8)

    run_virtual(scenario())


def test_a_drained_worker_stays_drained_after_a_failure_and_recovery() -> None:
    async def scenario() -> None:
        async with a_pool(Moody()) as pool:
            pool.drain("w")
            for job in "abc":
                lose(pool, "w", job, LOST)
            assert pool.view("w").phase is Phase.DOWN
            await asyncio.sleep(30.0)
            assert pool.view("w").phase is Phase.DRAINING

    run_virtual(scenario())


def test_an_unknown_worker_is_named_with_those_that_there_are() -> None:
    many = [f"w{number}" for number in range(30)]
    assert unknown_worker("a\nb", ["c", "d"]) == "there is no worker `a?b`; workers of this gateway: `c`, `d`"
    assert unknown_worker("a", []) == "there is no worker `a`; workers of this gateway: none"
    assert unknown_worker("a", many).endswith("`w18`, `w19`, …")


def test_draining_or_removing_an_unknown_worker_is_an_error() -> None:
    async def scenario() -> None:
        async with a_pool(Moody()) as pool:
            for act in (pool.drain, pool.readmit):
                with pytest.raises(NotFound):
                    act("nobody")
            with pytest.raises(NotFound):
                await pool.remove("nobody")
            with pytest.raises(ValueError, match="already"):
                pool.add(Moody())

    run_virtual(scenario())


def test_a_worker_added_at_runtime_serves_after_it_has_generated() -> None:
    async def scenario() -> None:
        async with a_pool(Moody("a")) as pool:
            new = Moody("b", models=("other",))
            pool.add(new, "scripted")
            assert not pool.serves("other")
            assert pool.worker_count("other") == 1
            await async_until(lambda: pool.serves("other"))
            assert set(pool.cards()) == {"m", "other"}
            assert len(new.probed_at) == 1

    run_virtual(scenario())


async def removed(jobs_end_at: float, grace_s: float) -> tuple[float, Moody]:
    """How long the removal of a worker took whose jobs end at that time."""
    worker = Moody()
    async with a_pool(worker, Moody("other")) as pool:
        gone: list[str] = []
        pool.on_removed = gone.append
        start = now()
        pool.in_flight = lambda name: int(name == "w" and now() < start + jobs_end_at)
        over = Done("a", FinishReason.STOP, Usage())
        asyncio.get_running_loop().call_at(start + jobs_end_at, _end, pool, "w", over)
        removing = asyncio.create_task(pool.remove("w", grace_s))
        await asyncio.sleep(0.001)
        assert pool.view("w").phase is Phase.DRAINING
        with pytest.raises(Draining):
            pool.readmit("w")
        with pytest.raises(Draining):
            await pool.remove("w")
        await removing
        assert gone == ["w"] == [name for name in ("w",) if name not in pool.names()]
        assert worker.closed_at is not None
        return worker.closed_at - start, worker


def test_a_removed_worker_is_closed_when_its_jobs_have_ended() -> None:
    took, _ = run_virtual(removed(jobs_end_at=12.0, grace_s=30.0))
    assert took == pytest.approx(12.0, abs=0.1)


def test_a_removed_worker_is_closed_when_the_grace_is_over() -> None:
    took, _ = run_virtual(removed(jobs_end_at=1e9, grace_s=30.0))
    assert took == pytest.approx(30.0, abs=0.1)


def test_the_scheduler_keeps_no_state_of_removed_workers() -> None:
    async def scenario() -> None:
        scheduler = Scheduler({lane: a_policy() for lane in (a_job().lane,)})
        async with a_pool() as pool:
            pool.on_view = lambda name: scheduler.observe(pool.view(name), now())
            pool.on_removed = scheduler.forget
            pool.in_flight = lambda name: scheduler.use(name).sequences
            job = a_job(at=now())
            scheduler.offer(job, now())
            for number in range(50):
                pool.add(Moody(f"w-{number}"))
                await async_until(lambda: pool.is_ready)
                pool.drain(f"w-{number}")
                assert scheduler.tick(now()).plans == ()
                await pool.remove(f"w-{number}")
            assert scheduler._workers == {}
            assert (pool.names(), pool.worker_count("m"), pool.cards()) == ([], 0, {})
            pool.add(Moody("last"))
            await async_until(lambda: pool.is_ready)
            (plan,) = scheduler.tick(now()).plans
            assert (plan.worker, plan.jobs) == ("last", (job,))

    run_virtual(scenario())


def test_the_pool_follows_its_breakers_under_any_sequence_of_failures() -> None:
    """Ten workers fall and recover by a seed for ten minutes: none of them is ever ready without a generation since."""

    async def scenario() -> None:
        rng = random.Random(7)
        workers = [Moody(f"w{n}") for n in range(10)]
        trusted_since: dict[str, float] = {}
        async with a_pool(*workers) as pool:

            def told(name: str) -> None:
                if pool.view(name).phase is not Phase.READY:
                    trusted_since.pop(name, None)
                else:
                    trusted_since.setdefault(name, now())

            pool.on_view = told
            fallen = 0
            while now() < 1600.0:
                worker = rng.choice(workers)
                worker.is_well = not worker.is_well
                if not worker.is_well:
                    fallen += pool.view(worker.name).phase is Phase.READY
                    for job in range(3):
                        lose(pool, worker.name, f"{now()}-{job}", LOST)
                    assert pool.view(worker.name).phase is Phase.DOWN
                await asyncio.sleep(rng.expovariate(0.2))
                for one in workers:
                    if pool.view(one.name).phase is Phase.READY:
                        assert one.is_well
                        assert one.probed_at[-1] <= trusted_since.get(one.name, now()) + 1e-9
            assert fallen > 20
            assert sum(health.opens for health in pool.health()) == fallen

    run_virtual(scenario())
