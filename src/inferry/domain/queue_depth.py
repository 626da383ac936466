"""What waits in the gateway for a worker: the only owner of that fact, which limits, prediction, capacity and metrics
read.

It subscribes to the job events, before its readers do. Attempts that rest before a retry, or wait for a budget to be
written, count as queued.
"""

from collections.abc import Collection
from itertools import islice
from typing import Final

from inferry.domain.attempts import Attempt
from inferry.domain.lanes import Lane

_LANES: Final = len(Lane)  # counting the members of an enumeration is a call in Python


class QueueDepth:
    """Counts by lane, indexed by `Lane`.

    `jobs` are those of the lane; `at_or_above` adds all higher lanes. `above` has what higher lanes hold: jobs, prompt
    tokens to compute and expected output tokens. `by_tenant` are the lane's jobs of each tenant that has any.
    `body_bytes` is the size of all queued request bodies.
    """

    __slots__ = ("_waiting", "above", "at_or_above", "body_bytes", "by_tenant", "jobs")

    def __init__(self) -> None:
        self.jobs = [0] * _LANES
        self.at_or_above = [0] * _LANES
        self.above = [[0, 0, 0] for _ in Lane]
        self.by_tenant: list[dict[str, int]] = [{} for _ in Lane]
        self.body_bytes = 0
        # By lane and model, the longest wait first.
        self._waiting: dict[tuple[Lane, str], dict[Attempt, None]] = {}

    # -- events ------------------------------------------------------------------------------------------------------

    def queued(self, attempt: Attempt, now: float) -> None:
        job = attempt.job
        self.add(job.lane, job.footprint.prefill_tokens, job.footprint.output.expected)
        self.body_bytes += len(job.payload.body)
        tenants = self.by_tenant[job.lane]
        tenants[job.tenant] = tenants.get(job.tenant, 0) + 1
        key = job.lane, job.route.model
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = {}
        waiting[attempt] = None

    def sent(self, attempt: Attempt, now: float) -> None:
        self._left(attempt)

    def ended(self, attempt: Attempt, now: float) -> None:
        if attempt.sent_at is None:
            self._left(attempt)

    def _left(self, attempt: Attempt) -> None:
        job = attempt.job
        self.remove(job.lane, job.footprint.prefill_tokens, job.footprint.output.expected)
        self.body_bytes -= len(job.payload.body)
        tenants = self.by_tenant[job.lane]
        if tenants[job.tenant] == 1:
            del tenants[job.tenant]
        else:
            tenants[job.tenant] -= 1
        del self._waiting[job.lane, job.route.model][attempt]

    def add(self, lane: Lane, prompt_tokens: int, output_tokens: int) -> None:
        """One more job waits in the lane."""
        self.jobs[lane] += 1
        for lower in range(lane, _LANES):
            self.at_or_above[lower] += 1
        for above in self.above[lane + 1 :]:
            above[0] += 1
            above[1] += prompt_tokens
            above[2] += output_tokens

    def remove(self, lane: Lane, prompt_tokens: int, output_tokens: int) -> None:
        self.jobs[lane] -= 1
        for lower in range(lane, _LANES):
            self.at_or_above[lower] -= 1
        for above in self.above[lane + 1 :]:
            above[0] -= 1
            above[1] -= prompt_tokens
            above[2] -= output_tokens

    # -- readers -----------------------------------------------------------------------------------------------------

    def by_lane(self) -> dict[Lane, int]:
        return {lane: self.jobs[lane] for lane in Lane}

    def of(self, lane: Lane, model: str) -> int:
        """Jobs of the lane that wait for a worker of the model."""
        return len(self._waiting.get((lane, model), ()))

    def by_lane_and_model(self) -> dict[tuple[Lane, str], int]:
        return {key: len(waiting) for key, waiting in self._waiting.items()}

    def waiting(self, model: str) -> list[Attempt]:
        """The attempts of a model that are at no worker."""
        return [attempt for lane in Lane for attempt in self._waiting.get((lane, model), ())]

    def work_by_route(self, max_jobs: int) -> list[tuple[Lane, str, int, int, int]]:
        """Queued jobs, prompt tokens to compute and expected output tokens by lane and model.

        Tokens are added up over `max_jobs` of a lane and model, and scaled to all of them.
        """
        found: list[tuple[Lane, str, int, int, int]] = []
        for (lane, model), waiting in self._waiting.items():
            jobs = len(waiting)
            if jobs:
                footprints = [attempt.job.footprint for attempt in islice(waiting, max_jobs)]
                scale = jobs / len(footprints)
                prompt_tokens = sum(footprint.prefill_tokens for footprint in footprints)
                output_tokens = sum(footprint.output.expected for footprint in footprints)
                found.append((lane, model, jobs, int(prompt_tokens * scale), int(output_tokens * scale)))
        return found

    def oldest_slo_start_at(self, lane: Lane, models: Collection[str]) -> float | None:
        """When the SLO of the lane's job that has waited longest for one of the models began to run."""
        oldest = [next(iter(waiting), None) for model in models if (waiting := self._waiting.get((lane, model)))]
        return min((first.slo_start_at for first in oldest if first is not None), default=None)
