"""Invariants with tenants, runs, prefixes, sessions, rates and preemption together."""

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import Lane
from inferry.domain.plans import Ended, FirstToken, JobLocation, Produced, Tick
from inferry.domain.values import replace
from inferry.scheduling.capacity.prefill_bucket import MAX_DEBT_S
from inferry.scheduling.preemption import MIN_PROGRESS_TOKENS
from inferry.scheduling.queues.queued_job import MAX_PREEMPTIONS
from inferry.scheduling.scheduler import Scheduler
from support.builders import a_job, a_policy, a_view

LANES = {
    Lane.P0: a_policy(may_preempt=(Lane.P2,), ttft_ms=1e9, itl_ms=1e9),
    Lane.P1: a_policy(share=0.1, ttft_ms=1e9, itl_ms=1e9),
    Lane.P2: a_policy(share=0.1, reserve=0.25, preemptible=True),
}
BURST = 400
RATE = 1_000.0
ROOMS: dict[str, dict[str, Any]] = {
    "few": {"sequences": 3},
    "small": {"kv_tokens": 1_500, "sequences": 6},
    "paced": {"prefill_tokens": 1_200, "prefill_tokens_per_s": RATE},
}
shapes = st.fixed_dictionaries(
    {
        "lane": st.sampled_from(list(Lane)),
        "tokens": st.sampled_from([20, 100, 300, 900]),
        "output": st.sampled_from([1, 60]),
        "tenant": st.sampled_from("abc"),
        "run_id": st.sampled_from("xy"),
        "session": st.sampled_from([None, None, "s", "t"]),
        "prefix": st.sampled_from([(), (), ("p",), ("p", "q"), ("r", "s", "t")]),
        "resume": st.sampled_from([ResumeMode.CONTINUE, ResumeMode.CONTINUE, ResumeMode.RESTART]),
    }
)


@dataclass
class Known:
    job: InferenceJob
    state: str = "queued"
    worker: str = ""
    decoding: bool = False
    written: int = 0
    evicted: bool = False


class FairMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.jobs: dict[str, Known] = {}
        self.level, self.filled_at = float(BURST), 0.0
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.ticks: list[Tick] = []
        self.wake_at: float | None = None
        self.limits: dict[str, int] = {name: capacity.get("sequences", 1_000) for name, capacity in ROOMS.items()}
        self.scheduler = self.fresh()
        for name, capacity in ROOMS.items():
            self.tell("observe", a_view(name, **capacity), 0.0)

    @staticmethod
    def fresh() -> Scheduler:
        return Scheduler(LANES, {"b": 2.0}, burst_tokens=BURST)

    def tell(self, verb: str, *arguments: Any) -> Any:
        self.log.append((verb, arguments))
        self.wake_at = None
        return getattr(self.scheduler, verb)(*arguments)

    def running_jobs(self) -> list[Known]:
        return [known for known in self.jobs.values() if known.state == "planned"]

    # Inputs.

    @rule(shapes=st.lists(shapes, min_size=1, max_size=5))
    def offer(self, shapes: list[dict[str, Any]]) -> None:
        for shape in shapes:
            job = a_job(f"{len(self.jobs)}", at=self.now, **shape)
            self.jobs[job.job_id] = Known(job)
            self.tell("offer", job, self.now)
        self.tick()

    @precondition(lambda self: self.running_jobs())
    @rule(data=st.data(), tokens=st.sampled_from([1, 40]))
    def write(self, data: st.DataObject, tokens: int) -> None:
        known = data.draw(st.sampled_from(self.running_jobs()))
        if not known.decoding:
            known.decoding = True
            self.tell("progress", known.job.job_id, FirstToken(known.job.footprint.prompt.expected), self.now)
        known.written += tokens
        self.tell("progress", known.job.job_id, Produced(tokens), self.now, known.job.attempt)

    @precondition(lambda self: self.running_jobs())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.running_jobs())))
        self.tick()

    @precondition(lambda self: any(known.evicted for known in self.running_jobs()))
    @rule()
    def evicted_jobs_end_and_return(self) -> None:
        for known in [known for known in self.running_jobs() if known.evicted]:
            self.finish(known)
            again = replace(known.job, attempt=known.job.attempt + 1)
            self.jobs[again.job_id] = Known(again)
            self.tell("offer", again, self.now)
            for late in (FirstToken(), Ended()):
                self.tell("progress", again.job_id, late, self.now, known.job.attempt)
        self.tick()

    def finish(self, known: Known) -> None:
        known.state = "ended"
        prompt = known.job.footprint.prompt.expected
        self.tell("progress", known.job.job_id, Ended(prompt, 0, known.written), self.now)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(list(self.jobs.values())))
        found = self.tell("cancel", known.job.job_id)
        assert found is {"queued": JobLocation.QUEUED, "planned": JobLocation.PLANNED}.get(
            known.state, JobLocation.UNKNOWN
        )
        if known.state == "queued":
            known.state = "cancelled"

    @rule(name=st.sampled_from(sorted(ROOMS)), sequences=st.sampled_from([1, 3]))
    def a_worker_changes(self, name: str, sequences: int) -> None:
        self.tell("observe", a_view(name, **(ROOMS[name] | {"sequences": sequences, "at": self.now})), self.now)
        self.limits[name] = sequences

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.wake_at = None

    @precondition(lambda self: self.wake_at is not None)
    @rule()
    def sleep_until_the_wake_up(self) -> None:
        assert self.wake_at is not None
        before, self.now = self.now, self.now + 0.9 * (self.wake_at - self.now)
        if before < self.now < self.wake_at:
            expected, tick = self.wake_at, self.ask()
            assert (tick.plans, tick.evictions, tick.wake_at) == ((), (), expected)
        self.now = self.wake_at
        self.tick()

    # Decisions and laws.

    def ask(self) -> Tick:
        self.log.append(("tick", (self.now,)))
        tick = self.scheduler.tick(self.now)
        self.ticks.append(tick)
        return tick

    @rule()
    def tick(self) -> None:
        lanes = [
            k.job.lane for k in self.running_jobs() if k.worker == "paced" and k.decoding and k.job.lane <= Lane.P1
        ]
        best_live = min(lanes, default=None)
        queued_live = [known for known in self.jobs.values() if known.state == "queued" and known.job.lane is Lane.P0]
        before = {name: self.scheduler.use(name) for name in ROOMS}
        tick = self.ask()
        for plan in tick.plans:
            for job in plan.jobs:
                known = self.jobs[job.job_id]
                assert (known.state, known.job) == ("queued", job)
                known.state, known.worker = "planned", plan.worker
        self.check_capacity(tick, before)
        self.check_rate(tick, before, best_live)
        for job in tick.evictions:
            known = self.jobs[job.job_id]
            assert queued_live
            assert (known.state, known.evicted, job.lane) == ("planned", False, Lane.P2)
            assert job.attempt <= MAX_PREEMPTIONS
            assert not known.decoding or (known.written >= MIN_PROGRESS_TOKENS and job.resume is not ResumeMode.RESTART)
            known.evicted = True
        still = [known for known in queued_live if known.state == "queued"]
        leaving = [known for known in self.running_jobs() if known.evicted]
        assert not tick.evictions or len({self.jobs[job.job_id].worker for job in tick.evictions}) <= len(still)
        assert len(tick.evictions) <= len(leaving)
        again = self.ask()
        assert (again.plans, again.evictions, again.wake_at) == ((), (), tick.wake_at)
        assert tick.wake_at is None or tick.wake_at > self.now
        self.wake_at = tick.wake_at

    def check_capacity(self, tick: Tick, before: dict[str, Any]) -> None:
        """Wherever affinity, siblings and promises sent a job, there was room for it."""
        for name in {plan.worker for plan in tick.plans}:
            use, was, capacity = self.scheduler.use(name), before[name], ROOMS[name]
            new = sum(len(plan.jobs) for plan in tick.plans if plan.worker == name)
            assert use.sequences <= self.limits[name]
            kv = capacity.get("kv_tokens")
            assert kv is None or use.kv_tokens <= kv or (new == 1 and not was.kv_tokens)

    def check_rate(self, tick: Tick, before: dict[str, Any], best_live: Lane | None) -> None:
        """While a live sequence decodes, lower lanes never overdraw the bucket but by one prompt larger than itself.

        Its betters go as they please and spend as well, down to a debt of `MAX_DEBT_S`.
        """
        self.level = min(float(BURST), self.level + RATE * (self.now - self.filled_at))
        self.filled_at = self.now
        jobs = [job for plan in tick.plans if plan.worker == "paced" for job in plan.jobs]
        if best_live is None or not jobs:
            return
        new = self.scheduler.use("paced").prefill_tokens - before["paced"].prefill_tokens
        sizes = [job.footprint.prefill_tokens for job in jobs if job.lane > best_live]
        if len(sizes) == len(jobs):
            assert new <= self.level + 0.001 or (max(sizes) > BURST and self.level >= BURST - 0.001)
            self.level -= new
        elif not sizes:
            self.level = max(self.level - new, min(self.level, -MAX_DEBT_S * RATE))
        else:
            # Who of them went first is not told, nor how much of whose prompt was warm: take its word for the level.
            prefill_bucket = self.scheduler._workers["paced"].prefill_bucket
            assert prefill_bucket is not None
            self.level = prefill_bucket._level

    @invariant()
    def every_job_is_counted_where_it_is(self) -> None:
        states = [known.state for known in self.jobs.values()]
        assert self.scheduler.queued == states.count("queued")
        assert self.scheduler.in_flight == states.count("planned")
        for name in ROOMS:
            assert self.scheduler.use(name).sequences == sum(known.worker == name for known in self.running_jobs())

    def teardown(self) -> None:
        """The same inputs give the same ticks; and with time and room everybody goes."""
        again = self.fresh()
        results = [getattr(again, verb)(*arguments) for verb, arguments in self.log]
        assert [tick for tick in results if isinstance(tick, Tick)] == self.ticks
        for _ in range(len(self.jobs) + 10):
            for known in self.running_jobs():
                self.finish(known)
            self.now += 10.0
            self.tick()
        assert self.scheduler.queued == 0
        assert self.scheduler.in_flight == 0
        assert not any(line.accounts.ready or line.accounts.active for line in self.scheduler._lane_queues)


TestFair = FairMachine.TestCase
TestFair.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 2_000), min_size=1, max_size=4), min_size=3, max_size=3),
    outputs=st.lists(st.integers(0, 300), min_size=3, max_size=3),
    slots=st.integers(1, 6),
    weight=st.sampled_from([1.0, 3.0]),
)
def test_service_of_tenants_with_work_differs_by_a_prompt_and_what_is_in_flight(
    prompts: list[list[int]], outputs: list[int], slots: int, weight: float
) -> None:
    """The bound of `fairness`, between any two tenants that always have work, at any moment."""
    weights = {"a": weight}
    scheduler = Scheduler({Lane.P1: a_policy()}, weights)
    scheduler.observe(a_view(sequences=slots), 0.0)
    waiting, number, running = dict.fromkeys("abc", 0), 0, list[InferenceJob]()
    bound = {
        tenant: (max(sizes) + slots * output) / weights.get(tenant, 1.0)
        for tenant, sizes, output in zip("abc", prompts, outputs, strict=True)
    }
    for turn in range(150):
        for index, tenant in enumerate("abc"):
            while waiting[tenant] <= slots:
                number += 1
                size = prompts[index][number % len(prompts[index])]
                job = a_job(f"{number}", tenant=tenant, run_id=f"{number % 4}", tokens=size, output=outputs[index])
                scheduler.offer(job, 0.0)
                waiting[tenant] += 1
        for plan in scheduler.tick(0.0).plans:
            running += plan.jobs
            for job in plan.jobs:
                waiting[job.tenant] -= 1
        job = running.pop(turn % len(running))
        scheduler.progress(job.job_id, Produced(job.footprint.output.expected // 2), 0.0)
        scheduler.progress(job.job_id, Ended(job.footprint.prompt.expected, 0, job.footprint.output.expected), 0.0)
        served = {tenant: scheduler.service().get(tenant, 0) / weights.get(tenant, 1.0) for tenant in "abc"}
        for one in "abc":
            assert all(served[one] - served[other] <= bound[one] + 1e-6 for other in "abc")
