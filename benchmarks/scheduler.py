"""What the scheduler itself costs: CPU microseconds per job, and per tick against a growing backlog.

`python -m benchmarks.scheduler` prints the table; `measure` returns the same numbers.
"""

import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

from benchmarks import uncompiled
from inferry.cli.checkout import is_compiled
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload, ResumeMode
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.plans import Ended, FirstToken, JobLocation, Produced
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.workers import Capacity, Phase, WorkerView
from inferry.scheduling.scheduler import Scheduler

REPETITIONS = 30
"""Of short runs: on a machine with neighbours the fastest of many is what the code costs, the median what it cost."""
MAX_US_SINGLE, MAX_US_BURST, MAX_US_ALL_FEATURES = 10.0, 7.0, 30.0
MAX_GROWTH = 2.0
FLEETS = (4, 64)
BACKLOG_REPETITIONS = 15
JOBS = 1_280
BURST = 64
JOBS_PER_ROUND = 1_500
BLOCKED_BACKLOGS = (1_000, 10_000, 100_000)
TENANTS, RUNS = 20, 500
MANY_TENANTS, MANY_RUNS = 2_000, 100_000

_ROUTE = RouteKey("m")
_BATCH_KEY = BatchKey(_ROUTE)
_PAYLOAD = Payload(api="chat", body=b"{}", sampling=Sampling())
_policy = partial(LanePolicy, max_wait_ms=100, coalesce_ms=10, queue_limit=2_000_000)
# Everything on: targets, pacing, preemption, rates, weights, groups, tenants, runs, sessions, prefixes and deadlines.
# The prefill rate binds only beside a lane with targets. No job is late here, so that all jobs go in fair order.
_FULL_LANES: Mapping[Lane, LanePolicy] = {
    Lane.P0: _policy(may_preempt=(Lane.P2,), groups=("default",), ttft_ms=1e9, itl_ms=30),
    Lane.P1: _policy(share=0.1, reserve=0.05, ttft_ms=1e9, itl_ms=50),
    Lane.P2: _policy(share=0.05, reserve=0.25, preemptible=True, groups=("default",)),
}
_LANES: Mapping[Lane, LanePolicy] = {
    lane: _policy(share=share) for lane, share in ((Lane.P0, 0.0), (Lane.P1, 0.1), (Lane.P2, 0.05))
}


_SEQUENCES = Capacity(sequences=64)
_KV = Capacity(kv_tokens=64 * 600 + 300, prefill_tokens=65_536, prefill_tokens_per_s=1e9)
_SATURATED = (
    ("sequences full", _SEQUENCES, False, (1_000, 30_000)),
    ("KV full", _KV, False, (1_000, 30_000)),
    ("KV full, many tenants and runs", _KV, True, (1_000, 1_000_000)),
)
"""What keeps everybody waiting, and how many wait. The dearest kind is the one that is tried with a million."""

Cell = Callable[[], float]
Figures = dict[str, float]
Key = TypeVar("Key")


def measure() -> dict[str, Any]:
    """Fastest and median over many rounds, on whatever machine this is, beside what is asked for; then the same with
    the scheduler as plain Python, if this one is compiled.
    """
    sections = figures()
    if is_compiled():
        sections["plain"] = uncompiled.call_uncompiled("benchmarks.scheduler", "figures")
    return sections


def figures() -> dict[str, Any]:
    """What this process's scheduler costs."""
    sections: dict[str, Any] = {"us_per_1000_turns_of_a_plain_loop": _interleaved({"dict": _plain_loop})["dict"]}
    paths = _paths()
    rows = _interleaved(paths)
    for title, all_features in (("us_per_job", False), ("us_per_job_everything_on", True)):
        sections[title] = {
            f"{workers} workers, {name}, {state}": rows[all_features, name, workers, state]
            for kind, name, workers, state in paths
            if kind is all_features
        }
    few, many = FLEETS
    worst = {"with 64 workers": max(_growth(rows, key, (*key[:2], many, key[3])) for key in paths if key[2] == few)}
    through_backlog: dict[str, Figures] = {}
    sections["us_per_job_through_a_backlog"] = through_backlog
    for what, capacity, many_runs, backlogs in _SATURATED:
        with_backlog = {
            (workers, backlog): _with_backlog(backlog, workers, capacity, many_runs)
            for workers in FLEETS
            for backlog in backlogs
        }
        gc.freeze()  # or every collection before a measurement would walk through millions of jobs
        queued = _interleaved(with_backlog, BACKLOG_REPETITIONS)
        del with_backlog
        gc.unfreeze()
        through_backlog |= {
            f"{backlog} jobs, {workers} workers, {what}": one for (workers, backlog), one in queued.items()
        }
        worst[f"with 64 workers, {what}"] = max(_growth(queued, (few, n), (many, n)) for n in backlogs)
        worst[f"with {backlogs[1]} queued, {what}"] = max(
            _growth(queued, (n, backlogs[0]), (n, backlogs[1])) for n in FLEETS
        )
    sections["us_per_tick_blocked"] = {f"{backlog} jobs": _blocked(backlog) for backlog in BLOCKED_BACKLOGS}
    sections["growth"] = worst
    sections["held"] = {
        "plain, one at a time": _fastest(rows, False, "one at a time") <= MAX_US_SINGLE,
        "plain, in bursts": _fastest(rows, False, f"bursts of {BURST}") <= MAX_US_BURST,
        "everything on": max(one["median"] for one in sections["us_per_job_everything_on"].values())
        <= MAX_US_ALL_FEATURES,
        "everything on, through a backlog": max(one["median"] for one in through_backlog.values())
        <= MAX_US_ALL_FEATURES,
        "growth": max(worst.values()) <= MAX_GROWTH,
    }
    return sections


def _paths() -> dict[tuple[bool, str, int, str], Cell]:
    """Ways of a job that finds capacity at once: all features or none, how jobs arrive, workers, their state."""
    return {
        (all_features, name, workers, state): partial(
            _drain, workers, burst, running_per_worker, all_features=all_features
        )
        for all_features in (False, True)
        for name, burst in (("one at a time", 1), (f"bursts of {BURST}", BURST))
        for workers in FLEETS
        for state, running_per_worker in (("idle", 0), ("half full", 128))
    }


@cache
def cells() -> dict[str, Cell]:
    """Measurements of microseconds per job by name, for comparisons: every way, and through the smaller backlogs."""
    named = {
        f"{'all features' if all_features else 'plain'}, {name}, {workers} workers, {state}": cell
        for (all_features, name, workers, state), cell in _paths().items()
    }
    for what, capacity, many_runs, (backlog, _) in _SATURATED:
        named[f"{backlog} queued, {FLEETS[0]} workers, {what}"] = _with_backlog(backlog, FLEETS[0], capacity, many_runs)
    return named


def cell_names() -> list[str]:
    return list(cells())


def cost_of(cell: str) -> float:
    """One measurement, in microseconds of CPU time per job."""
    return cells()[cell]()


def _fastest(figures: Mapping[tuple[bool, str, int, str], Figures], all_features: bool, name: str) -> float:
    """What the path costs with four workers, the dearer of idle and half full."""
    return max(one["fastest"] for key, one in figures.items() if key[:3] == (all_features, name, FLEETS[0]))


def _growth(figures: Mapping[Key, Figures], small: Key, large: Key) -> float:
    return round(figures[large]["fastest"] / figures[small]["fastest"], 2)


def _plain_loop() -> float:
    """What the machine itself does just now, to judge the other numbers by."""
    numbers: dict[int, int] = {}
    with _gc_paused():
        started = time.process_time()
        for n in range(100_000):
            numbers[n & 1023] = n
        return (time.process_time() - started) * 1e4


def _drain(workers: int, burst: int, running_per_worker: int = 0, all_features: bool = False) -> float:
    """Offer, tick, first token, end: microseconds per job when every job finds capacity at once.

    `running_per_worker` jobs run on every worker all the while, so that no worker is the obvious choice.
    """
    rate = 1e12 if all_features else None
    capacity = Capacity(sequences=256, kv_tokens=400_000, prefill_tokens=65_536, prefill_tokens_per_s=rate)
    scheduler = _scheduler(workers, capacity, _FULL_LANES if all_features else _LANES)
    for n in range(running_per_worker * workers):
        scheduler.offer(_job(f"standing-{n}", lane=Lane.P0), 0.0)
    scheduler.tick(0.0)
    for n in range(running_per_worker * workers):
        scheduler.progress(f"standing-{n}", FirstToken(), 0.0)
    jobs = [_full_featured_job(n) if all_features else _job(str(n), lane=Lane(n % 3)) for n in range(JOBS)]
    first, end = (FirstToken(450), Ended(500, 50, 100)) if all_features else (FirstToken(), Ended())
    produced = Produced(50) if all_features else None
    with _gc_paused():
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


def _with_backlog(backlog: int, workers: int, capacity: Capacity, many: bool) -> Callable[[], float]:
    """Microseconds to end a job, plan the next and offer another, with so many queued and every worker full.

    The backlog stands while it is measured: as many come as go. Time passes, so that the prefill rate keeps no job out.
    """
    scheduler = _scheduler(workers, capacity, _FULL_LANES)
    running: deque[str] = deque()
    numbers, ticks = itertools.count(), itertools.count(1)
    with _gc_paused():
        for n in itertools.islice(numbers, backlog + 64 * workers):
            scheduler.offer(_full_featured_job(n, many), 0.0)
    running.extend(job.job_id for plan in scheduler.tick(0.0).plans for job in plan.jobs)
    first, end = FirstToken(450), Ended(500, 50, 100)

    def once() -> float:
        new_jobs = iter([_full_featured_job(n, many) for n in itertools.islice(numbers, JOBS_PER_ROUND)])
        ended = 0
        with _gc_paused():
            started = time.process_time()
            while ended < JOBS_PER_ROUND:
                now = next(ticks) * 1e-3
                job_id = running.popleft()
                scheduler.progress(job_id, first, now)
                scheduler.progress(job_id, end, now)
                sent = [job for plan in scheduler.tick(now).plans for job in plan.jobs]
                running.extend([job.job_id for job in sent])
                ended += 1
                scheduler.offer(next(new_jobs), now)
            elapsed = time.process_time() - started
        assert scheduler.queued >= backlog - 64 * workers
        return elapsed / JOBS_PER_ROUND * 1e6

    return once


def _blocked(backlog: int) -> dict[str, float]:
    """Microseconds of a tick that finds no capacity for any job, after changes that might have freed some."""
    scheduler = _scheduler(4, Capacity(prefill_tokens=4_096))
    for n in range(4):
        scheduler.offer(_job(f"large-{n}", tokens=3_500, lane=Lane.P0), 0.0)
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
        "after cancel": lambda n: _expect(scheduler.cancel(f"waiting-{n}") is JobLocation.QUEUED),
        "undisturbed": lambda n: None,
    }
    medians = {}
    with _gc_paused():
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


def _scheduler(workers: int, capacity: Capacity, lanes: Mapping[Lane, LanePolicy] = _LANES) -> Scheduler:
    weights = {f"t{n}": 1.0 + n % 3 for n in range(TENANTS)} if lanes is _FULL_LANES else None
    scheduler = Scheduler(lanes, weights, burst_tokens=1_000_000)
    for n in range(workers):
        view = WorkerView(
            worker=f"w{n:02}", models=frozenset({"m"}), phase=Phase.READY, capacity=capacity, observed_at=0.0
        )
        scheduler.observe(view, 0.0)
    return scheduler


def _full_featured_job(n: int, many: bool = False) -> InferenceJob:
    """One of many runs of several tenants, in a session, with a prompt that begins like others and a deadline."""
    tenants, runs = (MANY_TENANTS, MANY_RUNS) if many else (TENANTS, RUNS)
    tenant, run = n % tenants, n % runs
    prefix = (f"tenant {tenant}", f"run {run}", f"run {run}, turn {n // runs % 8}")
    return _job(
        str(n),
        lane=Lane(n % 3),
        tenant=f"t{tenant}",
        run=f"r{run}",
        session=f"s{run}",
        prefix=prefix,
        deadline=1e9 + n,
        resume=ResumeMode.CONTINUE,
    )


def _job(
    job_id: str,
    tokens: int = 500,
    lane: Lane = Lane.P1,
    deadline: float | None = None,
    tenant: str = "t",
    run: str = "r",
    session: str | None = None,
    prefix: tuple[str, ...] = (),
    resume: ResumeMode = ResumeMode.RESTART,
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
        resume=resume,
        payload=_PAYLOAD,
    )


def _interleaved(cells: Mapping[Key, Cell], rounds: int = REPETITIONS) -> dict[Key, Figures]:
    """Round after round over all cells, so that a slow spell of the machine falls on all of them alike."""
    times: dict[Key, list[float]] = {key: [] for key in cells}
    for _ in range(rounds):
        for key, once in cells.items():
            times[key].append(once())
    return {
        key: {"fastest": round(min(some), 2), "median": round(statistics.median(some), 2)}
        for key, some in times.items()
    }


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Collect garbage before, not while, we measure."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main() -> None:
    numbers = measure()
    _print(numbers)
    if "plain" in numbers:
        print("\nas plain Python")
        _print(numbers["plain"])


def _print(numbers: dict[str, Any]) -> None:
    for title, rows in numbers.items():
        if title == "plain":
            continue
        print(f"\n{title}")
        for name, value in rows.items():
            cells = value.items() if isinstance(value, dict) else (("", value),)
            print(f"  {name:<60}" + "".join(f"{label:>16} {cell:>8}" for label, cell in cells))


if __name__ == "__main__":
    main()
