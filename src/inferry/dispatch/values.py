"""Settings and reports of this package, in a module of their own because mypyc cannot compile structs."""

from typing import NamedTuple

from msgspec import Struct

from inferry.domain.streams import Delta, Done
from inferry.domain.workers import Capacity, Load

ENTRY_OVERHEAD_BYTES = 1000
"""Memory of a cached answer besides its content."""


class WorkerReport(Struct, frozen=True, kw_only=True):
    """A worker as an operator sees it. `since` is when its phase began; `share` is the part of its capacity in use."""

    name: str
    kind: str
    group: str
    phase: str
    since: float
    drained: bool
    breaker: str
    opens: int
    share: float
    capacity: Capacity
    load: Load
    models: tuple[str, ...]


class OwnerState(NamedTuple):
    """What the next owner of the workers keeps: the adapters that operators have loaded (name, path and base model),
    and the scaling advice (group and number of workers)."""

    adapters: tuple[tuple[str, str, str | None], ...]
    desired: tuple[tuple[str, int], ...]


class HealthPolicy(Struct, frozen=True, kw_only=True):
    """When a worker is taken out, when it is probed again, and how fast it regains its capacity.

    `failure_threshold` different jobs lost with none served in between open the breaker; so do at least that many lost
    within `failure_window_s` where they are `failure_ratio` of all that ended there. `jitter` is the part by which a
    pause varies, so that workers that failed together are not probed together. `no_worker_timeout_s` is how long a
    queued job without a deadline waits for a worker of its model to come up. `max_hedged_retry_ratio` is the part of
    all calls that may be retried elsewhere because their first token is overdue.
    """

    failure_threshold: int = 3
    failure_window_s: float = 30.0
    failure_ratio: float = 0.5
    initial_backoff_s: float = 0.25
    max_backoff_s: float = 10.0
    jitter: float = 0.2
    slow_start_share: float = 0.1
    slow_start_doubling_s: float = 1.0
    no_worker_timeout_s: float = 30.0
    max_hedged_retry_ratio: float = 0.02


class CancelReport(Struct, frozen=True, kw_only=True):
    """The result of a cancel, in jobs of the whole tree. Each job is counted once.

    queued: had nothing at a worker that the cancel could stop, and never will. running: had been sent to an engine,
    started or still in the engine's own queue. freed: running jobs that the engine has confirmed to hold nothing for.
    unconfirmed: the other running jobs. wasted_tokens and wasted_ms: output of the running jobs, and the sum of their
    times at the engine. took_ms: from the tombstone to this report.
    """

    queued: int
    running: int
    freed: int
    wasted_tokens: int
    wasted_ms: float
    unconfirmed: int
    took_ms: float


class Sharing(Struct, frozen=True, kw_only=True):
    """What may be shared, for how long, and how much memory that may take.

    `repeats`: repeated calls are recognised here, and not by another process. `linger_s` is how long a repeatable call
    continues after its client has left, where the call does not say.
    """

    identical: bool = True
    repeats: bool = True
    linger_s: float = 0.0
    replay_ttl_s: float = 300.0
    replay_max_bytes: int = 64 << 20
    join_history_max_bytes: int = 64 << 20
    history_bytes_per_execution: int = 1 << 20


class CachedResponse(Struct, frozen=True):
    """One cached answer. `digest` is that of its call; `was_resumed`: more than one worker wrote it."""

    job_id: str
    digest: bytes
    delta: Delta | None
    done: Done
    was_resumed: bool
    until: float

    @property
    def size(self) -> int:
        content_bytes = (
            0 if self.delta is None else len(self.delta.raw) + len(self.delta.text) + 8 * len(self.delta.token_ids)
        )
        return ENTRY_OVERHEAD_BYTES + content_bytes + len(self.done.raw)

    def __repr__(self) -> str:
        return f"CachedResponse({self.job_id!r}, {self.size} bytes)"
