"""A lane with a share is served in proportion to it under any load of higher lanes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.domain.plans import Ended
from inferry.scheduling.queues.lane_queue import PREPAID_TOKENS
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.scheduler import Scheduler
from scheduling.scheduler_harness import depths
from support.builders import a_job, a_policy, a_view


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    share=st.sampled_from([0.05, 0.1, 0.3]),
    high=st.lists(st.integers(1, 2_000), min_size=1, max_size=5),
    low=st.lists(st.integers(1, 1_000), min_size=1, max_size=5),
    capacity=st.sampled_from([{"sequences": 1}, {"prefill_tokens": 3_000}, {"sequences": 3, "prefill_tokens": 2_500}]),
)
def test_p2_gets_its_share_under_any_load_of_p0(
    share: float, high: list[int], low: list[int], capacity: dict[str, int]
) -> None:
    scheduler = Scheduler({Lane.P0: a_policy(), Lane.P2: a_policy(share=share)})
    scheduler.observe(a_view(sequences=capacity.get("sequences"), prefill_tokens=capacity.get("prefill_tokens")), 0.0)
    offered, admitted, rate = 0, {Lane.P0: 0, Lane.P2: 0}, share / (1 - share)
    before, advance = dict(admitted), 0
    running: list[InferenceJob] = []
    for _ in range(150):
        while min((queued := depths(scheduler, Lane.P0, Lane.P2)).values()) < 4:
            lane = min(queued, key=lambda lane: queued[lane])
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
        if not depths(scheduler)[Lane.P2]:
            before, advance = dict(admitted), PREPAID_TOKENS
        scheduler.progress(running.pop(0).job_id, Ended(), 0.0)
