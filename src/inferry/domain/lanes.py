"""Lanes: what each promises, and how it forms batches."""

import enum
from typing import Literal

from msgspec import Struct


class Lane(enum.IntEnum):
    """A promise of latency. The number orders lanes inside the gateway and never goes over the wire."""

    P0 = 0
    P1 = 1
    P2 = 2


class ReleaseReason(enum.Enum):
    """Why a plan was formed when it was."""

    IMMEDIATE = "immediate"
    """Nothing to wait for: the lane or the worker gains nothing by holding."""
    SIZE = "size"
    """The group held for company was full."""
    WINDOW = "window"
    """The coalescing window of the oldest job held was over."""
    SIBLING = "sibling"
    """Jobs of one run or template that begin alike were ready at the same time and went together."""
    MAX_WAIT = "max_wait"
    """The job had been held for all it allows and went alone."""
    DEADLINE = "deadline"
    """Holding any longer would have eaten the time left before the deadline."""


class LanePolicy(Struct, frozen=True, kw_only=True):
    """What a lane promises and how it forms batches. Times in milliseconds, as people write them.

    `coalesce_ms` is the longest a job is held for company, counted from its arrival; `max_wait_ms` bounds all
    voluntary holding. `share` is the part of admitted prompt tokens a lower lane is owed while higher lanes are busy;
    `reserve` is the part of every worker's room that it leaves to them. `may_preempt` names lanes whose running jobs
    may be stopped for one of this lane; `preemptible` says whether this lane's may.
    `ttft_ms` and `itl_ms` are the promise that attainment is measured against.
    From the part `high_watermark` of `queue_limit` on no newcomer is queued; the rest is for jobs that come back.
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


DEFAULT_LANES: dict[Lane, LanePolicy] = {
    Lane.P0: LanePolicy(max_wait_ms=25, coalesce_ms=8, may_preempt=(Lane.P2,), ttft_ms=500, itl_ms=30),
    Lane.P1: LanePolicy(max_wait_ms=120, coalesce_ms=25, share=0.10, reserve=0.05, ttft_ms=2000, itl_ms=50),
    Lane.P2: LanePolicy(max_wait_ms=30_000, coalesce_ms=400, share=0.05, reserve=0.25, preemptible=True),
}
