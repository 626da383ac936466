"""Pauses of runs, with any order of calls, ends, cancels, lost workers and time.

A call that does not pause is sent at once, since the workers have no limit but their KV cache.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.plans import Ended, JobLocation
from inferry.domain.values import replace
from inferry.scheduling.scheduler import Scheduler
from inferry.scheduling.sessions import SessionLimits
from support.builders import a_job, a_policy, a_view

KV = 1_000
PAUSE_S = 50.0
RUNS = "uvwxyz"
WORKERS = ("w1", "w2")
TIMES = st.sampled_from([0.0, 0.5, 2.0, 6.0, 16.0, 49.0])


class SessionsMachine(RuleBasedStateMachine):
    """`largest` is the largest working set that each run has had."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler({lane: a_policy() for lane in Lane}, sessions=SessionLimits(PAUSE_S))
        self.now = 1.0
        self.calls = 0
        self.queued: dict[str, InferenceJob] = {}
        self.running: dict[str, tuple[InferenceJob, str]] = {}
        self.largest: dict[str, int] = {}
        self.scheduler.observe(replace(a_view("w1"), kv_capacity=KV), self.now)

    def tick(self) -> None:
        tick = self.scheduler.tick(self.now)
        for plan in tick.plans:
            for job in plan.jobs:
                self.running[job.job_id] = (self.queued.pop(job.job_id), plan.worker)
        for job in tick.expired:
            del self.queued[job.job_id]
        again = self.scheduler.tick(self.now)
        assert not again.plans, "the second tick at one instant decides nothing"
        for job in self.queued.values():
            assert again.wake_at is not None
            assert again.wake_at <= self.bound(job), "it will be looked at when its pause ends"

    @staticmethod
    def bound(job: InferenceJob) -> float:
        longest_s = PAUSE_S if job.deadline is None else min(PAUSE_S, (job.deadline - job.arrived_at) / 2)
        return job.arrived_at + longest_s

    @rule(
        run=st.sampled_from(RUNS),
        tokens=st.sampled_from([20, 90, 390, 690, 1_500]),
        lane=st.sampled_from([Lane.P0, Lane.P1, Lane.P1, Lane.P2]),
        attempt=st.sampled_from([1, 1, 1, 1, 2]),
        parent=st.sampled_from([None, None, "u", "v"]),
        deadline_s=st.sampled_from([None, None, 4.0, 300.0]),
    )
    def call(
        self, run: str, tokens: int, lane: Lane, attempt: int, parent: str | None, deadline_s: float | None
    ) -> None:
        self.calls += 1
        # Runs of one letter belong to one tenant, as do their sub-runs.
        tenant = "a" if run in "uvw" else "b"
        deadline = None if deadline_s is None else self.now + deadline_s
        job = a_job(
            f"{run}{self.calls}", tokens=tokens, run_id=run, tenant=tenant, lane=lane, at=self.now, attempt=attempt
        )
        job = replace(job, parent_run=None if parent == run else parent, deadline=deadline)
        self.queued[job.job_id] = job
        self.largest[run] = max(self.largest.get(run, 0), job.footprint.peak_kv_tokens)
        self.scheduler.offer(job, self.now)
        self.tick()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cached=st.sampled_from([None, 0.0, 1.0]), more=st.sampled_from([0, 0, 200]))
    def end_call(self, data: st.DataObject, cached: float | None, more: int) -> None:
        job, _ = self.running.pop(data.draw(st.sampled_from(list(self.running))))
        prompt = job.footprint.prompt.expected + more
        self.largest[job.run_id] = max(self.largest[job.run_id], prompt + 10)
        self.scheduler.progress(
            job.job_id, Ended(prompt, None if cached is None else int(cached * prompt), 10), self.now
        )
        self.tick()

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(list(self.queued)))
        assert self.scheduler.cancel(job_id) is JobLocation.QUEUED
        del self.queued[job_id]
        self.tick()

    @rule(run=st.sampled_from(RUNS))
    def finish_run(self, run: str) -> None:
        self.scheduler.end_run("a" if run in "uvw" else "b", run)
        self.tick()

    @rule(seconds=TIMES)
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    @rule(worker=st.sampled_from(WORKERS))
    def worker_comes(self, worker: str) -> None:
        self.scheduler.observe(replace(a_view(worker), kv_capacity=KV), self.now)
        self.tick()

    @rule(worker=st.sampled_from(WORKERS))
    def worker_goes(self, worker: str) -> None:
        self.scheduler.forget(worker)
        for job_id in [job_id for job_id, (_, place) in self.running.items() if place == worker]:
            del self.running[job_id]
            self.scheduler.progress(job_id, Ended(), self.now)
        self.scheduler.observe(replace(a_view("w1"), kv_capacity=KV), self.now)
        self.tick()

    @invariant()
    def every_pause_is_bounded_and_p0_has_none(self) -> None:
        for job in self.queued.values():
            assert self.bound(job) > self.now
            assert job.lane is not Lane.P0
            assert job.attempt == 1
        assert self.scheduler.session_counts().paused == len(self.queued)

    @invariant()
    def nothing_pauses_below_saturation(self) -> None:
        if sum(self.largest.values()) <= KV:
            assert self.scheduler.session_counts().pauses == 0

    @invariant()
    def workers_count_the_trees_that_are_resident_there(self) -> None:
        sessions = self.scheduler._sessions
        assert sessions is not None
        for home in sessions._sets.values():
            trees = {tree for tree in sessions._trees.values() if tree.home is home}
            assert home.resident == len(trees)
            assert home.tokens == sum(sum(tree.tokens_by_run.values()) for tree in trees)
            assert set(home.idle) == {tree for tree in trees if not tree.jobs}
            tenants = {tree.tenant for tree in trees if tree.tokens}
            assert home.tenant_tokens == {
                name: sum(tree.tokens for tree in trees if tree.tenant == name) for name in tenants
            }

    def teardown(self) -> None:
        for job_id in self.queued:
            self.scheduler.cancel(job_id)
        for job_id in self.running:
            self.scheduler.progress(job_id, Ended(), self.now)
        for run in RUNS:
            self.scheduler.end_run("a" if run in "uvw" else "b", run)
        sessions = self.scheduler._sessions
        assert sessions is not None
        assert not sessions._trees
        for home in sessions._sets.values():
            assert (home.resident, home.tokens) == (0, 0)
            assert not any((home.idle, home.paused, home.tenant_tokens))


SessionsMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


TestSessions = SessionsMachine.TestCase
