"""What the scheduler itself costs: CPU microseconds per job, and per tick against a growing backlog.

`python -m inferry.bench.scheduler` prints the table; `measure` returns the same numbers.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

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
from inferry.domain.plans import Ended, FirstToken, Phase, Produced, Room, Whereabouts, WorkerView
from inferry.scheduling.scheduler import Scheduler

REPETITIONS = 7
JOBS = 6_400
BURST = 64
BACKLOGS = (1_000, 10_000, 100_000)
STANDING_BACKLOGS = (1_000, 30_000, 1_000_000)
TENANTS, RUNS = 20, 500

_ROUTE = RouteKey("m")
_BATCH_KEY = BatchKey(_ROUTE)
_PAYLOAD = Payload(api="chat", body=b"{}", sampling=Sampling())
# Everything on: preemption, rates, tenants, runs, sessions and prefixes.
_RICH_LANES: Mapping[Lane, LanePolicy] = {
    Lane.P0: LanePolicy(max_wait_ms=100, coalesce_ms=10, queue_limit=2_000_000, may_preempt=(Lane.P2,)),
    Lane.P1: LanePolicy(max_wait_ms=100, coalesce_ms=10, queue_limit=2_000_000, share=0.1, reserve=0.05),
    Lane.P2: LanePolicy(
        max_wait_ms=100, coalesce_ms=10, queue_limit=2_000_000, share=0.05, reserve=0.25, preemptible=True
    ),
}
_LANES: Mapping[Lane, LanePolicy] = {
    lane: LanePolicy(max_wait_ms=100, coalesce_ms=10, queue_limit=2_000_000, share=share)
    for lane, share in ((Lane.P0, 0.0), (Lane.P1, 0.1), (Lane.P2, 0.05))
}


def measure() -> dict[str, object]:
    """Medians over several repetitions, on whatever machine this is."""
    return {
        "us_per_job": {
            f"{workers} workers, {name}": {
                state: _median(partial(_drain, workers, burst, standing))
                for state, standing in (("idle", 0), ("half full", 128))
            }
            for workers in (4, 64)
            for name, burst in (("one at a time", 1), (f"bursts of {BURST}", BURST))
        },
        "us_per_job_everything_on": {
            f"{workers} workers, {name}": {
                state: _median(partial(_drain, workers, burst, standing, rich=True))
                for state, standing in (("idle", 0), ("half full", 128))
            }
            for workers in (4, 64)
            for name, burst in (("one at a time", 1), (f"bursts of {BURST}", BURST))
        },
        "us_per_job_behind_a_backlog": {
            f"{backlog} jobs": {f"{workers} workers": _behind(backlog, workers) for workers in (4, 64)}
            for backlog in STANDING_BACKLOGS
        },
        "us_per_tick_blocked": {f"{backlog} jobs": _blocked(backlog) for backlog in BACKLOGS},
    }


def _drain(workers: int, burst: int, standing: int = 0, rich: bool = False) -> float:
    """Offer, tick, first token, end: microseconds per job when every job finds room at once.

    `standing` jobs run on every worker all the while, so that no worker is the obvious choice.
    """
    rate = 1e12 if rich else None
    room = Room(sequences=256, kv_tokens=400_000, prefill_tokens=65_536, prefill_tokens_per_s=rate)
    scheduler = _scheduler(workers, room, _RICH_LANES if rich else _LANES)
    for n in range(standing * workers):
        scheduler.offer(_job(f"standing-{n}", lane=Lane.P0), 0.0)
    scheduler.tick(0.0)
    for n in range(standing * workers):
        scheduler.progress(f"standing-{n}", FirstToken(), 0.0)
    jobs = [_rich_job(n) if rich else _job(str(n), lane=Lane(n % 3)) for n in range(JOBS)]
    first, end = (FirstToken(450), Ended(500, 50, 100)) if rich else (FirstToken(), Ended())
    produced = Produced(50) if rich else None
    with _quiet():
        started = time.process_time()
        for at in range(0, JOBS, burst):
            sent = jobs[at : at + burst]
            for job in sent:
                scheduler.offer(job, 0.0)
            planned = sum(len(plan.jobs) for plan in scheduler.tick(at * 1e-3).plans)
            assert planned == len(sent)
            for job in sent:
                scheduler.progress(job.job_id, first, 0.0)
            if produced is not None:
                for job in sent:
                    scheduler.progress(job.job_id, produced, 0.0)
            for job in sent:
                scheduler.progress(job.job_id, end, 0.0)
        elapsed = time.process_time() - started
    return elapsed / JOBS * 1e6


def _behind(backlog: int, workers: int) -> float:
    """Microseconds to end a job, plan the next and offer another, with so many queued and every worker full."""
    scheduler = _scheduler(workers, Room(sequences=64), _RICH_LANES)
    running: deque[str] = deque()
    for n in range(backlog + 64 * workers):
        scheduler.offer(_rich_job(n), 0.0)
    with _quiet():
        running.extend(job.job_id for plan in scheduler.tick(0.0).plans for job in plan.jobs)
        fresh = [_rich_job(n) for n in range(10_000_000, 10_000_000 + 3_000)]
        end = Ended(500, 50, 100)
        started = time.process_time()
        for job in fresh:
            scheduler.progress(running.popleft(), end, 0.0)
            running.extend(job.job_id for plan in scheduler.tick(0.0).plans for job in plan.jobs)
            scheduler.offer(job, 0.0)
        elapsed = time.process_time() - started
    assert scheduler.queued >= backlog - workers
    return round(elapsed / len(fresh) * 1e6, 2)


def _blocked(backlog: int) -> dict[str, float]:
    """Microseconds of a tick that finds no room for anybody, after changes that might have made some."""
    scheduler = _scheduler(4, Room(prefill_tokens=4_096))
    for n in range(4):
        scheduler.offer(_job(f"large-{n}", tokens=3_500), 0.0)
    for n in range(200):
        scheduler.offer(_job(f"small-{n}", tokens=5), 0.0)
    scheduler.tick(0.0)
    for n in range(backlog):
        scheduler.offer(_job(f"waiting-{n}", tokens=4_000, lane=Lane(n % 3), deadline=1e6 + n), 0.0)
    assert not scheduler.tick(0.0).plans
    first = FirstToken()
    changes: dict[str, Callable[[int], None]] = {
        "after progress": lambda n: scheduler.progress(f"small-{n}", first, 0.0),
        "after offer": lambda n: scheduler.offer(_job(f"late-{n}", tokens=5, lane=Lane(n % 3)), 0.0),
        "after cancel": lambda n: _expect(scheduler.cancel(f"waiting-{n}") is Whereabouts.QUEUED),
        "undisturbed": lambda n: None,
    }
    medians = {}
    with _quiet():
        for name, change in changes.items():
            ticks = []
            for n in range(200):
                change(n)
                started = time.process_time()
                tick = scheduler.tick(0.0)
                ticks.append(time.process_time() - started)
                _expect(not tick.plans)
            medians[name] = round(statistics.median(ticks) * 1e6, 2)
    return medians


def _expect(truth: bool) -> None:
    assert truth


def _scheduler(workers: int, room: Room, lanes: Mapping[Lane, LanePolicy] = _LANES) -> Scheduler:
    scheduler = Scheduler(lanes, burst_tokens=1_000_000)
    for n in range(workers):
        view = WorkerView(worker=f"w{n:02}", models=frozenset({"m"}), phase=Phase.READY, room=room, observed_at=0.0)
        scheduler.observe(view, 0.0)
    return scheduler


def _rich_job(n: int) -> InferenceJob:
    """One of many runs of several tenants, in a session, with a prompt that begins like others."""
    run = n % RUNS
    prefix = (f"tenant {n % TENANTS}", f"run {run}", f"run {run}, turn {n // RUNS % 8}")
    return _job(str(n), lane=Lane(n % 3), tenant=f"t{n % TENANTS}", run=f"r{run}", session=f"s{run}", prefix=prefix)


def _job(
    job_id: str,
    tokens: int = 500,
    lane: Lane = Lane.P1,
    deadline: float | None = None,
    tenant: str = "t",
    run: str = "r",
    session: str | None = None,
    prefix: tuple[str, ...] = (),
) -> InferenceJob:
    return InferenceJob(
        job_id=job_id,
        tenant=tenant,
        run_id=run,
        session=session,
        prefix=prefix,
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
            print(f"  {name:<28}" + "".join(f"{label:>16} {cell:>8.2f}" for label, cell in value.items()))


if __name__ == "__main__":
    main()
