"""Runs per tenant, in trees: which calls belong together, what they use, and which runs are cancelled.

A run begins with its first call and belongs to one tree: a sub-run names its parent, and unknown parents are created. A
run keeps its first parent; a later, different one is ignored, because clients not written for this gateway send ids of
their own. A parent that would form a cycle, or a tree deeper than `MAX_DEPTH`, is refused.

A tombstone cancels a run with all its sub-runs, later ones included. Idle runs are forgotten, the oldest first, and
never a run with a job in flight; the ledger keeps them. The parent of a forgotten run stays known for a day after its
last call (`ParentLinks`), like its account. A call that names no run is a run of its own, forgotten at its end.

Pure: time is an argument, in seconds on the gateway's clock, and never goes back.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from inferry.domain.attempts import Attempt
from inferry.domain.errors import InvalidRequest
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Usage
from inferry.runs.parent_links import ParentLinks
from inferry.runs.refusals import cancelled_error, not_found_error, refuse_if_cancelled
from inferry.runs.run import (
    Run,
    RunKey,
    Totals,
    height,
    join_tree,
    remove_in_flight,
    self_and_ancestors,
    subtree,
    union_length,
)
from inferry.runs.snapshot import RunSnapshot, RunStatus, snapshot_of

MAX_DEPTH: Final = 32
"""Runs from a leaf to its root, both counted."""
MAX_DISTINCT_STEPS: Final = 4096
"""Distinct steps counted for one run; beyond, every call counts as a step."""
MAX_EVICTION_SKIPS: Final = 8
"""Runs in flight that one call may skip in search of a run to evict."""
MAX_LISTED_RUNS: Final = 500
"""Runs that a listing of all tenants looks at."""
PARENT_HEADER: Final = "x-inferry-parent-run-id"

__all__ = ["MAX_DEPTH", "PARENT_HEADER", "Run", "RunRegistry", "RunSnapshot", "RunStatus", "Totals", "union_length"]


class RunRegistry:
    """The known runs. `on_evicted(tenant, run_id)` is called when a run is forgotten."""

    def __init__(
        self,
        *,
        idle_timeout_s: float = 3600.0,
        max_runs: int = 100_000,
        tombstone_s: float = 86_400.0,
        max_tombstones: int = 100_000,
        link_s: float = 86_400.0,
        max_links: int = 100_000,
        on_evicted: Callable[[str, str], None] | None = None,
    ) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._max_runs = max_runs
        self.tombstone_s = tombstone_s
        self._max_tombstones = max_tombstones
        self.on_evicted = on_evicted
        # By last call, the oldest first. A run comes after its sub-runs, since their calls count for both.
        self._runs: OrderedDict[RunKey, Run] = OrderedDict()
        self._anonymous: dict[RunKey, Run] = {}
        self._tombstones: OrderedDict[RunKey, float] = OrderedDict()
        # Of runs that are not in `_runs`: the lineage of those is complete.
        self._links = ParentLinks(max_links, link_s)

    def __len__(self) -> int:
        """Known runs with a name."""
        return len(self._runs)

    # -- calls -------------------------------------------------------------------------------------------------------

    def admit(self, job: InferenceJob, now: float) -> Run:
        """The job's run, with the job in flight. Raises RunCancelled or InvalidRequest; then nothing has changed."""
        key = (job.tenant, job.run_id)
        run = self._runs.get(key)
        if run is None and job.parent_run is None and job.run_id == job.job_id:
            # The common case of clients without run ids: no tree, and nothing to keep.
            run = self._anonymous[key] = Run(key, (job.run_id,), now, is_anonymous=True, tree_in_flight=1)
            run.in_flight[job.job_id] = job
            run.own_active_since = run.active_since = now
            return run
        if run is None or (job.parent_run is not None and (run.parent is None or run.parent.run_id != job.parent_run)):
            run = self._attach(job, run, now)
        elif self._tombstones:
            refuse_if_cancelled(run)
        if not run.in_flight:
            run.own_active_since = now
        run.in_flight[job.job_id] = job
        touch = self._runs.move_to_end
        node: Run | None = run
        while node is not None:
            if not node.tree_in_flight:
                node.active_since = now
                if node.idle_since is not None:
                    node.tool_s += now - node.idle_since
                    node.idle_since = None
            node.tree_in_flight += 1
            node.finished_at = None
            node.last_activity_at = node.last_call_at = now
            if not node.is_anonymous:
                touch(node.key)
            node = node.parent
        if len(self._runs) > self._max_runs:
            self._evict_oldest(now, MAX_EVICTION_SKIPS)
        return run

    def job_ended(self, run: Run, attempt: Attempt, usage: Usage, cost_nanos: int | None, now: float) -> None:
        """The job's last attempt has ended: exactly once for every admitted job that was not rejected.

        `usage` and `cost_nanos` are those of the whole job.
        """
        job = attempt.job
        del run.in_flight[job.job_id]
        if run.is_anonymous and run.parent is None:
            self._evict(run)
            return
        run.totals.count(attempt, usage, cost_nanos)
        if len(run.steps) < MAX_DISTINCT_STEPS:
            run.steps.add(hash(job.step_id))
        else:
            run.extra_steps += 1
        remove_in_flight(run, attempt.sent_at, now)
        if run.is_anonymous:
            self._evict(run)
        if len(self._runs) > self._max_runs:  # all of them were in flight
            self._evict_oldest(now, MAX_EVICTION_SKIPS)

    def reject(self, run: Run, job_id: str, now: float) -> None:
        """The job was refused after its admission: instead of `job_ended`."""
        del run.in_flight[job_id]
        run.refused += 1
        remove_in_flight(run, None, now)
        if run.is_anonymous:
            self._evict(run)
        if len(self._runs) > self._max_runs:
            self._evict_oldest(now, MAX_EVICTION_SKIPS)

    # -- trees -------------------------------------------------------------------------------------------------------

    def learn_parent(self, tenant: str, run_id: str, parent_id: str, now: float) -> Run | None:
        """The run's parent as the ledger or another gateway has it. A run keeps its first parent, and a parent that
        would form a cycle is ignored. Returns the run if it is known and was a root until now.
        """
        key = (tenant, run_id)
        run = self._runs.get(key)
        if self._links.parent_of(key) is not None or (run is not None and run.parent is not None):
            return None
        ancestor_ids = self._lineage(tenant, parent_id)
        if run_id in ancestor_ids:
            return None
        if run is None:
            self._links.add(key, parent_id, now)
            return None
        if len(ancestor_ids) + height(run) > MAX_DEPTH:
            return None
        self._set_parent(run, self._find_or_create(tenant, ancestor_ids, now), now)
        return run

    def _lineage(self, tenant: str, run_id: str) -> tuple[str, ...]:
        """The run and its ancestors, known or not; of a lineage that is too deep, more than may be."""
        found: list[str] = []
        above: str | None = run_id
        while above is not None and len(found) <= MAX_DEPTH:
            run = self._runs.get((tenant, above))
            if run is not None:
                return (*found, *run.lineage)
            found.append(above)
            above = self._links.parent_of((tenant, above))
        return tuple(found)

    def _attach(self, job: InferenceJob, run: Run | None, now: float) -> Run:
        """The run of a job whose run or parent is new, created and placed in its tree."""
        tenant, run_id, parent_id = job.tenant, job.run_id, job.parent_run
        if run is not None and run.parent is not None:
            if self._tombstones:
                refuse_if_cancelled(run)
            return run  # the first parent stays
        if parent_id == run_id:
            raise InvalidRequest(f"`{PARENT_HEADER}` must not name the run itself", param=PARENT_HEADER)
        if run is None:
            parent_id = self._links.parent_of((tenant, run_id)) or parent_id
        ancestor_ids = () if parent_id is None else self._lineage(tenant, parent_id)
        if self._tombstones:
            for one in (run_id, *ancestor_ids):
                if (tenant, one) in self._tombstones:
                    raise cancelled_error(run_id, one)
        if run_id in ancestor_ids:
            raise InvalidRequest(f"`{PARENT_HEADER}` would make run `{run_id}` its own ancestor", param=PARENT_HEADER)
        if len(ancestor_ids) + (1 if run is None else height(run)) > MAX_DEPTH:
            raise InvalidRequest(
                f"`{PARENT_HEADER}` would make a tree of runs deeper than {MAX_DEPTH}", param=PARENT_HEADER
            )
        parent = self._find_or_create(tenant, ancestor_ids, now) if ancestor_ids else None
        if run is None:
            return self._create(tenant, run_id, parent, now, is_anonymous=run_id == job.job_id)
        assert parent is not None, "a known run comes here for its parent"
        self._set_parent(run, parent, now)
        return run

    def _find_or_create(self, tenant: str, lineage: tuple[str, ...], now: float) -> Run:
        """The first run of the lineage, in its tree."""
        run: Run | None = None
        for run_id in reversed(lineage):
            run = self._runs.get((tenant, run_id)) or self._create(tenant, run_id, run, now)
        assert run is not None, "a lineage is not empty"
        return run

    def _create(self, tenant: str, run_id: str, parent: Run | None, now: float, *, is_anonymous: bool = False) -> Run:
        lineage = (run_id,) if parent is None else (run_id, *parent.lineage)
        key = (tenant, run_id)
        run = Run(key, lineage, now, parent, is_anonymous)
        run.cancelled_at = self._tombstones.get(key)
        self._links.remove(key)
        if parent is not None:
            parent.children[run_id] = run
        (self._anonymous if is_anonymous else self._runs)[key] = run
        return run

    def _set_parent(self, run: Run, parent: Run, now: float) -> None:
        join_tree(run, parent, now)
        for node in self_and_ancestors(parent):
            self._runs.move_to_end(node.key)

    # -- cancel and finish -------------------------------------------------------------------------------------------

    def cancel(self, tenant: str, run_id: str, now: float, *, is_known: bool = False) -> list[str]:
        """Add a tombstone; returns the ids of the jobs in flight in the whole tree.

        Raises RunNotFound, unless the run is known from the ledger (`is_known`).
        """
        run = self._find(tenant, run_id)
        if run is None and not is_known and (tenant, run_id) not in self._tombstones:
            raise not_found_error(run_id)
        self._add_tombstone(tenant, run_id, now)
        if run is None:
            return []
        return [job_id for one in subtree(run) for job_id in one.in_flight]

    def is_cancelled(self, run: Run) -> bool:
        """Whether the run or one of its ancestors has a tombstone."""
        if not self._tombstones:
            return False
        return any(node.cancelled_at is not None for node in self_and_ancestors(run))

    def has_tombstone(self, tenant: str, run_id: str) -> bool:
        """Whether the run itself was cancelled, known or not."""
        return (tenant, run_id) in self._tombstones

    def restore(self, cancelled: Iterator[RunKey] | list[RunKey], now: float) -> None:
        """Add tombstones that the ledger has kept."""
        for tenant, run_id in cancelled:
            self._add_tombstone(tenant, run_id, now)

    def finish(self, tenant: str, run_id: str, now: float) -> None:
        """The agent says that the run and its sub-runs are over. A later call reopens it.

        Raises RunNotFound.
        """
        run = self._find(tenant, run_id)
        if run is None:
            raise not_found_error(run_id)
        if run.finished_at is None and run.idle_since is not None:
            run.tool_s += now - run.idle_since
        for one in subtree(run):
            if one.finished_at is None and (one is run or not one.tree_in_flight):
                one.finished_at = now if one is run else one.last_activity_at
                one.idle_since = None

    # -- queries -----------------------------------------------------------------------------------------------------

    def tree_of(self, tenant: str, run_id: str) -> list[str]:
        """The ids of the run and of all runs below it; empty for an unknown run."""
        run = self._find(tenant, run_id)
        return [] if run is None else [one.key[1] for one in subtree(run)]

    def has_run(self, tenant: str, run_id: str) -> bool:
        return self._find(tenant, run_id) is not None

    def parent_of(self, tenant: str, run_id: str) -> str | None:
        """The run's parent, also that of a run that is not in memory; None if it has none or it is not known."""
        run = self._runs.get((tenant, run_id))
        if run is None:
            return self._links.parent_of((tenant, run_id))
        return None if run.parent is None else run.parent.run_id

    def root_of(self, tenant: str, run_id: str) -> str:
        run = self._find(tenant, run_id)
        return run_id if run is None else run.lineage[-1]

    def snapshot(
        self, tenant: str, run_id: str, now: float, sent_at: Callable[[str], float | None] | None = None
    ) -> RunSnapshot | None:
        """The run at `now`; None for an unknown run. `sent_at` tells when a job in flight was sent."""
        run = self._find(tenant, run_id)
        return None if run is None else snapshot_of(run, self.status(run), now, sent_at)

    def newest_first(self, tenant: str) -> Iterator[Run]:
        """The tenant's named runs by `last_call_at`, the latest first."""
        for key, run in reversed(self._runs.items()):
            if key[0] == tenant:
                yield run

    def newest_of_all(self, limit: int) -> list[Run]:
        """Roots of all tenants by their last call, the latest first: those in flight, then the others.

        Of each kind at most `limit`, found among the latest `MAX_LISTED_RUNS`. Calls without a run are listed while
        they are in flight.
        """
        latest = [*islice(reversed(self._anonymous.values()), limit)]
        latest += islice(reversed(self._runs.values()), MAX_LISTED_RUNS)
        roots = [run for run in latest if run.parent is None]
        active = [run for run in roots if run.tree_in_flight]
        return active[:limit] + [run for run in roots if not run.tree_in_flight][:limit]

    def status(self, run: Run) -> RunStatus:
        if self.is_cancelled(run):
            return RunStatus.CANCELLED
        if run.tree_in_flight:
            return RunStatus.ACTIVE
        return RunStatus.IDLE if run.finished_at is None else RunStatus.FINISHED

    def _find(self, tenant: str, run_id: str) -> Run | None:
        return self._runs.get((tenant, run_id)) or self._anonymous.get((tenant, run_id))

    # -- eviction ----------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> int:
        """Forget idle runs, old tombstones and old parents; returns the number of runs."""
        before = len(self._runs)
        self._evict_oldest(now, before)
        self._links.expire(now)
        while self._tombstones:
            key, cancelled_at = next(iter(self._tombstones.items()))
            if cancelled_at + self.tombstone_s > now:
                break
            self._remove_tombstone(key)
        return before - len(self._runs)

    def _evict_oldest(self, now: float, skips: int) -> None:
        while self._runs:
            run = next(iter(self._runs.values()))
            if len(self._runs) <= self._max_runs and run.last_activity_at + self._idle_timeout_s > now:
                return
            if not run.tree_in_flight and not run.children:
                self._evict(run)
            elif skips:
                # Not idle: it waits for its calls. Its ancestors stay behind it.
                skips -= 1
                for node in self_and_ancestors(run):
                    node.last_activity_at = node.last_call_at = now
                    self._runs.move_to_end(node.key)
            else:
                return

    def _evict(self, run: Run) -> None:
        key, parent = run.key, run.parent
        if run.is_anonymous:
            del self._anonymous[key]
        else:
            del self._runs[key]
            if self._tombstones and self.is_cancelled(run) and key not in self._tombstones:
                # Its parent may be forgotten next: it needs a tombstone of its own.
                self._add_tombstone(run.tenant, run.run_id, run.last_activity_at)
            if parent is not None:
                self._links.add(key, parent.run_id, run.last_activity_at)
        if parent is not None:
            parent.forget_child(run)
        if self.on_evicted is not None:
            self.on_evicted(run.tenant, run.run_id)

    def _add_tombstone(self, tenant: str, run_id: str, now: float) -> None:
        key = (tenant, run_id)
        self._tombstones[key] = now
        self._tombstones.move_to_end(key)
        run = self._find(tenant, run_id)
        if run is not None:
            run.cancelled_at = now
        if len(self._tombstones) > self._max_tombstones:
            self._remove_tombstone(next(iter(self._tombstones)))

    def _remove_tombstone(self, key: RunKey) -> None:
        del self._tombstones[key]
        run = self._runs.get(key)
        if run is not None:
            run.cancelled_at = None
