"""Runs per tenant, in trees: which calls belong together, what they use, and which runs are cancelled.

A run begins with its first call and belongs to one tree: a sub-run names its parent, and unknown parents are created. A
run keeps its first parent; a later, different one is ignored, because clients not written for this gateway send ids of
their own. A parent that would form a cycle, or a tree deeper than `MAX_DEPTH`, is refused.

A tombstone cancels a run with all its sub-runs, later ones included. Idle runs are forgotten, the oldest first, and
never a run with a job in flight; the ledger keeps them. A call that names no run is a run of its own, forgotten at its
end.

Pure: time is an argument, in seconds on the gateway's clock, and never goes back.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from inferry.domain.attempts import Attempt
from inferry.domain.errors import InvalidRequest, RunCancelled, RunNotFound
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Usage
from inferry.runs.run import Run, RunKey, Totals, height, self_and_ancestors, subtree, union_length
from inferry.runs.snapshot import RunSnapshot, RunStatus, snapshot_of

MAX_DEPTH = 32
"""Runs from a leaf to its root, both counted."""
MAX_DISTINCT_STEPS = 4096
"""Distinct steps counted for one run; beyond, every call counts as a step."""
MAX_EVICTION_SKIPS = 8
"""Runs in flight that one call may skip in search of a run to evict."""
MAX_LISTED_RUNS = 500
"""Runs that a listing of all tenants looks at."""
PARENT_HEADER = "x-inferry-parent-run-id"

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
            _refuse_if_cancelled(run)
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
        self._remove_in_flight(run, attempt.sent_at, now)
        if run.is_anonymous:
            self._evict(run)
        if len(self._runs) > self._max_runs:  # all of them were in flight
            self._evict_oldest(now, MAX_EVICTION_SKIPS)

    def reject(self, run: Run, job_id: str, now: float) -> None:
        """The job was refused after its admission: instead of `job_ended`."""
        del run.in_flight[job_id]
        run.refused += 1
        self._remove_in_flight(run, None, now)
        if run.is_anonymous:
            self._evict(run)
        if len(self._runs) > self._max_runs:
            self._evict_oldest(now, MAX_EVICTION_SKIPS)

    def _remove_in_flight(self, run: Run, sent_at: float | None, now: float) -> None:
        if not run.in_flight:
            run.own_active_s += now - run.own_active_since
        node: Run | None = run
        while node is not None:
            node.tree_in_flight -= 1
            if sent_at is not None and sent_at < node.active_since:
                sent_at = node.active_since  # the run joined this tree while the job ran
            if node.tree_in_flight:
                if sent_at is not None:
                    node.add_running_span(sent_at, now)
            else:
                node.active_s += now - node.active_since
                if node.spans:
                    if sent_at is not None:
                        node.add_running_span(sent_at, now)
                    node.running_s += sum([end - start for start, end in node.spans], 0.0)
                    node.spans.clear()
                elif sent_at is not None:
                    node.running_s += now - sent_at
                if node.finished_at is None:
                    node.idle_since = now
            node.last_activity_at = now
            node = node.parent

    # -- trees -------------------------------------------------------------------------------------------------------

    def _attach(self, job: InferenceJob, run: Run | None, now: float) -> Run:
        """The run of a job whose run or parent is new, created and placed in its tree."""
        tenant, parent_id = job.tenant, job.parent_run
        if run is not None and run.parent is not None:
            if self._tombstones:
                _refuse_if_cancelled(run)
            return run  # the first parent stays
        if parent_id == job.run_id:
            raise InvalidRequest(f"`{PARENT_HEADER}` must not name the run itself", param=PARENT_HEADER)
        parent = None if parent_id is None else self._runs.get((tenant, parent_id))
        if self._tombstones:
            if run is not None:
                _refuse_if_cancelled(run)
            for one in (job.run_id, parent_id):
                if one is not None and (tenant, one) in self._tombstones:
                    raise _cancelled(job.run_id, one)
            if parent is not None:
                _refuse_if_cancelled(parent, job.run_id)
        if parent_id is not None:
            ancestor_ids = (parent_id,) if parent is None else parent.lineage
            if job.run_id in ancestor_ids:
                raise InvalidRequest(
                    f"`{PARENT_HEADER}` would make run `{job.run_id}` its own ancestor", param=PARENT_HEADER
                )
            if len(ancestor_ids) + (1 if run is None else height(run)) > MAX_DEPTH:
                raise InvalidRequest(
                    f"`{PARENT_HEADER}` would make a tree of runs deeper than {MAX_DEPTH}", param=PARENT_HEADER
                )
            if parent is None:
                parent = self._create(tenant, parent_id, None, now)
        if run is None:
            return self._create(tenant, job.run_id, parent, now, is_anonymous=job.run_id == job.job_id)
        assert parent is not None, "a known run comes here for its parent"
        self._set_parent(run, parent, now)
        return run

    def _create(self, tenant: str, run_id: str, parent: Run | None, now: float, *, is_anonymous: bool = False) -> Run:
        lineage = (run_id,) if parent is None else (run_id, *parent.lineage)
        key = (tenant, run_id)
        run = Run(key, lineage, now, parent, is_anonymous)
        if parent is not None:
            parent.children[run_id] = run
        (self._anonymous if is_anonymous else self._runs)[key] = run
        return run

    def _set_parent(self, run: Run, parent: Run, now: float) -> None:
        """Give a parent to a run that had none, with its jobs in flight."""
        run.parent = parent
        parent.children[run.run_id] = run
        for one in list(subtree(run)):
            assert one.parent is not None
            one.lineage = (one.run_id, *one.parent.lineage)
        node: Run | None = parent
        while node is not None:
            if run.tree_in_flight:
                if not node.tree_in_flight:
                    node.active_since = now
                    if node.idle_since is not None:
                        node.tool_s += now - node.idle_since
                        node.idle_since = None
                node.tree_in_flight += run.tree_in_flight
            node.last_call_at = now
            self._runs.move_to_end(node.key)
            node = node.parent

    # -- cancel and finish -------------------------------------------------------------------------------------------

    def cancel(self, tenant: str, run_id: str, now: float, *, is_known: bool = False) -> list[str]:
        """Add a tombstone; returns the ids of the jobs in flight in the whole tree.

        Raises RunNotFound, unless the run is known from the ledger (`is_known`).
        """
        run = self._find(tenant, run_id)
        if run is None and not is_known and (tenant, run_id) not in self._tombstones:
            raise _not_found(run_id)
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
            raise _not_found(run_id)
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
        """Forget idle runs and old tombstones; returns the number of runs."""
        before = len(self._runs)
        self._evict_oldest(now, before)
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
            del parent.children[run.run_id]
            if parent.evicted_totals is None:
                parent.evicted_totals = Totals()
            parent.evicted_totals.add(run.totals)
            if run.evicted_totals is not None:
                parent.evicted_totals.add(run.evicted_totals)
            parent.evicted_runs += 1 + run.evicted_runs
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


def _refuse_if_cancelled(run: Run, child_run_id: str | None = None) -> None:
    node: Run | None = run
    while node is not None:
        if node.cancelled_at is not None:
            raise _cancelled(child_run_id or run.run_id, node.run_id)
        node = node.parent


def _cancelled(run_id: str, cancelled_run_id: str) -> RunCancelled:
    if run_id == cancelled_run_id:
        return RunCancelled(f"run `{run_id}` was cancelled")
    return RunCancelled(f"run `{cancelled_run_id}` was cancelled, and run `{run_id}` is a part of it")


def _not_found(run_id: str) -> RunNotFound:
    return RunNotFound(f"there is no run `{run_id}`")
