"""Refusals of calls by their runs."""

from inferry.domain.errors import RunCancelled, RunNotFound
from inferry.runs.run import Run


def refuse_if_cancelled(run: Run) -> None:
    """Raise RunCancelled if the run or one of its ancestors was cancelled."""
    node: Run | None = run
    while node is not None:
        if node.cancelled_at is not None:
            raise cancelled_error(run.run_id, node.run_id)
        node = node.parent


def cancelled_error(run_id: str, cancelled_run_id: str) -> RunCancelled:
    if run_id == cancelled_run_id:
        return RunCancelled(f"run `{run_id}` was cancelled")
    return RunCancelled(f"run `{cancelled_run_id}` was cancelled, and run `{run_id}` is a part of it")


def not_found_error(run_id: str) -> RunNotFound:
    return RunNotFound(f"there is no run `{run_id}`")
