"""Queues in virtual time, small enough to be read: k slots, lanes in strict order, arrivals from a seed."""

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.domain.plans import QueuedAhead
from inferry.prediction.wait_model import FLOOR_S
from inferry.prediction.wait_prediction import WaitPrediction
from support.wait_models import DrivenWaitModel


class Arrival(Struct, frozen=True):
    at: float
    lane: Lane
    prefill: int
    output: int
    guess: int
    """What the output was predicted to be."""


class Outcome(Struct, frozen=True):
    prediction: WaitPrediction
    actual_s: float

    @property
    def lane(self) -> Lane:
        return self.prediction.lane

    @property
    def counts(self) -> bool:
        return self.prediction.p90_s > FLOOR_S

    @property
    def held(self) -> bool:
        return self.actual_s <= max(FLOOR_S, self.prediction.p90_s)


ServiceTime = Callable[[Arrival], float]
Slots = Callable[[float], int]


def decode_bound(job: Arrival) -> float:
    """A sequence is held for its prefill and then for every token: 20k prompt tokens and 100 output tokens a second."""
    return job.prefill / 20_000 + job.output / 100


def prefill_bound(job: Arrival) -> float:
    """A prefill slot is held for the prompt alone."""
    return job.prefill / 4_000


def jobs(
    rng: random.Random,
    times: Iterator[float],
    *,
    lanes: tuple[Lane, ...] = (Lane.P1,),
    prefill_sigma: float = 0.8,
    output_sigma: float = 0.7,
    guess_sigma: float = 0.4,
) -> Iterator[Arrival]:
    for at in times:
        output = max(1, round(rng.lognormvariate(5.0, output_sigma)))
        yield Arrival(
            at,
            rng.choice(lanes),
            max(1, round(rng.lognormvariate(6.5, prefill_sigma))),
            output,
            max(1, round(output * rng.lognormvariate(0, guess_sigma))),
        )


def poisson(rng: random.Random, rate: Callable[[float], float], until: float) -> Iterator[float]:
    """Arrivals at a rate that may change with time, by thinning against a step of a tenth of a second."""
    now = 0.0
    while now < until:
        gap = rng.expovariate(max(1e-9, rate(now)))
        if gap > 0.5:
            now += 0.5  # the rate may have changed by then
            continue
        now += gap
        yield now


def bursts(rng: random.Random, every_s: float, size: int, until: float) -> Iterator[float]:
    now = 0.0
    while now < until:
        now += rng.expovariate(1 / every_s)
        start = now
        for _ in range(rng.randint(size // 2, size * 3 // 2)):
            start += rng.expovariate(200)
            yield start
        now = start


def simulate(arrivals: Iterator[Arrival], service: ServiceTime, slots: Slots) -> list[Outcome]:
    """Offer every arrival to a queue with so many slots, telling the model what the gateway would."""
    model = DrivenWaitModel()
    waiting: list[deque[tuple[Arrival, WaitPrediction]]] = [deque() for _ in Lane]
    ends: list[float] = []
    outcomes: list[Outcome] = []
    ahead = [QueuedAhead() for _ in Lane]

    def change(job: Arrival, by: int) -> None:
        for lane in range(job.lane, len(Lane)):
            before = ahead[lane]
            ahead[lane] = QueuedAhead(
                before.jobs + by, before.prompt_tokens + by * job.prefill, before.output_tokens + by * job.guess
            )

    def admit(now: float) -> None:
        while len(ends) < slots(now):
            lane = next((lane for lane in Lane if waiting[lane]), None)
            if lane is None:
                return
            job, prediction = waiting[lane].popleft()
            change(job, -1)
            heapq.heappush(ends, now + service(job))
            model.sent(prediction, now)
            outcomes.append(Outcome(prediction, now - job.at))

    for job in arrivals:
        while ends and ends[0] <= job.at:
            admit(heapq.heappop(ends))
        prediction = model.predict(job.lane, job.prefill, job.guess, ahead[job.lane], job.at)
        model.queued(prediction, job.at)
        waiting[job.lane].append((job, prediction))
        change(job, 1)
        admit(job.at)
    while ends:
        admit(heapq.heappop(ends))
    return outcomes


def coverage(outcomes: list[Outcome], lane: Lane | None = None) -> tuple[int, float]:
    """How many jobs were told a P90 above the floor, and the part of them for which it held."""
    judged = [one.held for one in outcomes if one.counts and lane in (None, one.lane)]
    return len(judged), sum(judged) / max(1, len(judged))
