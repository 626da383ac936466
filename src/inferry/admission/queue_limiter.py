"""Queue limits: whether one more job may join a queue, and if not, when a refused client should retry.

A lane takes new jobs up to a fraction of its limit (`high_watermark`); the rest is for retries. All lanes together hold
a bounded number of body bytes. A refused client gets a retry slot: the time at which the queue, at the measured drain
rate, has had space for all clients refused before it. A retry is recognised by tenant, prompt and token budget, and
precedes new jobs: stock clients retry twice and then give up, so an unplanned "retry later" would lose most of them.

A burst of live work makes the drain rate of batch jobs look near zero. The first refusal assumes that the burst is
short and uses the lane's best-case rate; a retry that is refused again is told the present rate.

Retry slots alternate between tenants: a tenant with a thousand refused calls does not delay another tenant's first.

Retry slots are best-effort: capacity is never held idle for an absent client. A new job is admitted when there is space
for it and for the retries that are due while the queue empties.

The limiter reads `QueueDepth`. It owns the retry slots and the byte count of bodies that are still being read.
"""

from collections.abc import Mapping
from heapq import heappop, heappush
from math import ceil
from typing import Final, TypeVar

from inferry.domain.errors import QueueFull
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.queue_depth import QueueDepth

MIN_RETRY_AFTER_S: Final = 0.1
DEFAULT_SPACING_S, DEFAULT_MIN_RETRY_AFTER_S = 0.1, 1.0
"""Distance of retry slots, and delay of the first, while no drain rate has been measured."""
MAX_RETRY_AFTER_S: Final = 115.0
"""OpenAI's clients do not retry at all when told to wait for more than two minutes."""
NO_SLOT_RETRY_AFTER_S: Final = 90.0
"""Retry time of clients whose slot would be later than the maximum. They get no slot; retries are spread at random."""
EARLY_TOLERANCE_S: Final = 0.25
"""A retry this early is on time: clocks and timers differ."""
LATE_TOLERANCE_S: Final = 5.0
"""A retry later than this has lost its slot."""
MAX_RETRY_SLOTS: Final = 50_000

_ClientKey = tuple[str, str, int]
_Key = TypeVar("_Key", str, int)


class RetrySlots:
    """The retry slots of one lane, by client. Times are the owner's."""

    def __init__(self) -> None:
        self._slots_by_client: dict[_ClientKey, list[float]] = {}
        self._expiry_heap: list[tuple[float, _ClientKey]] = []
        self._due_by_second: dict[int, int] = {}
        self._slots_by_tenant: dict[str, int] = {}
        self._last_slot_at: dict[str, float] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, client: _ClientKey) -> bool:
        return client in self._slots_by_client

    def reserve(self, client: _ClientKey, at: float) -> None:
        if self._count < MAX_RETRY_SLOTS:
            heappush(self._slots_by_client.setdefault(client, []), at)
            heappush(self._expiry_heap, (at, client))
            self._due_by_second[int(at)] = self._due_by_second.get(int(at), 0) + 1
            self._slots_by_tenant[client[0]] = self._slots_by_tenant.get(client[0], 0) + 1
            self._last_slot_at[client[0]] = at
            self._count += 1

    def next_slot_in_s(self, tenant: str, ahead: int, seconds_per_job: float, now: float) -> float:
        """How long until the tenant's next slot, with `ahead` jobs before it that have none.

        Never at the time of the slot reserved last: of several retries that are due and find no space, each is told
        later than the one before.
        """
        retry_in_s = (ahead + self.slots_before(tenant)) * seconds_per_job
        after_last_s = self._last_slot_at.get(tenant, now) + seconds_per_job * len(self._slots_by_tenant) - now
        return min(max(retry_in_s, after_last_s), 2 * retry_in_s)

    def slots_before(self, tenant: str) -> int:
        """Slots before the tenant's next: its own, and as many of each other tenant."""
        own_slots = self._slots_by_tenant.get(tenant, 0)
        return min(self._count, own_slots * len(self._slots_by_tenant))

    def is_due(self, client: _ClientKey, deadline: float) -> bool:
        """Whether the client has a slot at or before `deadline`."""
        slots = self._slots_by_client.get(client)
        return slots is not None and slots[0] <= deadline

    def consume(self, client: _ClientKey) -> None:
        """The client has used its first slot."""
        slots = self._slots_by_client[client]
        second = int(heappop(slots))
        if not slots:
            del self._slots_by_client[client]
        self._count -= 1
        _decrement(self._due_by_second, second)
        _decrement(self._slots_by_tenant, client[0])
        if client[0] not in self._slots_by_tenant:
            del self._last_slot_at[client[0]]

    def count_due_by(self, until: float) -> int:
        """The number of retries due at or before `until`, to the second."""
        last = int(until)
        return sum([count for second, count in self._due_by_second.items() if second <= last])

    def expire_before(self, time: float) -> None:
        """Drop slots whose clients did not retry in time."""
        expiry_heap = self._expiry_heap
        while expiry_heap and expiry_heap[0][0] < time:
            _, client = heappop(expiry_heap)
            if self.is_due(client, time):  # else it was used
                self.consume(client)


class QueueLimiter:
    """Decides which jobs may join a queue. Without `keeps_retry_slots`, a retry is treated as a new job."""

    def __init__(
        self,
        lanes: Mapping[Lane, LanePolicy],
        depth: QueueDepth,
        *,
        max_queued_bytes: int | None = None,
        keeps_retry_slots: bool = True,
    ) -> None:
        self._depth = depth
        self._reserved_bytes = 0
        self._max_queued_bytes = max_queued_bytes
        self._keeps_retry_slots = keeps_retry_slots
        self._retry_slots = [RetrySlots() for _ in Lane]
        self.use_lanes(lanes)

    def use_lanes(self, lanes: Mapping[Lane, LanePolicy]) -> None:
        """Follow other queue limits. Jobs beyond a lower limit stay queued."""
        self._queue_limits = {lane: policy.queue_limit for lane, policy in lanes.items()}
        self._newcomer_limits = {
            lane: max(1, ceil(policy.queue_limit * policy.high_watermark - 1e-9)) for lane, policy in lanes.items()
        }

    @property
    def queued_bytes(self) -> int:
        """Bytes of all bodies that are held: those of queued jobs and those still being read."""
        return self._depth.body_bytes + self._reserved_bytes

    def pending_retries(self) -> dict[Lane, int]:
        """Retry slots of each lane that are still open."""
        return {lane: len(self._retry_slots[lane]) for lane in Lane}

    def reserve_bytes(self, size: int) -> None:
        """Count a body that is not a job yet. Raises QueueFull."""
        if not self._has_bytes_for(size):
            raise self._bytes_exceeded()
        self._reserved_bytes += size

    def release_bytes(self, size: int) -> None:
        self._reserved_bytes -= size

    def depth_and_limit(self, lane: Lane) -> tuple[int, int]:
        """Queued jobs of a lane, and how many it takes before only retries are admitted."""
        return self._depth.jobs[lane], self._newcomer_limits[lane]

    def has_space(self, job: InferenceJob) -> bool:
        """Whether the job may be queued without a call of `refusal`: the common case, decided by three counters."""
        lane = job.lane
        return (
            self._depth.jobs[lane] < self._newcomer_limits[lane]
            and not self._retry_slots[lane]
            and (self._max_queued_bytes is None or self._has_bytes_for(len(job.payload.body)))
        )

    def refusal(
        self, job: InferenceJob, seconds_per_job: float, best_case_s_per_job: float, now: float
    ) -> QueueFull | None:
        """The refusal with its retry time; None if the job may be queued.

        `seconds_per_job` is the measured interval between two jobs of the lane that leave the queue.
        `best_case_s_per_job` is the same without arrivals in higher lanes. Both are 0 before the first measurement.
        """
        lane = job.lane
        depth = self._depth.jobs[lane]
        if not self._has_bytes_for(len(job.payload.body)):
            return self._with_retry_after(self._bytes_exceeded(), job, seconds_per_job, best_case_s_per_job, now)
        slots, client = self._retry_slots[lane], _client_key(job)
        slots.expire_before(now - LATE_TOLERANCE_S)
        if depth < self._depth_limit(job, client, seconds_per_job, now):
            if client in slots:
                slots.consume(client)
            return None
        full = QueueFull(
            f"queue full: lane {lane.name} has {depth} jobs, and new ones are refused from "
            f"{self._newcomer_limits[lane]} on (high_watermark of queue_limit {self._queue_limits[lane]})"
        )
        return self._with_retry_after(full, job, seconds_per_job, best_case_s_per_job, now)

    def _depth_limit(self, job: InferenceJob, client: _ClientKey, seconds_per_job: float, now: float) -> int:
        """The job may join while the lane holds fewer jobs than this."""
        lane, newcomer_limit = job.lane, self._newcomer_limits[job.lane]
        slots, queued = self._retry_slots[lane], self._depth.by_tenant[lane]
        if slots.is_due(client, now + EARLY_TOLERANCE_S):
            return self._queue_limits[lane]
        # The rest is also for tenants below their share of the queue: a tenant that floods it excludes no other.
        tenants = len(queued) + (job.tenant not in queued)
        if tenants > 1 and queued.get(job.tenant, 0) < newcomer_limit // tenants:
            return self._queue_limits[lane]
        # Retries that are due while the queue empties come first, but no space is held idle for them.
        depth = self._depth.jobs[lane]
        return newcomer_limit - min(depth, slots.count_due_by(now + depth * seconds_per_job))

    def _with_retry_after(
        self, refusal: QueueFull, job: InferenceJob, seconds_per_job: float, best_case_s_per_job: float, now: float
    ) -> QueueFull:
        """The refusal with the job's retry time.

        A retry before its slot gets a further, later slot, since it may be another call with the same prompt.
        """
        if not self._keeps_retry_slots:
            return refusal
        min_retry_after_s = MIN_RETRY_AFTER_S
        if seconds_per_job <= 0:
            seconds_per_job, best_case_s_per_job, min_retry_after_s = (
                DEFAULT_SPACING_S,
                DEFAULT_SPACING_S,
                DEFAULT_MIN_RETRY_AFTER_S,
            )
        lane = job.lane
        slots, client = self._retry_slots[lane], _client_key(job)
        if slots.is_due(client, now + EARLY_TOLERANCE_S):
            slots.consume(client)
        else:
            seconds_per_job = best_case_s_per_job
        excess = max(0, self._depth.jobs[lane] - self._newcomer_limits[lane]) + 1
        retry_in_s = max(min_retry_after_s, slots.next_slot_in_s(job.tenant, excess, seconds_per_job, now))
        if retry_in_s <= MAX_RETRY_AFTER_S:
            slots.reserve(client, now + retry_in_s)
            refusal.has_own_retry_time = True
        else:
            retry_in_s = NO_SLOT_RETRY_AFTER_S
        refusal.retry_after_s = retry_in_s
        return refusal

    def _has_bytes_for(self, size: int) -> bool:
        """Whether the body fits. An empty queue takes a body of any size."""
        limit = self._max_queued_bytes
        return limit is None or not self.queued_bytes or self.queued_bytes + size <= limit

    def _bytes_exceeded(self) -> QueueFull:
        return QueueFull(f"queued request bodies hold {self.queued_bytes} bytes; the limit is {self._max_queued_bytes}")


def _decrement(counts: dict[_Key, int], key: _Key) -> None:
    remaining = counts[key] - 1
    if remaining:
        counts[key] = remaining
    else:
        del counts[key]


def _client_key(job: InferenceJob) -> _ClientKey:
    return (job.tenant, job.prompt_hash, job.token_budget)
