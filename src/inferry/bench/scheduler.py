"""What the scheduler itself costs: microseconds per job, and a tick against a growing backlog.

`python -m inferry.bench.scheduler` prints the table; `measure` returns the same numbers.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from inferry.domain.jobs import (
    BatchKey,
    Estimate,
    Footprint,
    InferenceJob,
    Lane,
    LanePolicy,
    Payload,
    RouteKey,
    Sampling,
)
from inferry.domain.plans import Ended, FirstToken, Phase, Room, WorkerView
from inferry.scheduling.scheduler import Scheduler

REPETITIONS = 7
JOBS = 6_400
BURST = 64
BACKLOGS = (1_000, 10_000, 100_000)

_ROUTE = RouteKey("m")
_BATCH_KEY = BatchKey(_ROUTE)
_PAYLOAD = Payload(api="chat", body=b"{}", sampling=Sampling())
_LANES: Mapping[Lane, LanePolicy] = {
    lane: LanePolicy(max_wait_ms=100, coalesce_ms=10, queue_limit=1_000_000, share=share)
    for lane, share in ((Lane.P0, 0.0), (Lane.P1, 0.1), (Lane.P2, 0.05))
}


def measure() -> dict[str, object]:
    """Medians over several repetitions, on whatever machine this is."""
    return {
        "us_per_job": {
            f"{workers} workers, {name}": _median(lambda w=workers, b=burst: _drain(w, b))  # type: ignore[misc]
            for workers in (4, 64)
            for name, burst in (("one at a time", 1), (f"bursts of {BURST}", BURST))
        },
        "us_per_tick_blocked": {
            f"{backlog} jobs": {
                "after progress": _median(lambda n=backlog: _blocked(n, "progress")),  # type: ignore[misc]
                "after offer": _median(lambda n=backlog: _blocked(n, "offer")),  # type: ignore[misc]
                "undisturbed": _median(lambda n=backlog: _blocked(n, "nothing")),  # type: ignore[misc]
            }
            for backlog in BACKLOGS
        },
    }


def _drain(workers: int, burst: int) -> float:
    """Offer, tick, first token, end: microseconds per job when every job finds room at once."""
    scheduler = _scheduler(workers, Room(sequences=256, kv_tokens=400_000, prefill_tokens=65_536))
    jobs = [_job(str(n), lane=Lane(n % 3)) for n in range(JOBS)]
    first, end = FirstToken(), Ended()
    with _quiet():
        started = time.perf_counter()
        for at in range(0, JOBS, burst):
            sent = jobs[at : at + burst]
            for job in sent:
                scheduler.offer(job, 0.0)
            planned = sum(len(plan.jobs) for plan in scheduler.tick(0.0).plans)
            assert planned == len(sent)
            for job in sent:
                scheduler.progress(job.job_id, first, 0.0)
            for job in sent:
                scheduler.progress(job.job_id, end, 0.0)
        elapsed = time.perf_counter() - started
    return elapsed / JOBS * 1e6


def _blocked(backlog: int, disturbance: str) -> float:
    """Microseconds of a tick that finds no room for anybody, after a change that might have made some."""
    scheduler = _scheduler(4, Room(sequences=64, prefill_tokens=4_096))
    small, large = 10, 4_000
    for n in range(64):
        scheduler.offer(_job(f"small-{n}", tokens=small), 0.0)
    for n in range(4):
        scheduler.offer(_job(f"large-{n}", tokens=3_900), 0.0)
    scheduler.tick(0.0)
    for n in range(backlog):
        scheduler.offer(_job(f"waiting-{n}", tokens=large, lane=Lane(n % 3), deadline=1e6 + n), 0.0)
    assert not scheduler.tick(0.0).plans
    ticks = []
    with _quiet():
        for n in range(50):
            match disturbance:
                case "progress":
                    scheduler.progress(f"small-{n}", FirstToken(), 0.0)
                case "offer":
                    scheduler.offer(_job(f"late-{n}", tokens=small, lane=Lane(n % 3)), 0.0)
            started = time.perf_counter()
            tick = scheduler.tick(0.0)
            ticks.append(time.perf_counter() - started)
            assert not tick.plans
    return statistics.median(ticks) * 1e6


def _scheduler(workers: int, room: Room) -> Scheduler:
    scheduler = Scheduler(_LANES)
    for n in range(workers):
        view = WorkerView(worker=f"w{n:02}", models=frozenset({"m"}), phase=Phase.READY, room=room, observed_at=0.0)
        scheduler.observe(view, 0.0)
    return scheduler


def _job(job_id: str, tokens: int = 500, lane: Lane = Lane.P1, deadline: float | None = None) -> InferenceJob:
    return InferenceJob(
        job_id=job_id,
        tenant="t",
        run_id="r",
        step_id=job_id,
        lane=lane,
        route=_ROUTE,
        batch_key=_BATCH_KEY,
        footprint=Footprint(Estimate.exactly(tokens), Estimate.exactly(0), Estimate.exactly(100)),
        token_budget=tokens + 100,
        prompt_hash="h",
        arrived_at=0.0,
        max_wait_s=0.1,
        deadline=deadline,
        payload=_PAYLOAD,
    )


def _median(once: Callable[[], float]) -> float:
    return round(statistics.median(once() for _ in range(REPETITIONS)), 2)


@contextmanager
def _quiet() -> Iterator[None]:
    """Collect garbage before, not while, we measure."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main() -> None:
    numbers = measure()
    for title, rows in numbers.items():
        print(f"\n{title}")
        assert isinstance(rows, dict)
        for name, value in rows.items():
            cells = value if isinstance(value, dict) else {"": value}
            print(f"  {name:<28}" + "".join(f"{label:>16} {cell:>8.2f}" for label, cell in cells.items()))


if __name__ == "__main__":
    main()
