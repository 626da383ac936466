"""Small seeded worlds, and a watcher that holds every law of scheduling against what happens in them."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from inferry.domain.jobs import InferenceJob, Resume
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry
from inferry.domain.plans import BatchPlan, Tick
from inferry.domain.streams import Done, End
from inferry.domain.workers import Phase, Room, WorkerView
from inferry.scheduling.quantum import QUANTUM_TOKENS
from inferry.sim.faults import draw_faults
from inferry.sim.trial import Trial, Watcher
from support.builders import a_job, a_policy, a_view

SECONDS = 0.6


class World:
    """What a seed stands for."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(f"{seed}/world")
        self.pads = draw.random() < 0.2
        window = draw.choice(["off", "adaptive", "fixed"])
        share = draw.choice([0.0, 0.1, 0.3])
        self.lanes: dict[Lane, LanePolicy] = {
            lane: a_policy(
                window=window,  # type: ignore[arg-type]
                coalesce_ms=draw.choice([0, 5, 20]),
                max_wait_ms=draw.choice([3, 50, 60_000]),
                max_batch=draw.choice([2, 8, 64]),
                queue_limit=draw.choice([8, 1_000, 1_000]),
                share=0.0 if lane is Lane.P0 else share,
                reserve=0.0 if lane is Lane.P0 else draw.choice([0.0, 0.05, 0.25]),
            )
            for lane in Lane
        }
        self.views = [
            a_view(
                str(number),
                models=("m",) if number or draw.random() < 0.8 else ("m", "n"),
                pads=self.pads,
                sequences=draw.choice([None, 1, 2, 6]),
                kv_tokens=draw.choice([None, 800, 4_000]),
                prefill_tokens=draw.choice([None, 500, 3_000]),
                isolation="acme" if number == 2 else None,
            )
            for number in range(draw.randint(1, 3))
        ]
        count = draw.randint(4, 24)
        self.jobs = [self._job(draw, seed, number) for number in range(count)]
        self.jobs.sort(key=lambda pair: pair[0].arrived_at)
        self.faults = draw_faults(seed, workers=len(self.views), jobs=count, seconds=SECONDS)

    def _job(self, draw: random.Random, seed: int, number: int) -> tuple[InferenceJob, int]:
        at = draw.uniform(0, SECONDS / 2)
        wanted = draw.randint(1, 6)
        isolated = len(self.views) == 3 and draw.random() < 0.2
        job = a_job(
            f"{seed}-{number}",
            tokens=draw.choice([1, 40, 100, 600, 2_500]),
            output=wanted,
            tenant="acme" if isolated else draw.choice("abc"),
            run_id=f"run-{draw.randint(0, 3)}",
            lane=draw.choice(list(Lane)),
            isolation="acme" if isolated else None,
            attention=draw.choice([None, "other"]) if self.pads else None,
            at=at,
            stream=True,
            resume=Resume.CONTINUE if number % 5 else Resume.RESTART,
            max_wait_s=draw.choice([60.0, 60.0, 0.002]),
            deadline=at + draw.uniform(0.0, 0.4) if draw.random() < 0.15 else None,
        )
        return job, wanted


def _serves(view: WorkerView, job: InferenceJob) -> bool:
    return job.route.model in view.models and job.route.isolation == view.isolation


class Laws(Watcher):
    """Keeps its own books, and objects where the scheduler's decisions do not agree with them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.trial: Trial | None = None
        self.views: dict[str, WorkerView] = {}
        self.state: dict[str, str] = {}
        self.where: dict[str, str] = {}
        self.jobs: dict[str, InferenceJob] = {}
        self.prefilling: set[str] = set()
        self.overtaken: dict[tuple[Lane, Any], list[int]] = {}
        self.outcomes: dict[str, End] = {}
        self.log: list[Any] = []
        self.delivered = 0

    def began(self, trial: Trial) -> None:
        self.trial = trial

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
            self.where[job.job_id] = plan.worker
            self.prefilling.add(job.job_id)

    def first(self, job: InferenceJob, now: float) -> None:
        assert self.state[job.job_id] == "planned"
        self.prefilling.discard(job.job_id)
        self.log.append(("first", now, job.job_id))

    def ended(self, entry: LedgerEntry, job: InferenceJob, now: float) -> None:
        if self.state.get(job.job_id) == "queued":
            # It may have been the first of its queue.
            self.overtaken.pop((job.lane, job.route), None)
        self.state[job.job_id] = "lost"
        self.where.pop(job.job_id, None)
        self.prefilling.discard(job.job_id)
        self.log.append(("end", now, job.job_id, entry.outcome.value, entry.error_code, entry.output_tokens))

    def closed(self, job: InferenceJob, end: End, tokens: Sequence[int], now: float) -> None:
        assert job.job_id not in self.outcomes, "ended twice"
        self.outcomes[job.job_id] = end
        # 7: contiguous, nothing lost or repeated over all attempts.
        assert list(tokens) == list(range(len(tokens)))
        wanted = next(wanted for one, wanted in self.world.jobs if one.job_id == job.job_id)
        if isinstance(end, Done):
            assert len(tokens) == wanted
        self.delivered += len(tokens)

    def believed(self, view: WorkerView, now: float) -> None:
        self.views[view.worker] = view

    # 2: room.

    def _use(self, worker: str, lane: Lane) -> tuple[int, int, int]:
        """Sequences and KV, and the prompt tokens that a job of the lane meets: those of its own and better lanes."""
        mine = [self.jobs[job_id] for job_id, where in self.where.items() if where == worker]
        return (
            len(mine),
            sum(job.footprint.peak_kv_tokens for job in mine),
            sum(job.footprint.prefill_tokens for job in mine if job.job_id in self.prefilling and job.lane <= lane),
        )

    def _fits(self, job: InferenceJob, view: WorkerView) -> None:
        sequences, kv, prefill = self._use(view.worker, job.lane)
        room: Room = view.room
        assert room.sequences is None or sequences < room.sequences
        if room.kv_tokens is not None:
            assert not kv or kv + job.footprint.peak_kv_tokens <= room.kv_tokens
        if room.prefill_tokens is not None:
            assert not prefill or prefill + job.footprint.prefill_tokens <= room.prefill_tokens

    # 5: between two departures of a lane's queue, turns of lower lanes come to a quantum, or to one job that is larger.
    # That is said of the queue and not of its eldest job: tenants take turns, so others of its lane may go before it,
    # and lower lanes may then take a turn again.

    def _turns_cost_a_quantum(self, tick: Tick) -> None:
        if any(policy.window != "off" for policy in self.world.lanes.values()):
            return
        sent = [job for plan in tick.plans for job in plan.jobs]
        waiting = {(job.lane, job.route) for job_id, job in self.jobs.items() if self.state[job_id] == "queued"}
        for lane, route in waiting:
            passed = self.overtaken.setdefault((lane, route), [])
            passed += [job.footprint.prefill_tokens for job in sent if job.route == route and job.lane > lane]
            departed = sum((job.lane, job.route) == (lane, route) for job in sent)
            # In which order they went within one tick is not told.
            if not departed:
                assert sum(passed) <= QUANTUM_TOKENS or len(passed) == 1, f"{lane.name} was overtaken by {passed}"
            else:
                assert sum(passed) <= (departed + 1) * max(QUANTUM_TOKENS, *passed, 0)
                passed.clear()
        self.overtaken = {key: passed for key, passed in self.overtaken.items() if key in waiting}

    # 3 and 6, after every tick.

    def ticked(self, tick: Tick, now: float) -> None:
        assert self.trial is not None
        scheduler = self.trial.scheduler
        assert tick.wake_at is None or tick.wake_at > now
        again = scheduler.tick(now)
        assert (again.plans, again.expired, again.evictions, again.wake_at) == ((), (), (), tick.wake_at)
        upcoming = self.trial.events.next_at
        quiet_until = min(at for at in (tick.wake_at, upcoming, now + 1.0) if at is not None)
        if quiet_until > now:
            between = scheduler.tick((now + quiet_until) / 2)
            assert (between.plans, between.expired, between.evictions) == ((), (), ())
        queued = [self.jobs[job_id] for job_id, state in self.state.items() if state == "queued"]
        assert scheduler.queued == len(queued)
        assert scheduler.in_flight == len(self.where)
        busy = set(self.where.values())
        idle = [view for name, view in self.views.items() if name not in busy and view.phase is Phase.READY]
        for job in queued:
            policy = self.world.lanes[job.lane]
            hold_s = min(policy.coalesce_ms / 1000, policy.max_wait_ms / 1000, job.max_wait_s)
            if policy.window == "off" or now - job.arrived_at >= hold_s:
                assert not ({view.worker for view in idle} & self._open_to(job)), (
                    f"{job.job_id} is left queued before an idle worker"
                )
        self._nobody_is_left_who_fits(queued)
        self._turns_cost_a_quantum(tick)

    def _nobody_is_left_who_fits(self, queued: list[InferenceJob]) -> None:
        """Whoever is first of the highest lane has no room, where nobody is held, pads or is owed a turn."""
        policies = self.world.lanes.values()
        if not queued or self.world.pads or any(policy.window != "off" or policy.share for policy in policies):
            return
        top = min(job.lane for job in queued)
        fill = 1 - self.world.lanes[top].reserve
        for view in self.views.values():
            if view.phase is Phase.READY:
                candidates = [job for job in queued if job.lane is top and view.worker in self._open_to(job)]
                # Which of them is first is fairness's business, so all of them must fit before this objects.
                assert not candidates or not all(self._has_room(job, view, fill) for job in candidates), (
                    "left queued beside room"
                )

    def _open_to(self, job: InferenceJob) -> set[str]:
        """The workers that may take the job: of those that are up, not those that lost it, where there are others."""
        up = {view.worker for view in self.views.values() if view.phase is Phase.READY and _serves(view, job)}
        return (up - set(job.route.avoid)) or up

    def _has_room(self, job: InferenceJob, view: WorkerView, fill: float) -> bool:
        sequences, kv, prefill = self._use(view.worker, job.lane)
        room, footprint = view.room, job.footprint
        return (
            (room.sequences is None or sequences < room.sequences * fill)
            and (room.kv_tokens is None or not kv or kv + footprint.peak_kv_tokens <= room.kv_tokens * fill)
            and (
                room.prefill_tokens is None
                or not prefill
                or prefill + footprint.prefill_tokens <= room.prefill_tokens * fill
            )
        )


def play(seed: int) -> Laws:
    """One world from its beginning to its end, with every law held against it."""
    world = World(seed)
    laws = Laws(world)
    trial = Trial(world.lanes, world.views, world.jobs, world.faults, watcher=laws)
    trial.run()
    assert trial.open_jobs == 0, "a job never ended"
    assert set(laws.outcomes) == {job.job_id for job, _ in world.jobs}
    assert (trial.scheduler.queued, trial.scheduler.in_flight) == (0, 0)
    for view in world.views:
        use = trial.scheduler.use(view.worker)
        assert (use.sequences, use.kv_tokens, use.prefill_tokens) == (0, 0, 0)
    # 9: the ledger's totals are the sum of what was delivered, and no attempt is entered twice.
    assert sum(entry.output_tokens for entry in trial.entries) == laws.delivered
    assert len({(entry.job_id, entry.attempt) for entry in trial.entries}) == len(trial.entries)
    return laws


def trace(seed: int) -> bytes:
    return msgspec.json.encode(play(seed).log)
