"""Fair share and lane bounds in virtual time: shares of tenants, and the bounds of lanes under overload.

One engine with a fixed token rate: every sequence produces one token per step, and the rest of the step computes
prompts, in order. `python -m benchmarks fairness` writes the figures.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping

from msgspec import Struct

from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.plans import Ended, FirstToken
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.workers import Capacity, Phase, WorkerView
from inferry.scheduling.queues.fair_share import jain_index
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.scheduling.scheduler import Scheduler

STEP_S = 0.01
STEP_TOKENS = 256
SLOTS = 32
AGENTS = {"fleet": 50, "single": 1}
CALLS_AT_ONCE = SLOTS
"""Calls that an agent has queued or running, so that one agent can keep the engine busy."""
SHARES = {Lane.P1: 0.1, Lane.P2: 0.05}
OVERLOAD = 3.0

_ROUTE = RouteKey("m")
_PAYLOAD = Payload(api="chat", body=b"{}", sampling=Sampling())


class Shares(Struct, frozen=True):
    """Tokens by tenant, Jain's index, and the throughput relative to FCFS."""

    tokens: Mapping[str, int]
    fleet_over_single: float
    jain_index: float
    throughput_loss: float


class Bounds(Struct, frozen=True):
    """Under overload: lower-lane tokens between P0 jobs, and the largest lag of a lower lane behind its share."""

    overtaken_by: int
    """Maximum prompt tokens of lower lanes between two P0 jobs."""
    overtaken_at_most: int
    """A quantum, or the largest job of a lower lane."""
    behind_its_share: Mapping[str, float]
    """Maximum prompt tokens by which a lane was behind its share: a quantum, plus what it earned while its quantum
    was pending."""
    admitted: Mapping[str, int]


class Engine:
    """A worker in virtual time that reports progress to the scheduler."""

    def __init__(self, scheduler: Scheduler, ended: Callable[[InferenceJob, float], None]) -> None:
        self._scheduler = scheduler
        self._ended = ended
        self._prompts: dict[InferenceJob, int] = {}
        self._writing: dict[str, tuple[InferenceJob, int]] = {}
        self.computed: Counter[str] = Counter()

    def take(self, job: InferenceJob) -> None:
        self._prompts[job] = job.footprint.prompt.expected

    def step(self, now: float) -> None:
        left = STEP_TOKENS
        for job_id, (job, written) in list(self._writing.items()):
            left -= 1
            self.computed[job.tenant] += 1
            if written + 1 < job.footprint.output.expected:
                self._writing[job_id] = job, written + 1
                continue
            del self._writing[job_id]
            self._scheduler.progress(job_id, Ended(job.footprint.prompt.expected, 0, written + 1), now)
            self._ended(job, now)
        for job, missing in list(self._prompts.items()):
            done = min(left, missing)
            left -= done
            self.computed[job.tenant] += done
            if done < missing:
                self._prompts[job] = missing - done
                return
            del self._prompts[job]
            self._writing[job.job_id] = job, 0
            self._scheduler.progress(job.job_id, FirstToken(missing), now)


def shares(seconds: float) -> Shares:
    """A tenant with fifty agents beside a tenant with one, both always busy."""
    fair = _tokens_served(seconds, fair=True)
    fcfs = _tokens_served(seconds, fair=False)
    return Shares(
        tokens=dict(fair),
        fleet_over_single=fair["fleet"] / fair["single"],
        jain_index=jain_index(fair.values()),
        throughput_loss=1.0 - fair.total() / fcfs.total(),
    )


def _tokens_served(seconds: float, fair: bool) -> Counter[str]:
    """Without fairness all jobs have one tenant and one run, so that arrival order decides."""
    scheduler = _scheduler({Lane.P1: LanePolicy(max_wait_ms=100, coalesce_ms=0, queue_limit=100_000)})
    owner: dict[str, tuple[str, int]] = {}

    def call(tenant: str, agent: int, now: float) -> None:
        number = len(owner)
        job_id = str(number)
        owner[job_id] = tenant, agent
        rng = random.Random(number)
        job = _job(
            job_id, rng.randint(60, 460), rng.randint(5, 65), now, *((tenant, str(agent)) if fair else ("all", "all"))
        )
        scheduler.offer(job, now)

    for tenant, agents in AGENTS.items():
        for agent in range(agents):
            for _ in range(CALLS_AT_ONCE):
                call(tenant, agent, 0.0)
    return _play(scheduler, seconds, lambda job, now: call(*owner[job.job_id], now)).computed


def bounds(seconds: float) -> Bounds:
    """P0 alone is three times the engine's capacity, and both other lanes always have work."""
    lanes = {
        Lane.P0: LanePolicy(max_wait_ms=100, coalesce_ms=0, queue_limit=10**6),
        Lane.P1: LanePolicy(max_wait_ms=100, coalesce_ms=0, queue_limit=10**6, share=SHARES[Lane.P1], reserve=0.05),
        Lane.P2: LanePolicy(max_wait_ms=100, coalesce_ms=0, queue_limit=10**6, share=SHARES[Lane.P2], reserve=0.25),
    }
    scheduler = _scheduler(lanes)
    sizes = {Lane.P0: (40, 400, 900), Lane.P1: (300, 1_500), Lane.P2: (700, 2_000)}
    number = 0

    def offer(lane: Lane, now: float) -> int:
        nonlocal number
        number += 1
        tokens = sizes[lane][number % len(sizes[lane])]
        scheduler.offer(_job(str(number), tokens, 20, now, f"t{number % 4}", f"r{number % 16}", lane), now)
        return tokens + 20

    owed, overtaken, most = 0.0, 0, 0
    admitted: Counter[Lane] = Counter()
    behind = dict.fromkeys(SHARES, 0.0)

    def before(now: float) -> None:
        nonlocal owed
        owed += OVERLOAD * STEP_TOKENS
        while owed > 0:
            owed -= offer(Lane.P0, now)
        for lane in SHARES:
            while scheduler.ahead(lane).jobs - scheduler.ahead(Lane(lane - 1)).jobs < 16:
                offer(lane, now)

    def sent(job: InferenceJob) -> None:
        nonlocal overtaken, most
        tokens = job.footprint.prompt.expected
        admitted[job.lane] += tokens
        overtaken = 0 if job.lane is Lane.P0 else overtaken + tokens
        most = max(most, overtaken)
        for lane, share in SHARES.items():
            above = sum(admitted[higher] for higher in Lane if higher < lane)
            behind[lane] = max(behind[lane], above * share / (1 - share) - admitted[lane])

    _play(scheduler, seconds, lambda job, now: None, before, sent)
    return Bounds(
        overtaken_by=most,
        overtaken_at_most=max(QUANTUM_TOKENS, *sizes[Lane.P1], *sizes[Lane.P2]),
        behind_its_share={lane.name: round(tokens, 1) for lane, tokens in behind.items()},
        admitted={lane.name: tokens for lane, tokens in sorted(admitted.items())},
    )


def _play(
    scheduler: Scheduler,
    seconds: float,
    ended: Callable[[InferenceJob, float], None],
    before: Callable[[float], None] = lambda now: None,
    sent: Callable[[InferenceJob], None] = lambda job: None,
) -> Engine:
    engine = Engine(scheduler, ended)
    for step in range(round(seconds / STEP_S)):
        now = step * STEP_S
        before(now)
        for plan in scheduler.tick(now).plans:
            for job in plan.jobs:
                sent(job)
                engine.take(job)
        engine.step(now)
    return engine


def _scheduler(lanes: Mapping[Lane, LanePolicy]) -> Scheduler:
    scheduler = Scheduler(lanes)
    capacity = Capacity(sequences=SLOTS, prefill_tokens=4 * STEP_TOKENS)
    view = WorkerView(worker="w", models=frozenset({"m"}), phase=Phase.READY, capacity=capacity, observed_at=0.0)
    scheduler.observe(view, 0.0)
    return scheduler


def _job(
    job_id: str, tokens: int, output: int, now: float, tenant: str, run: str, lane: Lane = Lane.P1
) -> InferenceJob:
    return InferenceJob(
        job_id=job_id,
        tenant=tenant,
        run_id=run,
        step_id=job_id,
        lane=lane,
        route=_ROUTE,
        batch_key=BatchKey(_ROUTE),
        footprint=Footprint(Estimate.exactly(tokens), Estimate.exactly(0), Estimate.exactly(output)),
        token_budget=tokens + output,
        prompt_hash="h",
        arrived_at=now,
        max_wait_s=0.1,
        payload=_PAYLOAD,
    )


def measure() -> dict[str, object]:
    """Ten minutes of tenants and one of overload, in virtual time."""
    return {"tenants": _as_dict(shares(600.0)), "lanes_at_three_times_overload": _as_dict(bounds(60.0))}


def _as_dict(figures: Shares | Bounds) -> dict[str, object]:
    return {name: getattr(figures, name) for name in figures.__struct_fields__}
