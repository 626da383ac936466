"""The door of the queues: is there a place for one more job, and if not, when will there be one for this one?

A lane takes newcomers up to a part of its limit; the rest is for jobs that come back. All lanes together hold so many
bytes of prompts. Who is refused gets a turn of its own: the time at which the queue will have had room for everybody
who was refused before, at the rate at which it drains. Whoever comes back then is known by its tenant, prompt and
budget, and goes before those who come for the first time: stock clients try twice more and then give up, so "come back
in a while and see" would lose most of them.

A burst of live work makes batch jobs look as if they could hardly ever go. The first time somebody is refused it is
taken to be short, and what the lane could do without it sets the turn; who comes back and finds no room then is told
what the present rate says.

Among tenants turns go round: one with a thousand calls outside does not send another's first to the end.

Turns are kept, not promised: nobody waits for who does not come. A newcomer is let in when there is room for it and for
those who are due while the queue empties.

One door serves one loop. It is told of every job that joins a queue (`joined`) or leaves one (`left`).
"""

from collections.abc import Mapping
from heapq import heappop, heappush
from math import ceil
from typing import TypeVar

from inferry.domain.errors import QueueFull
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy

MIN_RETRY_AFTER_S = 0.1
DEFAULT_SPACING_S, DEFAULT_MIN_RETRY_AFTER_S = 0.1, 1.0
"""How far turns are apart, and when the first is, while nobody knows how fast the queue drains."""
MAX_RETRY_AFTER_S = 115.0
"""OpenAI's clients do not come back at all when told to wait for more than two minutes."""
NO_SLOT_RETRY_AFTER_S = 90.0
"""What those are told whose turn would be later still. They have none, and are spread out by chance from there on."""
EARLY_TOLERANCE_S = 0.25
"""Who is early by this is on time: clocks and timers differ."""
LATE_TOLERANCE_S = 5.0
"""Who is late by more than this has lost its turn."""
MAX_RETRY_SLOTS = 50_000

_ClientKey = tuple[str, str, int]
_Key = TypeVar("_Key", str, int)


class RetrySlots:
    """Who was told to come back to one lane, and when. Times are the owner's."""

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
        """How long until the next turn of the tenant, with so many ahead of it who have none.

        Not at the moment of the one booked last: of several that are due and find no room each is told later than the
        one before, though as many have turns as before.
        """
        retry_in_s = (ahead + self.slots_before(tenant)) * seconds_per_job
        after_last_s = self._last_slot_at.get(tenant, now) + seconds_per_job * len(self._slots_by_tenant) - now
        return min(max(retry_in_s, after_last_s), 2 * retry_in_s)

    def slots_before(self, tenant: str) -> int:
        """How many go before the next of the tenant: its own, and as many of each other tenant."""
        own_slots = self._slots_by_tenant.get(tenant, 0)
        return min(self._count, own_slots * len(self._slots_by_tenant))

    def is_due(self, client: _ClientKey, deadline: float) -> bool:
        """Whether who has a turn by then."""
        slots = self._slots_by_client.get(client)
        return slots is not None and slots[0] <= deadline

    def consume(self, client: _ClientKey) -> None:
        """Who has come for its first turn."""
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
        """How many are to come by then, to the second."""
        last = int(until)
        return sum([count for second, count in self._due_by_second.items() if second <= last])

    def expire_before(self, slots_before: float) -> None:
        """Those whose time was before have not come."""
        expiry_heap = self._expiry_heap
        while expiry_heap and expiry_heap[0][0] < slots_before:
            _, client = heappop(expiry_heap)
            if self.is_due(client, slots_before):  # else it has come
                self.consume(client)


class QueueLimiter:
    """Who may join a queue. `keeps_retry_slots` may be switched off: then whoever comes finds what is there."""

    def __init__(
        self, lanes: Mapping[Lane, LanePolicy], *, max_queued_bytes: int | None = None, keeps_retry_slots: bool = True
    ) -> None:
        self.queued_bytes = 0
        self._max_queued_bytes = max_queued_bytes
        self._keeps_retry_slots = keeps_retry_slots
        self._queue_limits = {lane: policy.queue_limit for lane, policy in lanes.items()}
        self._newcomer_limits = {
            lane: max(1, ceil(policy.queue_limit * policy.high_watermark - 1e-9)) for lane, policy in lanes.items()
        }
        self._depths = [0] * len(Lane)
        self._queued_by_tenant: list[dict[str, int]] = [{} for _ in Lane]
        self._retry_slots = [RetrySlots() for _ in Lane]

    def pending_retries(self) -> dict[Lane, int]:
        """How many of each lane were told to come back and have not come yet."""
        return {lane: len(self._retry_slots[lane]) for lane in Lane}

    def joined(self, job: InferenceJob) -> None:
        self._depths[job.lane] += 1
        self.queued_bytes += len(job.payload.body)
        queued = self._queued_by_tenant[job.lane]
        queued[job.tenant] = queued.get(job.tenant, 0) + 1

    def left(self, job: InferenceJob) -> None:
        self._depths[job.lane] -= 1
        self.queued_bytes -= len(job.payload.body)
        _decrement(self._queued_by_tenant[job.lane], job.tenant)

    def reserve_bytes(self, size: int) -> None:
        """A body that is to be looked at before it is a job takes memory too. Raises QueueFull."""
        if not self._has_bytes_for(size):
            raise self._bytes_exceeded()
        self.queued_bytes += size

    def release_bytes(self, size: int) -> None:
        self.queued_bytes -= size

    def has_space(self, job: InferenceJob) -> bool:
        """Whether the job may be queued without another question. Nearly always; then `refusal` need not be asked."""
        lane = job.lane
        return (
            self._depths[lane] < self._newcomer_limits[lane]
            and not self._retry_slots[lane]
            and (self._max_queued_bytes is None or self._has_bytes_for(len(job.payload.body)))
        )

    def refusal(
        self, job: InferenceJob, seconds_per_job: float, best_case_s_per_job: float, now: float
    ) -> QueueFull | None:
        """Why the job may not be queued now, and when to come back; None: it may.

        `seconds_per_job` is how long one job of its lane takes to leave the queue, `best_case_s_per_job` how long it
        would if nobody came for better lanes; 0 where nothing is known of that.
        """
        lane = job.lane
        depth = self._depths[lane]
        if not self._has_bytes_for(len(job.payload.body)):
            return self._with_retry_after(self._bytes_exceeded(), job, seconds_per_job, best_case_s_per_job, now)
        slots, client = self._retry_slots[lane], _client_key(job)
        slots.expire_before(now - LATE_TOLERANCE_S)
        if depth < self._depth_limit(job, client, seconds_per_job, now):
            if client in slots:
                slots.consume(client)
            return None
        full = QueueFull(f"lane {lane.name} has {depth} jobs queued: queue full")
        return self._with_retry_after(full, job, seconds_per_job, best_case_s_per_job, now)

    def _depth_limit(self, job: InferenceJob, client: _ClientKey, seconds_per_job: float, now: float) -> int:
        """Up to how many jobs the lane may hold for this one to join."""
        lane, newcomer_limit = job.lane, self._newcomer_limits[job.lane]
        slots, queued = self._retry_slots[lane], self._queued_by_tenant[lane]
        if slots.is_due(client, now + EARLY_TOLERANCE_S):
            return self._queue_limits[lane]
        # The rest is also for tenants with less than their part of the queue: one that floods it shuts nobody else out.
        tenants = len(queued) + (job.tenant not in queued)
        if tenants > 1 and queued.get(job.tenant, 0) < newcomer_limit // tenants:
            return self._queue_limits[lane]
        # Those who are due while the queue empties come first, but nobody waits for them: they may not come.
        depth = self._depths[lane]
        return newcomer_limit - min(depth, slots.count_due_by(now + depth * seconds_per_job))

    def _with_retry_after(
        self, refusal: QueueFull, job: InferenceJob, seconds_per_job: float, best_case_s_per_job: float, now: float
    ) -> QueueFull:
        """Work out when the job should come back.

        One that comes before its time gets a later one: it may as well be another with the same words. The first stays.
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
        excess = max(0, self._depths[lane] - self._newcomer_limits[lane]) + 1
        retry_in_s = max(min_retry_after_s, slots.next_slot_in_s(job.tenant, excess, seconds_per_job, now))
        if retry_in_s <= MAX_RETRY_AFTER_S:
            slots.reserve(client, now + retry_in_s)
            refusal.has_own_retry_time = True
        else:
            retry_in_s = NO_SLOT_RETRY_AFTER_S
        refusal.retry_after_s = retry_in_s
        return refusal

    def _has_bytes_for(self, size: int) -> bool:
        """One is always taken, however large."""
        limit = self._max_queued_bytes
        return limit is None or not self.queued_bytes or self.queued_bytes + size <= limit

    def _bytes_exceeded(self) -> QueueFull:
        return QueueFull(
            f"queued prompts take {self.queued_bytes} bytes, and no more than {self._max_queued_bytes} may"
        )


def _decrement(counts: dict[_Key, int], key: _Key) -> None:
    remaining = counts[key] - 1
    if remaining:
        counts[key] = remaining
    else:
        del counts[key]


def _client_key(job: InferenceJob) -> _ClientKey:
    return (job.tenant, job.prompt_hash, job.token_budget)
