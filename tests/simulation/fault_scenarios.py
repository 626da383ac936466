"""Small seeded scenarios, and a checker of every scheduling invariant."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from inferry.domain.jobs import InferenceJob, ResumeMode
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry
from inferry.domain.plans import BatchPlan, Tick
from inferry.domain.streams import Done, End
from inferry.domain.workers import Capacity, Phase, WorkerView
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from support.builders import a_job, a_policy, a_view
from support.fault_simulation import FaultSimulation, SimulationObserver
from support.faults import sample_faults

SECONDS = 0.6


class FaultScenario:
    """What a seed stands for."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"{seed}/world")
        self.pads = rng.random() < 0.2
        window = rng.choice(["off", "adaptive", "fixed"])
        share = rng.choice([0.0, 0.1, 0.3])
        self.lanes: dict[Lane, LanePolicy] = {
            lane: a_policy(
                window=window,  # type: ignore[arg-type]
                coalesce_ms=rng.choice([0, 5, 20]),
                max_wait_ms=rng.choice([3, 50, 60_000]),
                max_batch=rng.choice([2, 8, 64]),
                queue_limit=rng.choice([8, 1_000, 1_000]),
                share=0.0 if lane is Lane.P0 else share,
                reserve=0.0 if lane is Lane.P0 else rng.choice([0.0, 0.05, 0.25]),
            )
            for lane in Lane
        }
        self.views = [
            a_view(
                str(number),
                models=("m",) if number or rng.random() < 0.8 else ("m", "n"),
                pads=self.pads,
                sequences=rng.choice([None, 1, 2, 6]),
                kv_tokens=rng.choice([None, 800, 4_000]),
                prefill_tokens=rng.choice([None, 500, 3_000]),
                isolation="acme" if number == 2 else None,
            )
            for number in range(rng.randint(1, 3))
        ]
        count = rng.randint(4, 24)
        self.jobs = [self._job(rng, seed, number) for number in range(count)]
        self.jobs.sort(key=lambda pair: pair[0].arrived_at)
        self.faults = sample_faults(seed, workers=len(self.views), jobs=count, seconds=SECONDS)

    def _job(self, rng: random.Random, seed: int, number: int) -> tuple[InferenceJob, int]:
        at = rng.uniform(0, SECONDS / 2)
        target_tokens = rng.randint(1, 6)
        isolated = len(self.views) == 3 and rng.random() < 0.2
        job = a_job(
            f"{seed}-{number}",
            tokens=rng.choice([1, 40, 100, 600, 2_500]),
            output=target_tokens,
            tenant="acme" if isolated else rng.choice("abc"),
            run_id=f"run-{rng.randint(0, 3)}",
            lane=rng.choice(list(Lane)),
            isolation="acme" if isolated else None,
            group=rng.choice([None, "other"]) if self.pads else None,
            at=at,
            stream=True,
            resume=ResumeMode.CONTINUE if number % 5 else ResumeMode.RESTART,
            max_wait_s=rng.choice([60.0, 60.0, 0.002]),
            deadline=at + rng.uniform(0.0, 0.4) if rng.random() < 0.15 else None,
        )
        return job, target_tokens


def _serves(view: WorkerView, job: InferenceJob) -> bool:
    return job.route.model in view.models and job.route.isolation == view.isolation


class InvariantChecker(SimulationObserver):
    """Keeps its own books, and objects where the scheduler's decisions do not agree with them."""

    def __init__(self, scenario: FaultScenario) -> None:
        self.scenario = scenario
        self.fault_sim: FaultSimulation | None = None
        self.views: dict[str, WorkerView] = {}
        self.state: dict[str, str] = {}
        self.worker_of: dict[str, str] = {}
        self.jobs: dict[str, InferenceJob] = {}
        self.prefilling: set[str] = set()
        self.overtaken: dict[tuple[Lane, Any], list[int]] = {}
        self.outcomes: dict[str, End] = {}
        self.log: list[Any] = []
        self.delivered = 0

    def began(self, fault_sim: FaultSimulation) -> None:
        self.fault_sim = fault_sim

    # 1: one state at a time, one end.

    def offered(self, job: InferenceJob, now: float) -> None:
        assert self.state.get(job.job_id) in (None, "lost"), "offered while it is somewhere"
        assert job.job_id not in self.outcomes
        self.state[job.job_id] = "queued"
        self.jobs[job.job_id] = job
        self.log.append(("offer", now, job.job_id, job.attempt))

    def planned(self, plan: BatchPlan, now: float) -> None:
        assert plan.jobs
        view = self.views[plan.worker]
        assert view.phase is Phase.READY
        assert not view.pads or len({job.batch_key for job in plan.jobs}) == 1
        self.log.append(("plan", now, plan.worker, [job.job_id for job in plan.jobs], plan.reason.value))
        for job in plan.jobs:
            assert self.state[job.job_id] == "queued"
            assert job.route.isolation == view.isolation
            self._fits(job, view)
            self.state[job.job_id] = "planned"
            self.worker_of[job.job_id] = plan.worker
            self.prefilling.add(job.job_id)

    def first_token(self, job: InferenceJob, now: float) -> None:
        assert self.state[job.job_id] == "planned"
        self.prefilling.discard(job.job_id)
        self.log.append(("first", now, job.job_id))

    def ended(self, entry: LedgerEntry, job: InferenceJob, now: float) -> None:
        if self.state.get(job.job_id) == "queued":
            # It may have been the first of its queue.
            self.overtaken.pop((job.lane, job.route), None)
        self.state[job.job_id] = "lost"
        self.worker_of.pop(job.job_id, None)
        self.prefilling.discard(job.job_id)
        self.log.append(("end", now, job.job_id, entry.outcome.value, entry.error_code, entry.output_tokens))

    def closed(self, job: InferenceJob, end: End, tokens: Sequence[int], now: float) -> None:
        assert job.job_id not in self.outcomes, "ended twice"
        self.outcomes[job.job_id] = end
        # 7: contiguous, nothing lost or repeated over all attempts.
        assert list(tokens) == list(range(len(tokens)))
        target_tokens = next(target_tokens for one, target_tokens in self.scenario.jobs if one.job_id == job.job_id)
        if isinstance(end, Done):
            assert len(tokens) == target_tokens
        self.delivered += len(tokens)

    def view_changed(self, view: WorkerView, now: float) -> None:
        self.views[view.worker] = view

    # 2: room.

    def _use(self, worker: str, lane: Lane) -> tuple[int, int, int]:
        """Sequences and KV, and the prompt tokens that a job of the lane meets: those of its own and better lanes."""
        own_jobs = [self.jobs[job_id] for job_id, worker_of in self.worker_of.items() if worker_of == worker]
        return (
            len(own_jobs),
            sum(job.footprint.peak_kv_tokens for job in own_jobs),
            sum(job.footprint.prefill_tokens for job in own_jobs if job.job_id in self.prefilling and job.lane <= lane),
        )

    def _fits(self, job: InferenceJob, view: WorkerView) -> None:
        sequences, kv, prefill = self._use(view.worker, job.lane)
        capacity: Capacity = view.capacity
        assert capacity.sequences is None or sequences < capacity.sequences
        if capacity.kv_tokens is not None:
            assert not kv or kv + job.footprint.peak_kv_tokens <= capacity.kv_tokens
        if capacity.prefill_tokens is not None:
            assert not prefill or prefill + job.footprint.prefill_tokens <= capacity.prefill_tokens

    # 5: between two departures of a lane's queue, turns of lower lanes come to a quantum, or to one job that is larger.
    # That is said of the queue and not of its eldest job: tenants take turns, so others of its lane may go before it,
    # and lower lanes may then take a turn again.

    def _check_share_quantum(self, tick: Tick) -> None:
        if any(policy.window != "off" for policy in self.scenario.lanes.values()):
            return
        sent = [job for plan in tick.plans for job in plan.jobs]
        waiting = {(job.lane, job.route) for job_id, job in self.jobs.items() if self.state[job_id] == "queued"}
        for lane, route in waiting:
            overtaken_tokens = self.overtaken.setdefault((lane, route), [])
            overtaken_tokens += [job.footprint.prefill_tokens for job in sent if job.route == route and job.lane > lane]
            departed = sum((job.lane, job.route) == (lane, route) for job in sent)
            # In which order they went within one tick is not told.
            if not departed:
                assert sum(overtaken_tokens) <= QUANTUM_TOKENS or len(overtaken_tokens) == 1, (
                    f"{lane.name} was overtaken by {overtaken_tokens}"
                )
            else:
                assert sum(overtaken_tokens) <= (departed + 1) * max(QUANTUM_TOKENS, *overtaken_tokens, 0)
                overtaken_tokens.clear()
        self.overtaken = {key: overtaken_tokens for key, overtaken_tokens in self.overtaken.items() if key in waiting}

    # 3 and 6, after every tick.

    def ticked(self, tick: Tick, now: float) -> None:
        assert self.fault_sim is not None
        scheduler = self.fault_sim.scheduler
        assert tick.wake_at is None or tick.wake_at > now
        again = scheduler.tick(now)
        assert (again.plans, again.expired, again.evictions, again.wake_at) == ((), (), (), tick.wake_at)
        upcoming = self.fault_sim.events.next_at
        quiet_until = min(at for at in (tick.wake_at, upcoming, now + 1.0) if at is not None)
        if quiet_until > now:
            between = scheduler.tick((now + quiet_until) / 2)
            assert (between.plans, between.expired, between.evictions) == ((), (), ())
        queued = [self.jobs[job_id] for job_id, state in self.state.items() if state == "queued"]
        assert scheduler.queued == len(queued)
        assert scheduler.in_flight == len(self.worker_of)
        busy = set(self.worker_of.values())
        idle = [view for name, view in self.views.items() if name not in busy and view.phase is Phase.READY]
        for job in queued:
            policy = self.scenario.lanes[job.lane]
            hold_s = min(policy.coalesce_ms / 1000, policy.max_wait_ms / 1000, job.max_wait_s)
            if policy.window == "off" or now - job.arrived_at >= hold_s:
                assert not ({view.worker for view in idle} & self._usable_workers(job)), (
                    f"{job.job_id} is left queued before an idle worker"
                )
        self._check_work_conservation(queued)
        self._check_share_quantum(tick)

    def _check_work_conservation(self, queued: list[InferenceJob]) -> None:
        """Whoever is first of the highest lane has no room, where nobody is held, pads or is owed a turn."""
        policies = self.scenario.lanes.values()
        if not queued or self.scenario.pads or any(policy.window != "off" or policy.share for policy in policies):
            return
        top = min(job.lane for job in queued)
        fill = 1 - self.scenario.lanes[top].reserve
        for view in self.views.values():
            if view.phase is Phase.READY:
                candidates = [job for job in queued if job.lane is top and view.worker in self._usable_workers(job)]
                # Which of them is first is fairness's business, so all of them must fit before this objects.
                assert not candidates or not all(self._has_capacity(job, view, fill) for job in candidates), (
                    "left queued beside room"
                )

    def _usable_workers(self, job: InferenceJob) -> set[str]:
        """The workers that may take the job: of those that are up, not those that lost it, where there are others."""
        up = {view.worker for view in self.views.values() if view.phase is Phase.READY and _serves(view, job)}
        return (up - set(job.route.avoid)) or up

    def _has_capacity(self, job: InferenceJob, view: WorkerView, fill: float) -> bool:
        sequences, kv, prefill = self._use(view.worker, job.lane)
        capacity, footprint = view.capacity, job.footprint
        return (
            (capacity.sequences is None or sequences < capacity.sequences * fill)
            and (capacity.kv_tokens is None or not kv or kv + footprint.peak_kv_tokens <= capacity.kv_tokens * fill)
            and (
                capacity.prefill_tokens is None
                or not prefill
                or prefill + footprint.prefill_tokens <= capacity.prefill_tokens * fill
            )
        )


def play(seed: int) -> InvariantChecker:
    """One world from its beginning to its end, with every law held against it."""
    scenario = FaultScenario(seed)
    checker = InvariantChecker(scenario)
    fault_sim = FaultSimulation(scenario.lanes, scenario.views, scenario.jobs, scenario.faults, observer=checker)
    fault_sim.run()
    assert fault_sim.open_jobs == 0, "a job never ended"
    assert set(checker.outcomes) == {job.job_id for job, _ in scenario.jobs}
    assert (fault_sim.scheduler.queued, fault_sim.scheduler.in_flight) == (0, 0)
    for view in scenario.views:
        use = fault_sim.scheduler.use(view.worker)
        assert (use.sequences, use.kv_tokens, use.prefill_tokens) == (0, 0, 0)
    # 9: the ledger's totals are the sum of what was delivered, and no attempt is entered twice.
    assert sum(entry.output_tokens for entry in fault_sim.entries) == checker.delivered
    assert len({(entry.job_id, entry.attempt) for entry in fault_sim.entries}) == len(fault_sim.entries)
    return checker


def trace(seed: int) -> bytes:
    return msgspec.json.encode(play(seed).log)
