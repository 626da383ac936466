"""Why a job was held, which limit bound it, and why its worker was picked: one record per attempt that was sent.

The scheduler makes the record when it plans the job. The ledger keeps it as a short JSON text, traces and timelines
show it. It names limits, rules, workers and durations, and nothing of the prompt.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from inferry.domain.values import Value

# Why a job is held voluntarily: for others to join its batch, or because its run is paused.
WINDOW: Final = "window"
RUNNING_BATCH: Final = "running_batch"
SIBLINGS: Final = "siblings"
SESSION_PAUSE: Final = "session_pause"

# What keeps a job that is ready from a worker.
SEQUENCES: Final = "sequences"
BATCH_SEQUENCES: Final = "batch_sequences"
KV_TOKENS: Final = "kv_tokens"
PREFILL_TOKENS: Final = "prefill_tokens"
PREFILL_RATE: Final = "prefill_rate"
LANE_RESERVE: Final = "lane_reserve"
LANE_SHARE: Final = "lane_share"
JOB_AHEAD: Final = "job_ahead"
PADDED_BATCH: Final = "padded_batch"
PREEMPTION: Final = "preemption"
WORKER_GROUP: Final = "worker_group"
WORKER_DOWN: Final = "worker_down"
BREAKER: Final = "breaker"
NO_WORKER: Final = "no_worker"

WORKER_LIMITS: Final = (
    SEQUENCES,
    BATCH_SEQUENCES,
    KV_TOKENS,
    PREFILL_TOKENS,
    PREFILL_RATE,
    LANE_RESERVE,
    LANE_SHARE,
    JOB_AHEAD,
    PADDED_BATCH,
    PREEMPTION,
)
"""Limits of one worker."""
FLEET_LIMITS: Final = (WORKER_GROUP, WORKER_DOWN, BREAKER, NO_WORKER)
"""Limits that leave no worker to wait for."""


# Why a job goes to a worker for overflow.
MISSES_DEADLINE: Final = "deadline"
MISSES_TARGET: Final = "target"


class Overflow(Value):
    """Why a job goes to a worker for overflow, and what that cost.

    `reason`: what it would miss on own workers. `wait_s`: its predicted wait for them, in seconds (P90); None where
    none of them was up. `cost_nanos`: billionths of the currency; None before the attempt has ended.
    """

    def __init__(self, reason: str, wait_s: float | None, cost_nanos: int | None = None) -> None:
        self.reason: Final = reason
        self.wait_s: Final = wait_s
        self.cost_nanos: Final = cost_nanos


class Decision(Value):
    """The decision about one attempt. Durations are seconds.

    `held_by`: the rule that held the job for others, for `held_s`. `waits`: time that the job was ready, by what bound
    the head of its queue; without the time until the next tick. `limit` bound it last, on `limit_worker`. `picked_by`:
    the rule that chose the worker; None for a job that was never sent. `candidates`: workers that it could have gone
    to, full or not. `filtered`: the other workers, by what excludes them. `cached_tokens`: prompt tokens expected in
    the worker's prefix cache. `overflow`: why the job went to a worker for overflow; None for other jobs.
    """

    def __init__(
        self,
        *,
        picked_by: str | None = None,
        candidates: int = 0,
        filtered: Mapping[str, int] | None = None,
        cached_tokens: int = 0,
        held_by: str | None = None,
        held_s: float = 0.0,
        limit: str | None = None,
        limit_worker: str | None = None,
        waits: Mapping[str, float] | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        self.picked_by: Final = picked_by
        self.candidates: Final = candidates
        self.filtered: Final = filtered
        self.cached_tokens: Final = cached_tokens
        self.held_by: Final = held_by
        self.held_s: Final = held_s
        self.limit: Final = limit
        self.limit_worker: Final = limit_worker
        self.waits: Final = waits
        self.overflow: Final = overflow


def to_text(decision: Decision) -> str:
    """`to_fields` as short JSON."""
    # Once per call, so written by hand: names of rules and limits need no escapes. Most calls share the first part.
    filtered = decision.filtered
    text = _placement(decision.picked_by, decision.candidates, tuple(filtered.items()) if filtered else ())
    if decision.cached_tokens:
        text += f',"cached_tokens":{decision.cached_tokens}'
    if decision.held_by is not None:
        text += f',"held_by":"{decision.held_by}","held_ms":{round(decision.held_s * 1000, 3)}'
    if decision.limit is not None:
        text += f',"limit":"{decision.limit}"'
        if decision.limit_worker is not None:
            text += f',"limit_worker":{msgspec.json.encode(decision.limit_worker).decode()}'
        waits = [f'"{limit}":{round(waited * 1000, 3)}' for limit, waited in (decision.waits or {}).items()]
        text += f',"waits_ms":{{{",".join(waits)}}}'
    if decision.overflow is not None:
        text += f',"overflow":{msgspec.json.encode(_overflow_fields(decision.overflow)).decode()}'
    return text + "}"


@lru_cache(1024)
def _placement(picked_by: str | None, candidates: int, filtered: tuple[tuple[str, int], ...]) -> str:
    """The beginning of a text."""
    fields: dict[str, object] = {"picked_by": picked_by, "candidates": candidates}
    if filtered:
        fields["filtered"] = dict(filtered)
    return msgspec.json.encode(fields).decode()[:-1]


def to_fields(decision: Decision) -> dict[str, object]:
    """The decision as JSON values; what is empty is left out. Durations are milliseconds."""
    fields: dict[str, object] = {"picked_by": decision.picked_by, "candidates": decision.candidates}
    if decision.filtered:
        fields["filtered"] = decision.filtered
    if decision.cached_tokens:
        fields["cached_tokens"] = decision.cached_tokens
    if decision.held_by is not None:
        fields["held_by"] = decision.held_by
        fields["held_ms"] = round(decision.held_s * 1000, 3)
    if decision.limit is not None:
        fields["limit"] = decision.limit
        if decision.limit_worker is not None:
            fields["limit_worker"] = decision.limit_worker
        fields["waits_ms"] = {name: round(waited * 1000, 3) for name, waited in (decision.waits or {}).items()}
    if decision.overflow is not None:
        fields["overflow"] = _overflow_fields(decision.overflow)
    return fields


def _overflow_fields(overflow: Overflow) -> dict[str, object]:
    fields: dict[str, object] = {"reason": overflow.reason}
    if overflow.wait_s is not None:
        fields["wait_ms"] = round(overflow.wait_s * 1000, 3)
    if overflow.cost_nanos is not None:
        fields["cost_nanos"] = overflow.cost_nanos
    return fields


def _overflow(fields: dict[str, Any] | None) -> Overflow | None:
    if fields is None:
        return None
    wait_ms = fields.get("wait_ms")
    return Overflow(str(fields["reason"]), None if wait_ms is None else wait_ms / 1000, fields.get("cost_nanos"))


def from_text(text: str | None) -> Decision | None:
    """The decision that `to_text` wrote; None where there is none or it is not one."""
    if text is None:
        return None
    try:
        fields = msgspec.json.decode(text, type=dict)
        return Decision(
            picked_by=fields.get("picked_by"),
            candidates=int(fields.get("candidates", 0)),
            filtered=fields.get("filtered"),
            cached_tokens=int(fields.get("cached_tokens", 0)),
            held_by=fields.get("held_by"),
            held_s=float(fields.get("held_ms", 0.0)) / 1000,
            limit=fields.get("limit"),
            limit_worker=fields.get("limit_worker"),
            waits={str(name): float(waited) / 1000 for name, waited in fields.get("waits_ms", {}).items()} or None,
            overflow=_overflow(fields.get("overflow")),
        )
    except (msgspec.MsgspecError, TypeError, ValueError, AttributeError, LookupError):
        return None
