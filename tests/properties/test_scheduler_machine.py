"""The scheduler's laws under any sequence of inputs, against a model that is slow, simple and written apart from it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferry.domain.errors import QueueFull
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy, ReleaseReason
from inferry.domain.plans import BatchPlan, CapacityUse, Ended, FirstToken, JobLocation, Tick
from inferry.domain.workers import Capacity, Load, Phase, WorkerView
from inferry.scheduling.queues.lane_queue import PREPAID_TOKENS
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.scheduler import Scheduler
from support.builders import a_job, a_policy, a_view

WORKERS = ("u", "v", "w")

sizes = st.sampled_from([1, 40, 100, 600, 2_000, 5_000])
limits = st.sampled_from([None, None, None, None, 0, 1, 2, 5])
token_limits = st.sampled_from([None, None, None, None, 0, 100, 700, 3_000])
policies = st.builds(
    a_policy,
    window=st.sampled_from(["off", "fixed", "adaptive"]),
    coalesce_ms=st.sampled_from([0, 8, 64, 64]),
    max_wait_ms=st.sampled_from([4, 60_000, 60_000]),
    max_batch=st.sampled_from([1, 2, 64, 64]),
    queue_limit=st.sampled_from([3, 1_000, 1_000]),
)
reserves = st.sampled_from([(0.0, 0.0, 0.0), (0.0, 0.0, 0.25), (0.0, 0.1, 0.5)])
shares = st.sampled_from([(0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.3), (0.0, 0.4, 0.4)])
# What all lanes, jobs and workers of a machine have in common: pure fleets reach deeper than mixed ones.
ONE_KIND_OF_JOB = {"model": "m", "adapter": None, "isolation": None}
ONE_KIND_OF_WORKER = {"models": ("m",), "isolation": None, "foreign": None}
UP = ONE_KIND_OF_WORKER | {"phase": Phase.READY}
PATIENT = ONE_KIND_OF_JOB | {"max_wait_s": 60.0}
HOLDING = {"window": "adaptive", "coalesce_ms": 64, "max_wait_ms": 60_000}
OFF = {"window": "off", "queue_limit": 1_000}
Theme = tuple[dict[Lane, dict[str, Any]], dict[str, Any], dict[str, Any]]
jobs = st.fixed_dictionaries(
    {
        "lane": st.sampled_from(list(Lane)),
        "tokens": sizes,
        "output": st.sampled_from([1, 50]),
        "model": st.sampled_from(["m", "m", "m", "m", "n"]),
        "adapter": st.sampled_from([None, None, None, None, "x"]),
        "isolation": st.sampled_from([None, None, None, None, None, "acme"]),
        "attention": st.sampled_from([None, None, "other"]),
        "max_wait_s": st.sampled_from([60.0, 60.0, 60.0, 0.0, 0.003]),
    }
)
views = st.fixed_dictionaries(
    {
        "worker": st.sampled_from(WORKERS),
        "models": st.sampled_from([("m",), ("m",), ("m", "n"), ("m", "n"), ("n",)]),
        "adapters": st.sampled_from([(), ("x",)]),
        "isolation": st.sampled_from([None, None, None, None, None, "acme"]),
        "phase": st.sampled_from([Phase.READY] * 5 + [Phase.DRAINING]),
        "pads": st.booleans(),
        "sequences": limits,
        "kv_tokens": token_limits,
        "prefill_tokens": token_limits,
        "foreign": st.sampled_from([None, None, None, None, Load(running=1, kv_tokens=50)]),
    }
)


@dataclass
class Known:
    """What the model knows of one job."""

    job: InferenceJob
    number: int
    state: str = "queued"
    worker: str = ""
    prefilling: bool = True
    passed: list[int] = field(default_factory=list)
    """Prompt tokens of lower-lane jobs that went before it while it was the first of its lane and route."""
    passed_by: int = 0
    """Tokens of later jobs of its own lane and route that went to workers it waits for."""

    @property
    def order(self) -> tuple[Lane, float, int]:
        return self.job.lane, self.job.arrived_at, self.number


class SchedulerMachine(RuleBasedStateMachine):
    theme: Theme = ({}, {}, {})

    def __init__(self) -> None:
        super().__init__()
        self.lanes: dict[Lane, LanePolicy] = {}
        self.known: dict[str, Known] = {}
        self.views: dict[str, WorkerView] = {}
        self.plan_ids: set[int] = set()
        self.now = 1.0
        self.wake_at: float | None = None
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.ticks: list[Tick] = []

    def tell(self, verb: str, *arguments: Any) -> Any:
        """Say it to the scheduler and remember it for the replay."""
        self.log.append((verb, arguments))
        self.wake_at = None
        return getattr(self.scheduler, verb)(*arguments)

    # Inputs.

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
        assert self.scheduler.depths() == {lane: len(self.queued(lane)) for lane in Lane}
        assert self.scheduler.queued == len(self.queued())
        assert self.scheduler.in_flight == len(self.in_flight())
        for worker in WORKERS:
            assert self.scheduler.use(worker) == self.use(worker)

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

    # The model.

    @staticmethod
    def pick(data: st.DataObject, of: Iterable[Known]) -> Known:
        return data.draw(st.sampled_from(list(of)))

    def queued(self, lane: Lane | None = None) -> list[Known]:
        return [k for k in self.known.values() if k.state == "queued" and lane in (None, k.job.lane)]

    def in_flight(self) -> list[Known]:
        return [k for k in self.known.values() if k.state == "planned"]

    def use(self, worker: str, lane: Lane = Lane.P2) -> CapacityUse:
        """What jobs of the lane and better ones use there."""
        here = [known for known in self.in_flight() if known.worker == worker and known.job.lane <= lane]
        return CapacityUse(
            len(here),
            sum(known.job.footprint.peak_kv_tokens for known in here),
            sum(known.job.footprint.prefill_tokens for known in here if known.prefilling),
        )

    def able(self, known: Known) -> set[str]:
        return {name for name, view in self.views.items() if eligible(view, known.job)}

    def hold_end(self, job: InferenceJob) -> float:
        policy = self.lanes[job.lane]
        ends = [job.arrived_at + policy.coalesce_ms / 1000]
        ends.append(job.arrived_at + min(job.max_wait_s, policy.max_wait_ms / 1000))
        if job.deadline is not None:
            ends.append(job.arrived_at + (job.deadline - job.arrived_at) / 2)
        return min(ends)

    def may_hold(self, known: Known) -> bool:
        """Whether the job may still be waiting of its own accord."""
        policy = self.lanes[known.job.lane]
        if policy.window == "off" or self.now >= self.hold_end(known.job):
            return False
        able = [view for view in self.views.values() if eligible(view, known.job)]
        if policy.window == "fixed":
            return True
        # Before an idle worker that pads, a job may wait for company that is expected; before others it may wait for a
        # sibling, but not where one is idle.
        if any(view.pads for view in able):
            return all(view.pads for view in able)
        return bool(known.job.prefix) and len(able) > 1 and all(self.is_busy(view) for view in able)

    def is_busy(self, view: WorkerView) -> bool:
        return self.use(view.worker).sequences + view.foreign.running + view.foreign.waiting > 0

    def has_capacity(self, view: WorkerView, job: InferenceJob) -> bool:
        if view.pads and self.lanes[job.lane].window != "off" and self.is_busy(view):
            return False
        use, need, foreign = self.use(view.worker), job.footprint, view.foreign
        fill = 1 - self.lanes[job.lane].reserve
        sequences = use.sequences + foreign.running + foreign.waiting
        if view.capacity.sequences is not None and sequences >= view.capacity.sequences * fill:
            return False
        return all(
            limit is None or used + more <= limit * fill or (used == 0 and limit > 0)
            for limit, used, more in (
                (view.capacity.kv_tokens, use.kv_tokens + foreign.kv_tokens, need.peak_kv_tokens),
                (view.capacity.prefill_tokens, self.use(view.worker, job.lane).prefill_tokens, need.prefill_tokens),
            )
        )

    def may_be_reserved_for_a_share(self, known: Known, waiting: list[Known]) -> set[str]:
        return {
            name
            for other in waiting
            if other is not known and self.lanes[other.job.lane].share > 0 and waiting[0].job.lane < other.job.lane
            for name, view in self.views.items()
            if eligible(view, other.job)
        }


def eligible(view: WorkerView, job: InferenceJob) -> bool:
    return (
        view.phase is Phase.READY
        and job.route.model in view.models
        and (job.route.adapter is None or job.route.adapter in view.adapters)
        and job.route.isolation == view.isolation
    )


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


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    share=st.sampled_from([0.05, 0.1, 0.3]),
    high=st.lists(st.integers(1, 2_000), min_size=1, max_size=5),
    low=st.lists(st.integers(1, 1_000), min_size=1, max_size=5),
    capacity=st.sampled_from([{"sequences": 1}, {"prefill_tokens": 3_000}, {"sequences": 3, "prefill_tokens": 2_500}]),
)
def test_however_much_p0_arrives_p2_gets_its_share(
    share: float, high: list[int], low: list[int], capacity: dict[str, int]
) -> None:
    scheduler = Scheduler({Lane.P0: a_policy(), Lane.P2: a_policy(share=share)})
    scheduler.observe(a_view(sequences=capacity.get("sequences"), prefill_tokens=capacity.get("prefill_tokens")), 0.0)
    offered, admitted, rate = 0, {Lane.P0: 0, Lane.P2: 0}, share / (1 - share)
    before, advance = dict(admitted), 0
    running: list[InferenceJob] = []
    for _ in range(150):
        while (depths := scheduler.depths()) and min(depths.values()) < 4:
            lane = min(depths, key=lambda lane: depths[lane])
            among = high if lane is Lane.P0 else low
            scheduler.offer(a_job(f"{offered}", tokens=among[offered % len(among)], lane=lane), 0.0)
            offered += 1
        for plan in scheduler.tick(0.0).plans:
            running += plan.jobs
            for job in plan.jobs:
                admitted[job.lane] += job.footprint.prefill_tokens
        # It may get more where there is room for everybody, but never less, as long as it has jobs waiting. What it
        # was served counts, in turn or not: whoever ran out of jobs may have been served in advance.
        since = {lane: admitted[lane] - before[lane] for lane in admitted}
        assert since[Lane.P2] >= rate * since[Lane.P0] - QUANTUM_TOKENS - advance
        if not scheduler.depths()[Lane.P2]:
            before, advance = dict(admitted), PREPAID_TOKENS
        scheduler.progress(running.pop(0).job_id, Ended(), 0.0)
