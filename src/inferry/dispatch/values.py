"""Plain values of this room: what it is told to do, and what it reports.

Apart from what works with them, for mypyc compiles that and cannot compile structs.
"""

from msgspec import Struct

from inferry.domain.streams import Delta, Done
from inferry.domain.workers import Load, Room

ENTRY_BYTES = 1000
"""What a kept answer takes besides what it says."""


class WorkerReport(Struct, frozen=True, kw_only=True):
    """A worker as an operator sees it. `since` is when its phase began; `share` is the part of its room in use."""

    name: str
    kind: str
    group: str
    phase: str
    since: float
    drained: bool
    breaker: str
    opens: int
    share: float
    room: Room
    load: Load
    models: tuple[str, ...]


class HealthPolicy(Struct, frozen=True, kw_only=True):
    """When to take a worker out, when to ask it again, how fast to trust it again.

    `losses` different jobs lost with none served in between open the breaker; so do at least that many lost within
    `window_s` where they are `loss_share` of all that ended there. `jitter` is the part by which a pause may differ,
    so that workers that fell together are not asked together. `patience_s` is how long a queued job without a deadline
    waits for a worker of its model to come up. `overdue_share` is the part of all calls that may be retried elsewhere
    because their first token is overdue.
    """

    losses: int = 3
    window_s: float = 30.0
    loss_share: float = 0.5
    first_pause_s: float = 0.25
    longest_pause_s: float = 10.0
    jitter: float = 0.2
    first_share: float = 0.1
    double_every_s: float = 1.0
    patience_s: float = 30.0
    overdue_share: float = 0.02


class CancelReport(Struct, frozen=True, kw_only=True):
    """What a cancel found and did, in jobs of the whole tree. Each job is counted once.

    queued: had nothing at a worker that the cancel could stop, and never will. running: had been sent to an engine,
    whether the engine had begun them or held them in a queue of its own. freed: of these, those that the engine has
    confirmed to hold nothing any more. unconfirmed: the others. wasted_tokens and wasted_ms: what those that ran had
    written, and how long each had been there. took_ms: from the tombstone to this report.
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

    `linger_s` is how long a call that can be made again goes on after its client has left, where it does not say.
    """

    identical: bool = True
    linger_s: float = 0.0
    keep_s: float = 300.0
    keep_bytes: int = 64 << 20
    history_bytes: int = 64 << 20
    history_bytes_of_one: int = 1 << 20


class Beginning(Struct, frozen=True, gc=False):
    """How much of a prompt came before, as a part of it; and its chain, thinned out: short beginnings, then longer."""

    share: float = 0.0
    chain: tuple[str, ...] = ()


class Kept(Struct, frozen=True):
    """One answer. `digest` is of the call that it answers; `was_continued`: more than one worker wrote it."""

    job_id: str
    digest: bytes
    delta: Delta | None
    done: Done
    was_continued: bool
    until: float

    @property
    def size(self) -> int:
        said = 0 if self.delta is None else len(self.delta.raw) + len(self.delta.text) + 8 * len(self.delta.token_ids)
        return ENTRY_BYTES + said + len(self.done.raw)

    def __repr__(self) -> str:
        return f"Kept({self.job_id!r}, {self.size} bytes)"
