"""A worker as the scheduler sees it: what is in use there, and whether it accepts a job.

Capacity is counted in three currencies that are held until given back: sequences, KV tokens at their predicted peak,
and prompt tokens in prefill. The fourth, prompt tokens per second, is the prefill token bucket's.
"""

from collections.abc import Container
from math import inf
from typing import Final

from inferry.domain.lanes import Lane
from inferry.domain.plans import CapacityUse
from inferry.domain.routes import OutputLength
from inferry.domain.workers import DirectWaits, Load, WorkerView
from inferry.scheduling.batching.packing import Draft
from inferry.scheduling.capacity.kv_peak import KvPeakTracker
from inferry.scheduling.capacity.prefill_bucket import MAX_DEBT_S, MAX_PACED_DEBT_S, PrefillTokenBucket, TickContext
from inferry.scheduling.queues.queued_job import QueuedJob

ALMOST_FULL: Final = 0.999
"""The load of a worker that only prefill of lower lanes fills: it still accepts jobs of higher lanes."""


class WorkerSet:
    """What a worker tells the groups it is in.

    `stale` are the workers whose load changed. `kv_limit` is the largest KV limit of the set; None after a change.
    In walk `touched_in_walk` some of the workers are reserved. Walks count from 1.
    """

    __slots__ = ("kv_limit", "stale", "touched_in_walk")

    def __init__(self, workers: "list[WorkerState]") -> None:
        self.stale = workers
        self.kv_limit: float | None = None
        self.touched_in_walk = 0


class WorkerState:
    """The view of a worker, and everything in use there, including work from elsewhere (`foreign`).

    A worker whose limit is zero in some currency `has_no_capacity`. `load` is the result of `compute_load`; None after
    a change, of which `worker_sets` are told. `used_fraction` is the part in use of the currency that is used most. The
    state outlives its view while jobs are in flight, so that a worker that returns is not overfilled.

    `prefill_bucket` exists while the view names a rate. `best_decoding_lane` is the highest live lane that decodes
    here (`live_decoding` counts sequences by lane); the rate binds the lanes below it. In walk `closed_in_walk` the
    worker is reserved: lanes from `closed_from_lane` on may not use it. `preemption_candidates` are the running jobs of
    preemptible lanes, latest last; `borrowers` are those of lanes that borrow the worker. Jobs that are `evicting` stay
    counted until they have ended. `nominated` jobs wait for that and are counted as well. `pooled_sequences` are the
    jobs in flight that embed or score: together they are a pass.

    `kv_peaks` exists where the view asks for `timed` packing and names a KV limit. Then `kv_limit` is no limit: what
    fits is no sum, and only `fits_timed` knows it.
    """

    __slots__ = (
        "batch_limit",
        "best_decoding_lane",
        "borrowers",
        "closed_from_lane",
        "closed_in_walk",
        "direct",
        "drafts",
        "evicting",
        "evicting_kv_tokens",
        "group",
        "has_no_capacity",
        "kv_limit",
        "kv_peaks",
        "kv_tokens",
        "live_decoding",
        "live_sequences",
        "load",
        "name",
        "nominated",
        "output_length",
        "pads",
        "pooled_sequences",
        "precision",
        "preemption_candidates",
        "prefill_ahead",
        "prefill_bucket",
        "prefill_limit",
        "prefill_tokens",
        "refills",
        "sequence_limit",
        "sequences",
        "used_fraction",
        "view",
        "worker_sets",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefill_bucket: PrefillTokenBucket | None = None
        self.kv_peaks: KvPeakTracker | None = None
        self.live_decoding = [0] * len(Lane)
        self.best_decoding_lane: int | None = None
        self.live_sequences = 0
        self.pooled_sequences = 0
        self.preemption_candidates: dict[QueuedJob, None] = {}
        self.borrowers: dict[QueuedJob, None] = {}
        self.evicting: dict[QueuedJob, None] = {}
        self.evicting_kv_tokens = 0
        self.nominated: dict[QueuedJob, None] = {}
        self.view: WorkerView | None = None
        self.direct: DirectWaits | None = None
        self.group: str | None = None
        self.output_length: OutputLength | None = None
        self.precision: str | None = None
        self.pads = self.refills = self.has_no_capacity = False
        self.sequences = self.kv_tokens = self.prefill_tokens = 0
        self.sequence_limit = self.kv_limit = self.prefill_limit = self.batch_limit = inf
        self.prefill_ahead = [0] * len(Lane)
        self.drafts: list[Draft] = []
        self.closed_in_walk = 0
        self.closed_from_lane = 0
        self.worker_sets: list[WorkerSet] = []
        self.load: float | None = None
        self.used_fraction = 0.0

    def update_view(self, view: WorkerView | None, tick_context: TickContext) -> None:
        """Replace the view. What this gateway has in flight stays counted."""
        own = self._counted_use()
        self.view = view
        self.sequences, self.kv_tokens, self.prefill_tokens = own.sequences, own.kv_tokens, own.prefill_tokens
        if view is not None:
            self.group = view.group
            self.pads, self.refills, self.precision = view.pads, view.refills, view.precision
            self.output_length = view.output_length
            self.sequences += view.foreign.running + view.foreign.waiting
            self.kv_tokens += view.foreign.kv_tokens
            self.sequence_limit = _limit(view.capacity.sequences)
            self.direct = view.capacity.direct
            tick_context.bounds_holds |= self.direct is not None
            self.batch_limit = _limit(view.capacity.batch_sequences)
            self.kv_limit = _limit(view.capacity.kv_tokens)
            self.prefill_limit = _limit(view.capacity.prefill_tokens)
            self.has_no_capacity = min(self.sequence_limit, self.kv_limit, self.prefill_limit) <= 0
            if view.kv_packing == "sum" or view.capacity.kv_tokens is None:
                self.kv_peaks = None
            else:
                if self.kv_peaks is None:
                    self.kv_peaks = KvPeakTracker(self.kv_limit)
                self.kv_peaks.limit = self.kv_limit
                self.kv_limit = inf
            rate = view.capacity.prefill_tokens_per_s
            if rate is None:
                self.prefill_bucket = None
            elif self.prefill_bucket is None:
                self.prefill_bucket = PrefillTokenBucket(tick_context, rate)
            else:
                self.prefill_bucket.set_rate(rate)
        for worker_set in self.worker_sets:
            worker_set.kv_limit = None
        self.invalidate_load()

    def own_use(self) -> CapacityUse:
        """What was sent there and has not ended."""
        own = self._counted_use()
        for entry in self.nominated:
            own = CapacityUse(
                own.sequences - 1, own.kv_tokens - entry.kv_tokens, own.prefill_tokens - entry.prefill_tokens
            )
        return own

    def _counted_use(self) -> CapacityUse:
        foreign = Load() if self.view is None else self.view.foreign
        sequences = self.sequences - foreign.running - foreign.waiting
        return CapacityUse(sequences, self.kv_tokens - foreign.kv_tokens, self.prefill_tokens)

    # What fits.

    def accepts(self, entry: QueuedJob, prefill_tokens: int, fill: float) -> bool:
        """Whether the job may go there now with that much prefill, into the part `fill` of the capacity."""
        if entry.stays_in_groups and entry.rules.groups is not None and self.group not in entry.rules.groups:
            return False
        if entry.is_released:
            return self._accepts_released(entry)
        if self.sequences >= self.sequence_limit * fill:
            return False
        if self.sequences >= self.batch_limit and not entry.rules.is_live:
            return False
        used, limit = self.prefill_ahead[entry.lane], self.prefill_limit
        if used + prefill_tokens > limit * fill and (used or limit <= 0):
            return False
        if not self._fits_kv(entry, fill):
            return False
        if self.pads and not self.can_join_pass(entry):
            return False
        prefill_bucket = self.prefill_bucket
        return prefill_bucket is None or not self.is_paced(entry.lane) or prefill_bucket.allows(prefill_tokens, fill)

    def _accepts_released(self, entry: QueuedJob) -> bool:
        """Whether the engine can hold the job, and has less than a chunk of prompts in flight."""
        if self.direct is None or self.pads or self.prefill_tokens >= self.direct.chunk_tokens:
            return False
        return self.sequences < self.sequence_limit and self._fits_kv(entry, 1.0)

    def is_paced(self, lane: int) -> bool:
        """Whether the prefill rate binds the lane: a higher live lane decodes here."""
        best = self.best_decoding_lane
        return best is not None and lane > best

    def is_only_rate_limited(self, entry: QueuedJob, fill: float) -> bool:
        """Whether a job that the worker does not accept waits for the prefill rate alone."""
        return (
            self.prefill_bucket is not None
            and self.is_paced(entry.lane)
            and not self.is_full_for(entry, fill)
            and self.has_prefill_capacity(entry, fill)
            and (not self.pads or self.can_join_pass(entry))
        )

    def is_full_for(self, entry: QueuedJob, fill: float) -> bool:
        """Whether sequences or KV keep the job out: only the end of another job changes that.

        A job that is larger than all of a currency is accepted while that currency is unused.
        """
        if self.sequences >= self.sequence_limit * fill:
            return True
        if self.sequences >= self.batch_limit and not entry.rules.is_live:
            return True
        return not self._fits_kv(entry, fill)

    def _fits_kv(self, entry: QueuedJob, fill: float) -> bool:
        if self.kv_peaks is not None:
            return self.fits_timed(self.kv_peaks, entry, fill)
        used, limit = self.kv_tokens, self.kv_limit
        return used + entry.kv_tokens <= limit * fill or (not used and limit > 0)

    def fits_timed(
        self, kv_peaks: KvPeakTracker, entry: QueuedJob, fill: float, leaving: Container[QueuedJob] = ()
    ) -> bool:
        """Whether the predicted peak leaves the KV that the job needs, once some jobs have left."""
        limit = kv_peaks.limit
        if self.kv_tokens + entry.kv_tokens <= limit * fill:
            return True
        untimed = self.kv_tokens - kv_peaks.own_peaks  # of other clients
        if untimed + kv_peaks.peak(entry, leaving) <= limit * fill:
            return True
        return limit > 0 and not untimed + kv_peaks.peak(None, leaving)

    def predicted_kv_tokens(self) -> int:
        """The predicted KV peak of everything on the worker."""
        kv_peaks = self.kv_peaks
        return self.kv_tokens if kv_peaks is None else self.kv_tokens - kv_peaks.own_peaks + kv_peaks.peak()

    def has_prefill_capacity(self, entry: QueuedJob, fill: float) -> bool:
        used, limit = self.prefill_ahead[entry.lane], self.prefill_limit
        return used + entry.prefill_tokens <= limit * fill or (not used and limit > 0)

    def accepts_any(self, min_kv_tokens: int, fill: float) -> bool:
        """Whether a job with that much KV and almost no prefill could go there."""
        used, limit = self.kv_tokens, self.kv_limit
        return (
            not self.pads
            and self.sequences < self.sequence_limit * fill
            and (used + min_kv_tokens <= limit * fill or (not used and limit > 0))
            and self.prefill_ahead[0] < self.prefill_limit * fill
        )

    def can_join_pass(self, entry: QueuedJob) -> bool:
        """A running padded pass cannot be joined, so jobs wait for its end, unless the worker refills it. Jobs of a
        lane without a batching window go at once and queue up in the worker.
        """
        return self.refills or not self.sequences or entry.rules.window == "off" or self.has_draft_for(entry)

    def has_draft_for(self, entry: QueuedJob) -> bool:
        return any(draft.accepts(entry) for draft in self.drafts)

    # Load.

    def invalidate_load(self) -> None:
        if self.load is not None:
            self.load = None
            for worker_set in self.worker_sets:
                worker_set.stale.append(self)

    def compute_load(self) -> float:
        """The largest part in use over the currencies. Without limits, more sequences are still more load."""
        if self.has_no_capacity:
            load = inf
        else:
            load = self.sequences / self.sequence_limit
            if (used_fraction := self.kv_tokens / self.kv_limit) > load:
                load = used_fraction
            if (used_fraction := self.prefill_ahead[0] / self.prefill_limit) > load:
                load = used_fraction
        self.used_fraction = load
        if load < ALMOST_FULL and self.kv_peaks is not None:
            load = max(load, min(self.kv_tokens / self.kv_peaks.limit, ALMOST_FULL))
        if load < ALMOST_FULL and self.prefill_tokens:
            # Prefill of lower lanes keeps no job of a higher lane out, but it is load.
            used_fraction = self.prefill_tokens / self.prefill_limit
            if used_fraction > load:
                load = used_fraction if used_fraction < ALMOST_FULL else ALMOST_FULL
        if load == 0.0 and self.sequences:
            load = 1.0 - 1.0 / (1 + self.sequences)
        self.load = load
        return load

    # What changes.

    def admit(self, entry: QueuedJob) -> None:
        self.sequences += 1
        if entry.is_pooled:
            self.pooled_sequences += 1
        if entry.rules.is_live:
            self.live_sequences += 1
        self.kv_tokens += entry.kv_tokens
        if self.kv_peaks is not None:
            self.kv_peaks.add(entry)
        self._count_prefill(entry.lane, entry.prefill_tokens)
        if self.prefill_bucket is not None and self.best_decoding_lane is not None:
            is_paced = self.is_paced(entry.lane) and not entry.is_released
            self.prefill_bucket.spend(entry.prefill_tokens, MAX_PACED_DEBT_S if is_paced else MAX_DEBT_S)
        if self.load is not None:
            self.invalidate_load()

    def undo_admit(self, entry: QueuedJob) -> None:
        """Undo `admit` for a job that was never sent."""
        del self.nominated[entry]
        self.sequences -= 1
        if entry.is_pooled:
            self.pooled_sequences -= 1
        if entry.rules.is_live:
            self.live_sequences -= 1
        self.kv_tokens -= entry.kv_tokens
        if self.kv_peaks is not None:
            self.kv_peaks.remove(entry)
        self._count_prefill(entry.lane, -entry.prefill_tokens)
        self.invalidate_load()

    def _count_prefill(self, lane: int, tokens: int) -> None:
        """Prefill is ahead of jobs of its own and lower lanes only: it never blocks a higher lane."""
        self.prefill_tokens += tokens
        ahead = self.prefill_ahead
        for number in range(lane, len(ahead)):
            ahead[number] += tokens

    def evict(self, entry: QueuedJob) -> None:
        """The job is being stopped. It stays counted until it has ended."""
        self.evicting[entry] = None
        self.evicting_kv_tokens += entry.kv_tokens
        self.preemption_candidates.pop(entry, None)
        self.borrowers.pop(entry, None)

    def free_prefill(self, entry: QueuedJob) -> None:
        """The job has its first token."""
        lane, best = entry.lane, self.best_decoding_lane
        self._count_prefill(lane, -entry.prefill_tokens)
        entry.prefill_tokens = 0
        if entry.rules.is_live:
            self.live_decoding[lane] += 1
            if best is None or lane < best:
                self.best_decoding_lane = lane
        if self.load is not None:
            self.invalidate_load()

    def _update_best_decoding_lane(self) -> None:
        self.best_decoding_lane = None
        for lane, sequences in enumerate(self.live_decoding):
            if sequences:
                self.best_decoding_lane = lane
                return

    def free(self, entry: QueuedJob) -> None:
        """The job has ended."""
        self.sequences -= 1
        if entry.is_pooled:
            self.pooled_sequences -= 1
        if entry.rules.is_live:
            self.live_sequences -= 1
        self.kv_tokens -= entry.kv_tokens
        if self.kv_peaks is not None:
            self.kv_peaks.remove(entry)
        if entry.prefill_tokens:
            self._count_prefill(entry.lane, -entry.prefill_tokens)
        elif entry.rules.is_live:
            lane = entry.lane
            self.live_decoding[lane] -= 1
            if lane == self.best_decoding_lane and not self.live_decoding[lane]:
                self._update_best_decoding_lane()
        if self.preemption_candidates:
            self.preemption_candidates.pop(entry, None)
        if self.borrowers:
            self.borrowers.pop(entry, None)
        if self.evicting and entry in self.evicting:
            del self.evicting[entry]
            self.evicting_kv_tokens -= entry.kv_tokens
        if self.load is not None:
            self.invalidate_load()


def _limit(tokens: int | None) -> float:
    return inf if tokens is None else tokens
