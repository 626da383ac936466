"""Lanes: SLO targets and batching policy."""

import enum
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from inferry.domain.routes import OutputLength


class Lane(enum.IntEnum):
    """Service class of a job. The number orders lanes and is not part of any API."""

    P0 = 0
    P1 = 1
    P2 = 2


class ReleaseReason(enum.Enum):
    """Why a plan was released."""

    IMMEDIATE = "immediate"
    """Holding the jobs would gain nothing."""
    SIZE = "size"
    """The batch was full."""
    WINDOW = "window"
    """The batching window of the oldest job had passed."""
    SIBLING = "sibling"
    """Jobs of one run or template with a common prefix were released together."""
    MAX_WAIT = "max_wait"
    """A job had reached its `max_wait`."""
    DEADLINE = "deadline"
    """A job had to be released to meet its deadline."""


class LanePolicy(Struct, frozen=True, kw_only=True):
    """SLO targets and batching policy of a lane. Times are milliseconds.

    `coalesce_ms`: longest time a job is held for others to join its batch, from its arrival. `max_wait_ms`: after
    that a held job goes alone. `share`: fraction of prompt tokens guaranteed to the lane while higher lanes are busy.
    `reserve`: fraction of each worker's capacity that the lane leaves to higher lanes. `may_preempt`: lanes whose
    running jobs this lane may preempt, of its own those that have written far more than predicted; `preemptible`:
    whether jobs of this lane may be preempted. `ttft_ms` and `itl_ms`: SLO targets. `ttft_ms_per_1k_tokens` is added to
    `ttft_ms` for every 1,000 uncached prompt tokens. Above the fraction `high_watermark` of `queue_limit` only retries,
    resumed jobs and tenants below their part are queued.
    `groups`: worker groups the lane may use, best first; None allows all. `borrow_groups`: whether it may use workers
    of other groups while no live job needs them. `long_output_tokens`: predicted output tokens from which a job is
    long; None does not separate short and long jobs. `prompt_buckets`: prompt lengths in tokens up to which jobs share
    a padded pass; longer ones form the last bucket.
    """

    max_wait_ms: float
    coalesce_ms: float
    window: Literal["adaptive", "fixed", "off"] = "adaptive"
    max_batch: int = 64
    queue_limit: int = 10_000
    high_watermark: float = 0.8
    share: float = 0.0
    reserve: float = 0.0
    may_preempt: tuple[Lane, ...] = ()
    preemptible: bool = False
    ttft_ms: float | None = None
    itl_ms: float | None = None
    ttft_ms_per_1k_tokens: float = 0.0
    groups: tuple[str, ...] | None = None
    borrow_groups: bool = False
    long_output_tokens: int | None = None
    prompt_buckets: tuple[int, ...] = ()

    @property
    def is_live(self) -> bool:
        """Whether a client waits for the first token: such a lane has a target for it, a batch lane has none."""
        return self.ttft_ms is not None

    def output_length(self, expected_tokens: int) -> OutputLength | None:
        """Whether a job with this predicted output is short or long; None where the lane does not separate them."""
        if self.long_output_tokens is None:
            return None
        return "long" if expected_tokens >= self.long_output_tokens else "short"


DEFAULT_LANES: dict[Lane, LanePolicy] = {
    Lane.P0: LanePolicy(max_wait_ms=25, coalesce_ms=8, may_preempt=(Lane.P2,), ttft_ms=500, itl_ms=30),
    Lane.P1: LanePolicy(max_wait_ms=120, coalesce_ms=25, share=0.10, reserve=0.05, ttft_ms=2000, itl_ms=50),
    Lane.P2: LanePolicy(max_wait_ms=30_000, coalesce_ms=400, share=0.05, reserve=0.25, preemptible=True),
}


def evictable_lanes(lanes: Mapping[Lane, LanePolicy]) -> frozenset[Lane]:
    """Lanes whose running jobs may be stopped: for a lane that may preempt them, or because they borrow workers."""
    preempted = {lane for policy in lanes.values() for lane in policy.may_preempt}
    return frozenset(
        lane for lane, policy in lanes.items() if policy.borrow_groups or (policy.preemptible and lane in preempted)
    )
