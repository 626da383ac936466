"""A scheduler that tries blocked jobs on changed workers only decides as one that tries them on all workers."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import Lane
from inferry.domain.plans import Ended, FirstToken, Produced, Tick
from inferry.domain.values import replace
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import depths
from support.builders import a_job, a_policy, a_view

LANES = {
    Lane.P0: a_policy(may_preempt=(Lane.P2,), ttft_ms=1e9, itl_ms=1e9),
    Lane.P1: a_policy(share=0.1, ttft_ms=1e9, itl_ms=1e9),
    Lane.P2: a_policy(share=0.2, reserve=0.25, preemptible=True),
}
WINDOWS = {lane: a_policy(window="adaptive", coalesce_ms=20) for lane in Lane}
GROUPED = LANES | {
    Lane.P0: replace(LANES[Lane.P0], groups=("live",)),
    Lane.P2: replace(LANES[Lane.P2], groups=("batch", "live")),
}
capacities = st.fixed_dictionaries(
    {
        "sequences": st.sampled_from([None, None, 1, 3]),
        "kv_tokens": st.sampled_from([None, 1_500]),
        "kv_packing": st.sampled_from(["sum", "timed"]),
        "prefill_tokens": st.sampled_from([None, 700, 2_500]),
        "prefill_tokens_per_s": st.sampled_from([None, None, 1_000.0]),
        "group": st.sampled_from(["live", "batch"]),
        "models": st.sampled_from([("m",), ("m", "n"), ("n",)]),
        "pads": st.sampled_from([False, False, False, True]),
    }
)
shapes = st.fixed_dictionaries(
    {
        "lane": st.sampled_from(list(Lane)),
        "model": st.sampled_from(["m", "m", "m", "n"]),
        "tokens": st.sampled_from([20, 100, 300, 900, 2_200]),
        "output": st.sampled_from([1, 60, 600]),
        "tenant": st.sampled_from("aab"),
        "run_id": st.sampled_from("xxy"),
        "session": st.sampled_from([None, None, "s"]),
        "prefix": st.sampled_from([(), (), ("p",), ("p", "q"), ("r", "s", "t")]),
        "resume": st.sampled_from([ResumeMode.CONTINUE, ResumeMode.RESTART]),
    }
)


class RescanMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.jobs: list[InferenceJob] = []
        self.running: list[InferenceJob] = []
        self.both: list[Scheduler] = []

    def tell(self, verb: str, *arguments: Any) -> Any:
        answers = [getattr(scheduler, verb)(*arguments) for scheduler in self.both]
        if verb != "tick":
            assert answers[0] == answers[1]
        return answers

    @initialize(
        views=st.lists(capacities, min_size=1, max_size=4), kind=st.sampled_from(["lanes", "groups", "windows"])
    )
    def start(self, views: list[dict[str, Any]], kind: str) -> None:
        lanes = {"lanes": LANES, "groups": GROUPED, "windows": WINDOWS}[kind]
        self.both = [
            Scheduler(lanes, {"b": 2.0}, burst_tokens=400, rescans_all_workers=rescans) for rescans in (False, True)
        ]
        for number, view in enumerate(views):
            self.tell("observe", a_view(f"{number}", **view), 0.0)

    @rule(shape=shapes, patience=st.sampled_from([None, None, None, 0.0, 0.5]))
    def a_job_arrives(self, shape: dict[str, Any], patience: float | None) -> None:
        """One at a time, so that the queues are often empty."""
        self.offer(shape, patience)
        self.tick()

    @rule(many=st.lists(shapes, min_size=2, max_size=5))
    def jobs_arrive(self, many: list[dict[str, Any]]) -> None:
        for shape in many:
            self.offer(shape, None)
        self.tick()

    def offer(self, shape: dict[str, Any], patience: float | None) -> None:
        deadline = None if patience is None else self.now + patience
        job = a_job(f"{len(self.jobs)}", at=self.now, deadline=deadline, **shape)
        self.jobs.append(job)
        self.tell("offer", job, self.now)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.sampled_from([1, 40]))
    def a_job_writes(self, data: st.DataObject, tokens: int) -> None:
        job = data.draw(st.sampled_from(self.running))
        self.tell("progress", job.job_id, FirstToken(job.footprint.prompt.expected // 2), self.now)
        self.tell("progress", job.job_id, Produced(tokens), self.now)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), then_tick=st.booleans())
    def a_job_ends(self, data: st.DataObject, then_tick: bool) -> None:
        job = data.draw(st.sampled_from(self.running))
        self.running.remove(job)
        self.tell("progress", job.job_id, Ended(job.footprint.prompt.expected, 0, 30), self.now)
        if then_tick:
            self.tick()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def a_job_is_cancelled(self, data: st.DataObject) -> None:
        self.tell("cancel", data.draw(st.sampled_from(self.jobs)).job_id)

    @rule(view=capacities, number=st.integers(0, 4))
    def a_worker_changes(self, view: dict[str, Any], number: int) -> None:
        self.tell("observe", a_view(f"{number}", **view), self.now)

    @rule(number=st.integers(0, 4))
    def a_worker_leaves(self, number: int) -> None:
        self.tell("forget", f"{number}")

    @rule(seconds=st.sampled_from([0.01, 0.3]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    @rule()
    def tick(self) -> None:
        one, other = self.tell("tick", self.now)
        assert isinstance(one, Tick)
        assert (one.plans, one.evictions, one.expired) == (other.plans, other.evictions, other.expired)
        # A head that was not tried again may be woken for a rate that was spent meanwhile, but never too late.
        assert other.wake_at is None or (one.wake_at is not None and one.wake_at <= other.wake_at + 1e-9)
        self.running += [job for plan in one.plans for job in plan.jobs]

    def teardown(self) -> None:
        if self.both:
            assert depths(self.both[0]) == depths(self.both[1])
            assert self.both[0].service() == self.both[1].service()
            assert self.both[0].ahead(Lane.P2) == self.both[1].ahead(Lane.P2)
            workers = [f"{number}" for number in range(5)]
            assert [self.both[0].use(name) for name in workers] == [self.both[1].use(name) for name in workers]


TestRescan = RescanMachine.TestCase
TestRescan.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None)
