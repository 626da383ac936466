"""A run as it is reported."""

import enum
from collections.abc import Callable

from msgspec import Struct

from inferry.domain.jobs import InferenceJob
from inferry.runs.run import Run, Totals, self_and_ancestors, subtree, union_length


class RunStatus(enum.Enum):
    ACTIVE = "active"
    IDLE = "idle"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class RunSnapshot(Struct, frozen=True, kw_only=True):
    """A run as it stands. Own figures, and those of the whole tree below it; times in seconds, of the tree.

    active_s: at least one call was in flight; running_s: at least one call was on a worker; tool_s: nothing was in
    flight between two calls, or between the last call and the end of the run; idle_s: since the last call of a run that
    is not finished.
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


def snapshot_of(run: Run, status: RunStatus, now: float, sent_at: Callable[[str], float | None] | None) -> RunSnapshot:
    """The run at `now`. `sent_at` tells when a job in flight was sent."""
    tree_totals, tree_runs = Totals(), 0
    sent: list[tuple[float, float]] = []
    for one in subtree(run):
        tree_runs += 1 + one.evicted_runs
        tree_totals.add(one.totals)
        if one.evicted_totals is not None:
            tree_totals.add(one.evicted_totals)
        if sent_at is not None:
            sent += [(sent_time, now) for job_id in one.in_flight if (sent_time := sent_at(job_id)) is not None]
    cancelled_run_id = next((node.run_id for node in self_and_ancestors(run) if node.cancelled_at is not None), None)
    return RunSnapshot(
        tenant=run.tenant,
        run_id=run.run_id,
        lineage=run.lineage,
        status=status,
        cancelled_by_run=cancelled_run_id,
        first_call_at=run.first_call_at,
        last_activity_at=now if run.tree_in_flight else run.last_activity_at,
        finished_at=run.finished_at,
        in_flight=tuple(run.in_flight.values()),
        tree_in_flight=run.tree_in_flight,
        refused=run.refused,
        steps=len(run.steps) + run.extra_steps,
        totals=run.totals,
        tree_totals=tree_totals,
        tree_runs=tree_runs,
        children=tuple(name for name, child in run.children.items() if not child.is_anonymous),
        own_active_s=run.own_active_s + (now - run.own_active_since if run.in_flight else 0.0),
        active_s=run.active_s + (now - run.active_since if run.tree_in_flight else 0.0),
        running_s=run.running_s + union_length(run.spans + sent),
        tool_s=run.tool_s,
        idle_s=0.0 if run.idle_since is None else now - run.idle_since,
    )
