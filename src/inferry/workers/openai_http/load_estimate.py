"""The load of an engine, and how much of it is of other clients, from its metrics. Pure: time is an argument."""

import math
from collections import deque
from typing import Final

from inferry.domain.values import replace
from inferry.domain.workers import Capacity, EngineCounts, Load
from inferry.workers.openai_http.metrics_parser import MetricsSnapshot

FOREIGN_LOAD_SNAPSHOTS: Final = 4
"""Load counts as foreign after this many readings in a row: own calls that begin or end around one reading do not show
in the next."""
TOLERATED_CALLS: Final = 2
TOLERATED_SHARE: Final = 0.05
STALE_S: Final = 3.0
"""Older readings are ignored."""
SATURATED_SNAPSHOTS: Final = 6
"""Readings in a row with waiting calls, free cache and a constant number of running sequences that show the engine's
limit. A changing number shows nothing: calls also wait for their prefill."""
SPARE_KV_SHARE: Final = 0.9


class LoadEstimate:
    """Load, foreign load and counters of one engine, updated with every reading."""

    def __init__(self) -> None:
        self.snapshot: MetricsSnapshot | None = None
        self.read_at = -math.inf
        self.preemptions = 0
        self.engine_sequences: int | None = None
        self._excess: deque[Load] = deque(maxlen=FOREIGN_LOAD_SNAPSHOTS)
        self._saturated: list[int] = []

    def update(self, snapshot: MetricsSnapshot, own_calls: int, now: float) -> None:
        """Add a reading. At most `own_calls` of its sequences are this gateway's."""
        last, self.snapshot, self.read_at = self.snapshot, snapshot, now
        self._excess.append(excess(snapshot, own_calls))
        self._update_engine_limit(snapshot)
        if last is not None:
            self.preemptions += max(0, int(snapshot.preemptions - last.preemptions))

    def load(self, own_calls: int, now: float) -> Load:
        """The engine's total load; the gateway's own calls where the engine does not report it."""
        if self.snapshot is None or now - self.read_at > STALE_S:
            return Load(running=own_calls)
        return Load(self.snapshot.running, self.snapshot.waiting, self.snapshot.kv_tokens)

    @property
    def counts(self) -> EngineCounts | None:
        """The engine's counters since its start, where it reports all of them."""
        snapshot = self.snapshot
        if snapshot is None or snapshot.steps is None or snapshot.output_tokens is None:
            return None
        written = int(snapshot.output_tokens)
        return EngineCounts(int(snapshot.steps.count), max(0, int(snapshot.steps.tokens) - written), written)

    def foreign(self, now: float) -> Load:
        """The load of other clients: the minimum over the last readings."""
        if len(self._excess) < FOREIGN_LOAD_SNAPSHOTS or now - self.read_at > STALE_S * FOREIGN_LOAD_SNAPSHOTS:
            return Load()
        return Load(
            min(one.running for one in self._excess),
            min(one.waiting for one in self._excess),
            min(one.kv_tokens for one in self._excess),
        )

    def _update_engine_limit(self, snapshot: MetricsSnapshot) -> None:
        if snapshot.waiting and snapshot.running and (snapshot.kv_usage is None or snapshot.kv_usage < SPARE_KV_SHARE):
            self._saturated.append(snapshot.running)
            if self._saturated[0] != snapshot.running:
                self._saturated = [snapshot.running]  # the number depends on the moment
            elif len(self._saturated) >= SATURATED_SNAPSHOTS:
                self.engine_sequences = snapshot.running
        else:
            self._saturated.clear()


def excess(snapshot: MetricsSnapshot, own_calls: int) -> Load:
    """Running and waiting sequences beyond this gateway's calls, unless so few that it may be a race."""
    beyond = snapshot.sequences - own_calls
    if beyond <= TOLERATED_CALLS + TOLERATED_SHARE * own_calls:
        return Load()
    running = min(beyond, max(0, snapshot.running - own_calls))
    kv_tokens = snapshot.kv_tokens * running // snapshot.running if snapshot.running else 0
    return Load(running, beyond - running, kv_tokens)


def limited(capacity: Capacity, kv_capacity: int | None, allowed: int | None) -> Capacity:
    """The configured capacity within what the engine reports of its KV cache and what rate limits allow."""
    if capacity.kv_tokens is None and kv_capacity is not None:
        capacity = replace(capacity, kv_tokens=kv_capacity)
    if allowed is None or (capacity.sequences is not None and capacity.sequences <= allowed):
        return capacity
    return replace(capacity, sequences=allowed)
