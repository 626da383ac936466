"""A run as others are told of it."""

import enum

from msgspec import Struct

from inferry.domain.jobs import InferenceJob
from inferry.runs.run import Totals


class RunStatus(enum.Enum):
    ACTIVE = "active"
    IDLE = "idle"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class RunSnapshot(Struct, frozen=True, kw_only=True):
    """A run as it stands. Own figures, and those of the whole tree below it; times in seconds, of the tree.

    active_s: at least one call was in flight; running_s: of these, at least one was on a worker, as far as calls in
    flight have been told of; tool_s: nothing was in flight between two calls, or between the last call and the end of
    the run; idle_s: since the last call, where nobody knows whether there will be another.
    """

    tenant: str
    run_id: str
    lineage: tuple[str, ...]
    status: RunStatus
    cancelled_by_run: str | None
    first_call_at: float
    last_activity_at: float
    finished_at: float | None
    in_flight: tuple[InferenceJob, ...]
    tree_in_flight: int
    refused: int
    steps: int
    totals: Totals
    tree_totals: Totals
    tree_runs: int
    children: tuple[str, ...]
    own_active_s: float
    active_s: float
    running_s: float
    tool_s: float
    idle_s: float
