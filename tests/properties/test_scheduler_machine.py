"""The scheduler's invariants under any sequence of inputs, checked against an independent, simple model."""

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from inferry.domain.errors import QueueFull
from inferry.domain.lanes import Lane, LanePolicy, ReleaseReason
from inferry.domain.plans import BatchPlan, CapacityUse, Ended, FirstToken, JobLocation, Tick
from inferry.domain.workers import Capacity, Phase, WorkerView
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.scheduler import Scheduler
from properties.scheduler_model import Known, SchedulerModel, eligible
from properties.scheduler_strategies import (
    HOLDING,
    OFF,
    ONE_KIND_OF_JOB,
    PATIENT,
    UP,
    WORKERS,
    Theme,
    jobs,
    policies,
    reserves,
    shares,
    views,
)
from scheduling.scheduler_harness import depths
from support.builders import a_job, a_view


class SchedulerMachine(SchedulerModel):
    theme: Theme = ({}, {}, {})

    @initialize(
        policies=st.tuples(policies, policies, policies),
        shares=shares,
        reserves=reserves,
        views=st.lists(views, min_size=1, max_size=2),
    )
    def start(
        self,
        policies: tuple[LanePolicy, ...],
        shares: tuple[float, ...],
        reserves: tuple[float, ...],
        views: list[dict[str, Any]],
    ) -> None:
        self.lanes = {
            lane: msgspec.structs.replace(
                policy, **({"share": share, "reserve": reserve} | self.theme[0].get(lane, {}))
            )
            for lane, policy, share, reserve in zip(Lane, policies, shares, reserves, strict=True)
        }
        self.scheduler = Scheduler(self.lanes)
        for view in views:
            self.observe(view | {"phase": Phase.READY, "isolation": None, "foreign": None})

    @rule(
        shapes=st.lists(jobs, min_size=1, max_size=4),
        age=st.sampled_from([0.0, 0.0, 0.0, 0.002, 0.5]),
        patience=st.sampled_from([None, None, None, 0.0, 0.01, 1.0]),
        then_tick=st.booleans(),
    )
    def offer(self, shapes: list[dict[str, Any]], age: float, patience: float | None, then_tick: bool) -> None:
        for shape in shapes:
            number = len(self.known)
            deadline = None if patience is None else self.now + patience
            job = a_job(f"job-{number}", at=self.now - age, deadline=deadline, **(shape | self.theme[1]))
            if len(self.queued(job.lane)) >= self.lanes[job.lane].queue_limit:
                with pytest.raises(QueueFull):
                    self.tell("offer", job, self.now)
                self.log.pop()
            else:
                self.tell("offer", job, self.now)
                self.known[job.job_id] = Known(job, number)
        if then_tick:
            self.tick()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        known = self.pick(data, self.known.values())
        expected = {"queued": JobLocation.QUEUED, "planned": JobLocation.PLANNED}.get(known.state, JobLocation.UNKNOWN)
        assert self.tell("cancel", known.job.job_id) is expected
        if known.state == "queued":
            known.state = "cancelled"

    @precondition(lambda self: self.known)
    @rule(data=st.data(), ended=st.booleans())
    def late_or_early_progress(self, data: st.DataObject, ended: bool) -> None:
        self.progress(self.pick(data, self.known.values()), ended)

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data(), ended=st.sampled_from([True, True, False]))
    def real_progress(self, data: st.DataObject, ended: bool) -> None:
        self.progress(self.pick(data, self.in_flight()), ended)

    @precondition(lambda self: self.in_flight())
    @rule()
    def everything_ends(self) -> None:
        for known in self.in_flight():
            self.progress(known, ended=True)
        self.tick()

    def progress(self, known: Known, ended: bool) -> None:
        self.tell("progress", known.job.job_id, Ended() if ended else FirstToken(), self.now)
        if known.state == "planned":
            known.prefilling = False
            if ended:
                known.state = "ended"

    @rule(view=views)
    def observe(self, view: dict[str, Any]) -> None:
        view_update = a_view(**(view | self.theme[2]), at=self.now)
        self.update_view(view_update)

    @precondition(lambda self: self.views)
    @rule(
        data=st.data(),
        capacity=st.sampled_from([Capacity(), Capacity(sequences=2), Capacity(sequences=8, prefill_tokens=3_000)]),
    )
    def only_the_capacity_changes(self, data: st.DataObject, capacity: Capacity) -> None:
        view = data.draw(st.sampled_from(list(self.views.values())))
        self.update_view(msgspec.structs.replace(view, capacity=capacity, observed_at=self.now))
        self.tick()

    def update_view(self, view_update: WorkerView) -> None:
        self.tell("observe", view_update, self.now)
        self.views[view_update.worker] = view_update

    @rule(worker=st.sampled_from(WORKERS))
    def forget(self, worker: str) -> None:
        self.tell("forget", worker)
        self.views.pop(worker, None)

    @rule(seconds=st.sampled_from([0.001, 0.004, 0.004, 0.03, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.wake_at = None

    # Decisions.

    @rule()
    def tick(self) -> None:
        released = {known.job.job_id for known in self.queued() if not self.may_hold(known)}
        before = {name: self.use(name) for name in WORKERS}
        queued_before = sorted(self.queued(), key=lambda known: known.order)
        tick = self.ask()
        self.check_expiry(tick)
        for plan in tick.plans:
            self.check_plan(plan)
            self.check_decisions(plan)
        self.check_capacity(tick, before)
        self.check_order(tick, queued_before, released)
        self.check_quantum(tick, queued_before)
        self.check_work_conservation(tick, released)
        again = self.ask()
        assert (again.plans, again.expired, again.wake_at) == ((), (), tick.wake_at)
        assert tick.wake_at is None or tick.wake_at > self.now
        self.wake_at = tick.wake_at

    @precondition(lambda self: self.wake_at is not None)
    @rule()
    def nothing_happens_before_the_wake_up(self) -> None:
        assert self.wake_at is not None
        expected = self.wake_at
        self.now += (self.wake_at - self.now) * 0.9
        if self.now < expected:
            tick = self.ask()
            assert (tick.plans, tick.expired, tick.wake_at) == ((), (), expected)

    @precondition(lambda self: self.wake_at is not None)
    @rule()
    def sleep_until_the_wake_up(self) -> None:
        assert self.wake_at is not None
        self.now = self.wake_at
        self.tick()

    def ask(self) -> Tick:
        self.log.append(("tick", (self.now,)))
        tick = self.scheduler.tick(self.now)
        self.ticks.append(tick)
        return tick

    # Laws.

    @invariant()
    def every_job_is_counted_where_it_is(self) -> None:
        if not self.lanes:
            return
        assert depths(self.scheduler) == {lane: len(self.queued(lane)) for lane in Lane}
        assert self.scheduler.queued == len(self.queued())
        assert self.scheduler.in_flight == len(self.in_flight())
        for worker in WORKERS:
            assert self.scheduler.use(worker) == self.use(worker)

    def check_decisions(self, plan: BatchPlan) -> None:
        """Holding a job and its waits for capacity are never longer than its time in the queue."""
        for job in plan.jobs:
            record = self.scheduler.decision(job.job_id, self.now)
            assert record is not None
            assert record.picked_by
            waits = list((record.waits or {}).values())
            assert min(waits, default=0.0) >= 0
            assert record.held_s + sum(waits) <= self.now - job.arrived_at + 1e-6

    def check_expiry(self, tick: Tick) -> None:
        for job in tick.expired:
            known = self.known[job.job_id]
            assert known.state == "queued"
            assert job.deadline is not None
            assert job.deadline <= self.now
            known.state = "expired"
        deadlines = [known.job.deadline for known in self.queued() if known.job.deadline is not None]
        planned = {job.job_id for plan in tick.plans for job in plan.jobs}
        for known in self.queued():
            deadline = known.job.deadline
            assert deadline is None or deadline > self.now
            if deadline is not None and known.job.job_id not in planned:
                assert tick.wake_at is not None
                assert tick.wake_at <= deadline
        assert not any(deadline <= self.now for deadline in deadlines)

    def check_plan(self, plan: BatchPlan) -> None:
        assert plan.jobs
        assert plan.formed_at == self.now
        assert plan.plan_id not in self.plan_ids
        self.plan_ids.add(plan.plan_id)
        view = self.views[plan.worker]
        for job in plan.jobs:
            known = self.known[job.job_id]
            assert known.state == "queued"
            assert known.job is job
            assert eligible(view, job)
            known.state, known.worker = "planned", plan.worker
        if plan.reason is ReleaseReason.MAX_WAIT:
            assert len(plan.jobs) == 1
        if view.pads:
            assert len({job.batch_key for job in plan.jobs}) == 1
            assert len(plan.jobs) <= self.lanes[plan.jobs[0].lane].max_batch
            assert plan.padded_tokens == max(job.footprint.prompt.expected for job in plan.jobs)
        else:
            assert plan.padded_tokens is None

    def check_capacity(self, tick: Tick, before: dict[str, CapacityUse]) -> None:
        """In every currency: inside the limit, or alone in what nobody used."""
        for worker in {plan.worker for plan in tick.plans}:
            view, after = self.views[worker], self.use(worker)
            plans = [plan for plan in tick.plans if plan.worker == worker]
            new = sum(len(plan.jobs) for plan in plans)
            foreign_sequences = view.foreign.running + view.foreign.waiting
            for limit, used, was in (
                (
                    view.capacity.sequences,
                    after.sequences + foreign_sequences,
                    before[worker].sequences + foreign_sequences,
                ),
                (
                    view.capacity.kv_tokens,
                    after.kv_tokens + view.foreign.kv_tokens,
                    before[worker].kv_tokens + view.foreign.kv_tokens,
                ),
            ):
                assert limit is None or used <= limit or (new == 1 and was == 0 and limit > 0)
            for lane in {job.lane for plan in plans for job in plan.jobs}:
                # A job meets the prompts of its own and better lanes; better ones may have come after it.
                new_here = [j for plan in plans for j in plan.jobs if j.lane is lane]
                better = sum(j.footprint.prefill_tokens for plan in plans for j in plan.jobs if j.lane < lane)
                used = self.use(worker, lane).prefill_tokens - better
                own = sum(job.footprint.prefill_tokens for job in new_here)
                limit = view.capacity.prefill_tokens
                assert limit is None or used <= limit or (len(new_here) == 1 and used == own and limit > 0)
            if view.pads and (patient := [p for p in plans if self.lanes[p.jobs[0].lane].window != "off"]):
                assert patient == plans[:1]
                assert before[worker].sequences + foreign_sequences == 0
            reasons = [plan.reason for plan in plans if plan.reason is not ReleaseReason.MAX_WAIT]
            assert view.pads or len(reasons) == len(set(reasons))

    def check_order(self, tick: Tick, queued_before: list[Known], released: set[str]) -> None:
        """Nobody goes to a worker that somebody before it waits for, but by share or as company in a padded pass."""
        left = [k for k in queued_before if k.state == "queued" and k.job.job_id in released]
        for plan in tick.plans:
            view = self.views[plan.worker]
            for job in plan.jobs:
                known = self.known[job.job_id]
                for other in left:
                    if other.order < known.order and eligible(view, other.job):
                        by_share = other.job.lane < job.lane and self.lanes[job.lane].share > 0
                        in_batch = view.pads and (plan.jobs[0] is not job or len(plan.jobs) > 1)
                        passes = other.job.lane is job.lane and other.job.route == job.route
                        if not by_share and not in_batch and passes:
                            other.passed_by += job.footprint.peak_kv_tokens
                            assert other.passed_by <= QUANTUM_TOKENS * len(self.able(other))
                            assert self.able(other) - {plan.worker for plan in tick.plans}, "one worker is kept for it"
                        else:
                            assert by_share or in_batch

    def check_quantum(self, tick: Tick, queued_before: list[Known]) -> None:
        """The first of a lane and route is overtaken by one quantum of lower lanes at most, or by one larger job."""
        firsts: set[tuple[Lane, object]] = set()
        for known in queued_before:
            key = (known.job.lane, known.job.route)
            if key in firsts or self.may_hold(known):
                known.passed = []
                continue
            firsts.add(key)
            if known.state != "queued":
                continue
            for plan in tick.plans:
                view = self.views[plan.worker]
                if eligible(view, known.job) and not view.pads:
                    known.passed += [j.footprint.prefill_tokens for j in plan.jobs if j.lane > known.job.lane]
            assert sum(known.passed) <= QUANTUM_TOKENS or len(known.passed) == 1

    def check_work_conservation(self, tick: Tick, released: set[str]) -> None:
        """No job is left with room for it on a worker that nobody before it waits for, unless it is held."""
        taken: set[str] = set()
        waiting = sorted(self.queued(), key=lambda known: known.order)
        for known in waiting:
            usable = {
                name
                for name, view in self.views.items()
                if eligible(view, known.job) and self.has_capacity(view, known.job) and name not in taken
            }
            # A turn that waits for room keeps one worker, and only one, from its betters.
            if (
                not (usable and len(usable) == 1 and usable <= self.may_be_reserved_for_a_share(known, waiting))
                and usable
            ):
                assert known.job.job_id not in released
                assert tick.wake_at is not None
                assert tick.wake_at <= self.hold_end(known.job)
            taken |= {name for name, view in self.views.items() if eligible(view, known.job)}

    def teardown(self) -> None:
        """The same inputs give the same ticks, byte for byte."""
        if not self.lanes:
            return
        again = Scheduler(self.lanes)
        results = [getattr(again, verb)(*arguments) for verb, arguments in self.log]
        assert [tick for tick in results if isinstance(tick, Tick)] == self.ticks


class PaddedMachine(SchedulerMachine):
    """Patient jobs in front of workers that pad."""

    theme = dict.fromkeys(Lane, HOLDING), PATIENT, UP | {"pads": True, "sequences": None, "kv_tokens": None}


class ContinuousMachine(SchedulerMachine):
    """Patient jobs in front of workers that batch continuously."""

    theme = dict.fromkeys(Lane, HOLDING), PATIENT, UP | {"pads": False}


class ImpatientMachine(SchedulerMachine):
    """Fixed windows and jobs that do not wait them out."""

    theme = {lane: {"window": "fixed", "coalesce_ms": 64} for lane in Lane}, ONE_KIND_OF_JOB, UP | {"pads": False}


class LanesMachine(SchedulerMachine):
    """Nobody is held, and lower lanes own large shares of one worker."""

    theme = (
        {Lane.P0: OFF, Lane.P1: OFF | {"share": 0.4}, Lane.P2: OFF | {"share": 0.4}},
        ONE_KIND_OF_JOB,
        UP | {"worker": "w", "pads": False, "sequences": 2, "kv_tokens": None},
    )


def _case(machine: type[SchedulerMachine], examples: int) -> Any:
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, derandomize=True, database=None
    )
    return case


TestMixed = _case(SchedulerMachine, 100)


TestPadded = _case(PaddedMachine, 60)


TestContinuous = _case(ContinuousMachine, 30)


TestImpatient = _case(ImpatientMachine, 60)


TestLanes = _case(LanesMachine, 100)
