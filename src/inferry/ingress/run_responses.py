"""JSON of runs, from the gateway's memory and the ledger. Pure."""

from collections.abc import Callable, Sequence
from typing import Any

from inferry.dispatch.gateway import Run, RunSnapshot, RunStatus, Totals
from inferry.domain.attempts import Attempt
from inferry.domain.ledger import LedgerEntry
from inferry.domain.prices import NANOS_PER_UNIT
from inferry.domain.runs import RunSummary, TreeSummary
from inferry.ingress.run_tools import ToolReport

Used = RunSummary | TreeSummary | Totals | None

TOOLS_DOMINATE_BELOW_SHARE = 0.3
"""A run that waits for the model for a smaller share of its time gains little from faster inference."""
QUEUE_DOMINATES_ABOVE_SHARE = 0.5
"""A run that spends a larger share of that wait in the queue gains from more capacity or a higher lane."""
MIN_HINT_MS = 1000.0
"""Shorter runs get no hint: their shares are mostly chance."""


def run_detail(
    run_id: str,
    live: RunSnapshot | None,
    recorded: RunSummary | None,
    recorded_tree: TreeSummary | None,
    recorded_children: Sequence[str],
    rows: Sequence[LedgerEntry],
    *,
    epoch: float,
    is_cancelled: bool,
    budget: Any,
    attempt_of: Callable[[str], Attempt | None],
    tools: ToolReport,
    steps: int,
) -> dict[str, Any]:
    """One run. The ledger's figures are used where memory has fewer, as after a restart."""
    ledger_is_ahead = live is None or (recorded is not None and recorded.jobs > live.totals.jobs)
    if live is not None:
        status = live.status
        lineage = live.lineage
        parent = lineage[1] if len(lineage) > 1 else None
    else:
        status = RunStatus.CANCELLED if is_cancelled else RunStatus.IDLE
        parent = None if recorded is None else recorded.parent_run
        lineage = (run_id,) if parent is None else (run_id, parent)
    ended: Used = recorded if ledger_is_ahead or live is None else live.totals
    in_flight = () if live is None else live.in_flight
    children = list(dict.fromkeys((*(() if live is None else live.children), *recorded_children)))
    return {
        "id": run_id,
        "object": "run",
        "status": status.value,
        "cancelled_by_run": None if live is None else live.cancelled_by_run,
        "parent_run_id": parent,
        "lineage": lineage,
        "started_at": _earliest(None if live is None else epoch + live.first_call_at, recorded),
        "last_active_at": None if live is None and recorded is None else _latest(live, recorded, epoch),
        "finished_at": None if live is None or live.finished_at is None else epoch + live.finished_at,
        "steps": _steps(live, recorded, ledger_is_ahead=ledger_is_ahead),
        "jobs": _jobs(live, recorded, ledger_is_ahead=ledger_is_ahead),
        "tokens": _tokens(ended),
        "waits": _waits(live, recorded, ledger_is_ahead=ledger_is_ahead),
        **_cost(ended),
        "budget": budget,
        "time": _times(live, recorded, ledger_is_ahead=ledger_is_ahead),
        "tools": tools,
        "sub_runs": children,
        "tree": _tree(live, recorded_tree),
        "latest_steps": [*_in_flight_steps(in_flight, attempt_of, epoch), *map(_row, rows)][:steps],
    }


def live_run_item(run: Run, status: RunStatus, epoch: float) -> dict[str, Any]:
    return {
        "id": run.run_id,
        "object": "run",
        "status": status.value,
        "parent_run_id": None if run.parent is None else run.parent.run_id,
        "started_at": epoch + run.first_call_at,
        "last_active_at": epoch + run.last_activity_at,
        "in_flight": len(run.in_flight),
        "jobs": run.totals.jobs,
        "tokens": _tokens(run.totals),
        **_cost(run.totals),
    }


def recorded_run_item(recorded: RunSummary, status: RunStatus) -> dict[str, Any]:
    return {
        "id": recorded.run_id,
        "object": "run",
        "status": status.value,
        "parent_run_id": recorded.parent_run,
        "started_at": recorded.started_at,
        "last_active_at": recorded.ended_at,
        "in_flight": 0,
        "jobs": recorded.jobs,
        "tokens": _tokens(recorded),
        **_cost(recorded),
    }


def hint(wall_ms: float, active_ms: float, queued_ms: float) -> str | None:
    """Where the run's time went, as a sentence; None where nothing stands out."""
    if wall_ms < MIN_HINT_MS:
        return None
    if active_ms < TOOLS_DOMINATE_BELOW_SHARE * wall_ms:
        return (
            f"{active_ms / wall_ms:.0%} of the time was spent waiting for the model, the rest in tools and the agent: "
            "faster inference would help little"
        )
    if queued_ms > QUEUE_DOMINATES_ABOVE_SHARE * active_ms:
        return (
            f"{queued_ms / active_ms:.0%} of the wait for the model was spent in the queue: "
            "more capacity or a higher lane would help"
        )
    return None


def _times(live: RunSnapshot | None, recorded: RunSummary | None, *, ledger_is_ahead: bool) -> dict[str, Any]:
    idle_ms = 0.0 if live is None else live.idle_s * 1000
    if ledger_is_ahead and recorded is not None:
        active_ms, running_ms = recorded.active_ms, recorded.running_ms
        tool_ms = max(0.0, (recorded.ended_at - recorded.started_at) * 1000 - active_ms)
    elif live is not None:
        active_ms, running_ms, tool_ms = live.active_s * 1000, live.running_s * 1000, live.tool_s * 1000
    else:
        active_ms = running_ms = tool_ms = 0.0
    queued_ms = max(0.0, active_ms - running_ms)
    wall_ms = active_ms + tool_ms
    return {
        "active_ms": _ms(active_ms),
        "queued_ms": _ms(queued_ms),
        "tool_ms": _ms(tool_ms),
        "idle_ms": _ms(idle_ms),
        "ratio": round(active_ms / wall_ms, 4) if wall_ms > 0 else None,
        "hint": hint(wall_ms, active_ms, queued_ms),
    }


def _jobs(live: RunSnapshot | None, recorded: RunSummary | None, *, ledger_is_ahead: bool) -> dict[str, int]:
    ended = recorded if ledger_is_ahead or live is None else live.totals
    return {
        "in_flight": 0 if live is None else len(live.in_flight),
        "ended": 0 if ended is None else ended.jobs,
        **{name: 0 if ended is None else getattr(ended, name) for name in ("done", "failed", "cancelled", "expired")},
        "refused": 0 if live is None else live.refused,
    }


def _steps(live: RunSnapshot | None, recorded: RunSummary | None, *, ledger_is_ahead: bool) -> int:
    if ledger_is_ahead and recorded is not None:
        return recorded.steps
    return 0 if live is None else live.steps


def _waits(live: RunSnapshot | None, recorded: RunSummary | None, *, ledger_is_ahead: bool) -> dict[str, float | None]:
    p50 = None if recorded is None else recorded.queue_ms_p50
    if ledger_is_ahead or live is None:
        mean, most = (None, None) if recorded is None else (recorded.queue_ms_mean, recorded.queue_ms_max)
    else:
        totals = live.totals
        mean, most = (totals.wait_ms / totals.waits, totals.max_wait_ms) if totals.waits else (None, None)
    return {"p50_ms": _ms(p50), "mean_ms": _ms(mean), "max_ms": _ms(most)}


def _tokens(used: Used) -> dict[str, int]:
    return {name: 0 if used is None else getattr(used, f"{name}_tokens") for name in ("prompt", "cached", "output")}


def _cost(used: Used) -> dict[str, Any]:
    nanos = None if used is None else used.cost_nanos
    return {"cost": None if nanos is None else nanos / NANOS_PER_UNIT, "cost_nanos": nanos}


def _tree(live: RunSnapshot | None, recorded: TreeSummary | None) -> dict[str, Any]:
    used: TreeSummary | Totals | None = recorded
    if recorded is None and live is not None:
        used = live.tree_totals
    runs = recorded.runs if recorded is not None else 0 if live is None else live.tree_runs
    return {
        "runs": runs,
        "in_flight": 0 if live is None else live.tree_in_flight,
        "jobs": 0 if used is None else used.jobs,
        "tokens": _tokens(used),
        **_cost(used),
    }


def _in_flight_steps(
    jobs: Sequence[Any], attempt_of: Callable[[str], Attempt | None], epoch: float
) -> list[dict[str, Any]]:
    found = []
    for job in reversed(jobs):
        attempt = attempt_of(job.job_id)
        found.append(
            {
                "step_id": job.step_id,
                "job_id": job.job_id,
                "status": "queued" if attempt is None else attempt.state.value,
                "model": job.route.model,
                "lane": job.lane.name,
                "arrived_at": epoch + job.arrived_at,
                "output_tokens": 0 if attempt is None else attempt.output_tokens,
            }
        )
    return found


def _row(entry: LedgerEntry) -> dict[str, Any]:
    return {
        "step_id": entry.step_id,
        "job_id": entry.job_id,
        "attempt": entry.attempt,
        "status": entry.outcome.value,
        "error": entry.error_code,
        "model": entry.model,
        "lane": entry.lane,
        "arrived_at": entry.ended_at - entry.total_ms / 1000,
        "ended_at": entry.ended_at,
        "tokens": {"prompt": entry.prompt_tokens, "cached": entry.cached_tokens, "output": entry.output_tokens},
        "queue_ms": _ms(entry.queue_ms),
        "first_token_ms": _ms(entry.first_token_ms),
        "total_ms": _ms(entry.total_ms),
        "cost_nanos": entry.cost_nanos,
    }


def _earliest(live_at: float | None, recorded: RunSummary | None) -> float | None:
    known = [at for at in (live_at, None if recorded is None else recorded.started_at) if at is not None]
    return min(known, default=None)


def _latest(live: RunSnapshot | None, recorded: RunSummary | None, epoch: float) -> float:
    return max(0.0 if live is None else epoch + live.last_activity_at, 0.0 if recorded is None else recorded.ended_at)


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
