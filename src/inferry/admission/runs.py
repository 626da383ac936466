"""Runs: which calls belong together, in trees, per tenant; what they use; and which of them are dead.

A run begins with its first call and is a member of one tree: a sub-run names its parent, and unknown parents are made.
A run keeps the first parent it was given: a later other one is ignored, because clients that were not written for this
gateway send ids of their own. What would make a circle, or a tree deeper than `MAX_DEPTH`, is refused.

A run is cancelled by a tombstone on it. Everything below it is covered by its lineage, also sub-runs that come later.
Runs that were idle for long are forgotten, the oldest first and never one with a job in flight; the ledger keeps them.
A call that names no run is a run of its own that is forgotten with its end.

Pure: whoever drives it owns it, and time is an argument (seconds on the gateway's clock, never going back).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from inferry.admission.facts import RunFacts, RunStatus
from inferry.admission.run import Key, Run, Totals, covered, height, tree_of, upwards
from inferry.domain.attempts import Attempt
from inferry.domain.errors import InvalidRequest, RunCancelled, RunNotFound
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Usage

MAX_DEPTH = 32
"""Runs from a leaf to its root, both counted."""
MOST_STEPS_TOLD_APART = 4096
"""Distinct steps of one run; every further call counts as one."""
ROTATIONS = 8
"""How many runs in flight one call may pass over in search of one to forget."""
PARENT_HEADER = "x-inferry-parent-run-id"

__all__ = ["MAX_DEPTH", "PARENT_HEADER", "Run", "RunFacts", "RunStatus", "Runs", "Totals", "covered"]


class Runs:
    """The runs that are known. `on_forgotten(tenant, run_id)` tells whoever else keeps something about a run."""

    def __init__(
        self,
        *,
        idle_limit_s: float = 3600.0,
        most_runs: int = 100_000,
        tombstone_s: float = 86_400.0,
        most_tombstones: int = 100_000,
        on_forgotten: Callable[[str, str], None] | None = None,
    ) -> None:
        self._idle_limit_s = idle_limit_s
        self._most_runs = most_runs
        self.tombstone_s = tombstone_s
        self._most_tombstones = most_tombstones
        self.on_forgotten = on_forgotten
        # By their last call, the oldest first; a run comes after every sub-run of it, since a call is of both.
        self._runs: OrderedDict[Key, Run] = OrderedDict()
        self._nameless: dict[Key, Run] = {}
        self._tombstones: OrderedDict[Key, float] = OrderedDict()

    def __len__(self) -> int:
        """Runs that are known and have a name."""
        return len(self._runs)

    # -- the path of a call ------------------------------------------------------------------------------------------

    def enter(self, job: InferenceJob, now: float) -> Run:
        """The job's run, with the job in flight. Raises RunCancelled or InvalidRequest; then nothing has changed."""
        key = (job.tenant, job.run_id)
        run = self._runs.get(key)
        if run is None and job.parent_run is None and job.run_id == job.job_id:
            # Most calls of clients that know nothing of runs come here: no tree, and nothing to remember.
            run = self._nameless[key] = Run(key, (job.run_id,), now, is_nameless=True, tree_in_flight=1)
            run.in_flight[job.job_id] = job
            run.own_since = run.active_since = now
            return run
        if run is None or (job.parent_run is not None and (run.parent is None or run.parent.run_id != job.parent_run)):
            run = self._placed(job, run, now)
        elif self._tombstones:
            _refuse_if_cancelled(run)
        if not run.in_flight:
            run.own_since = now
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
            node.last_at = node.called_at = now
            if not node.is_nameless:
                touch(node.key)
            node = node.parent
        if len(self._runs) > self._most_runs:
            self._forget_oldest(now, ROTATIONS)
        return run

    def left(self, run: Run, attempt: Attempt, usage: Usage, cost_nanos: int | None, now: float) -> None:
        """The job's last attempt has ended: exactly once for every job that entered and was not turned away.

        `usage` is what the whole job used, and `cost_nanos` what that costs.
        """
        job = attempt.job
        del run.in_flight[job.job_id]
        if run.is_nameless and run.parent is None:
            self._let_go(run)
            return
        run.totals.count(attempt, usage, cost_nanos)
        if len(run.steps) < MOST_STEPS_TOLD_APART:
            run.steps.add(hash(job.step_id))
        else:
            run.further_steps += 1
        self._departed(run, attempt.sent_at, now)
        if run.is_nameless:
            self._let_go(run)
        if len(self._runs) > self._most_runs:  # they were all in flight
            self._forget_oldest(now, ROTATIONS)

    def turned_away(self, run: Run, job_id: str, now: float) -> None:
        """The job was refused after all by somebody further in: instead of `left`."""
        del run.in_flight[job_id]
        run.refused += 1
        self._departed(run, None, now)
        if run.is_nameless:
            self._let_go(run)
        if len(self._runs) > self._most_runs:
            self._forget_oldest(now, ROTATIONS)

    def _departed(self, run: Run, sent_at: float | None, now: float) -> None:
        if not run.in_flight:
            run.own_active_s += now - run.own_since
        node: Run | None = run
        while node is not None:
            node.tree_in_flight -= 1
            if sent_at is not None and sent_at < node.active_since:
                sent_at = node.active_since  # it came into this tree while it ran
            if node.tree_in_flight:
                if sent_at is not None:
                    node.ran(sent_at, now)
            else:
                node.active_s += now - node.active_since
                if node.spans:
                    if sent_at is not None:
                        node.ran(sent_at, now)
                    node.running_s += sum([end - start for start, end in node.spans], 0.0)
                    node.spans.clear()
                elif sent_at is not None:
                    node.running_s += now - sent_at
                if node.finished_at is None:
                    node.idle_since = now
            node.last_at = now
            node = node.parent

    # -- trees -------------------------------------------------------------------------------------------------------

    def _placed(self, job: InferenceJob, run: Run | None, now: float) -> Run:
        """The job's run where it is new, or the parent is: made, and put into its tree."""
        tenant, parent_id = job.tenant, job.parent_run
        if run is not None and run.parent is not None:
            if self._tombstones:
                _refuse_if_cancelled(run)
            return run  # the first parent stays
        if parent_id == job.run_id:
            raise InvalidRequest(f"`{PARENT_HEADER}` names the run itself", param=PARENT_HEADER)
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
            above = (parent_id,) if parent is None else parent.lineage
            if job.run_id in above:
                raise InvalidRequest(
                    f"`{PARENT_HEADER}` would make run `{job.run_id}` a part of itself", param=PARENT_HEADER
                )
            if len(above) + (1 if run is None else height(run)) > MAX_DEPTH:
                raise InvalidRequest(
                    f"`{PARENT_HEADER}` would make a tree of runs deeper than {MAX_DEPTH}", param=PARENT_HEADER
                )
            if parent is None:
                parent = self._made(tenant, parent_id, None, now)
        if run is None:
            return self._made(tenant, job.run_id, parent, now, is_nameless=job.run_id == job.job_id)
        assert parent is not None, "a known run comes here for its parent"
        self._adopt(run, parent, now)
        return run

    def _made(self, tenant: str, run_id: str, parent: Run | None, now: float, *, is_nameless: bool = False) -> Run:
        lineage = (run_id,) if parent is None else (run_id, *parent.lineage)
        key = (tenant, run_id)
        run = Run(key, lineage, now, parent, is_nameless)
        if parent is not None:
            parent.children[run_id] = run
        (self._nameless if is_nameless else self._runs)[key] = run
        return run

    def _adopt(self, run: Run, parent: Run, now: float) -> None:
        """A run that had no parent so far gets one, with all that it has in flight."""
        run.parent = parent
        parent.children[run.run_id] = run
        for one in list(tree_of(run)):
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
            node.called_at = now
            self._runs.move_to_end(node.key)
            node = node.parent

    # -- what others do to runs --------------------------------------------------------------------------------------

    def cancel(self, tenant: str, run_id: str, now: float, *, is_known: bool = False) -> list[str]:
        """Leave a tombstone; answers with the ids of the jobs that are in flight in the whole tree.

        Raises RunNotFound, unless somebody else knows that the run was there (`is_known`).
        """
        run = self._find(tenant, run_id)
        if run is None and not is_known and (tenant, run_id) not in self._tombstones:
            raise _not_found(run_id)
        self._bury(tenant, run_id, now)
        if run is None:
            return []
        return [job_id for one in tree_of(run) for job_id in one.in_flight]

    def is_cancelled(self, run: Run) -> bool:
        """Whether it or a run it belongs to has a tombstone."""
        if not self._tombstones:
            return False
        return any(node.cancelled_at is not None for node in upwards(run))

    def has_tombstone(self, tenant: str, run_id: str) -> bool:
        """Whether the run itself was cancelled, known or not."""
        return (tenant, run_id) in self._tombstones

    def restore(self, cancelled: Iterator[Key] | list[Key], now: float) -> None:
        """Tombstones that somebody kept while this was not there."""
        for tenant, run_id in cancelled:
            self._bury(tenant, run_id, now)

    def finish(self, tenant: str, run_id: str, now: float) -> None:
        """The agent says that the run is over, and its sub-runs with it. A later call opens it again.

        Raises RunNotFound.
        """
        run = self._find(tenant, run_id)
        if run is None:
            raise _not_found(run_id)
        if run.finished_at is None and run.idle_since is not None:
            run.tool_s += now - run.idle_since
        for one in tree_of(run):
            if one.finished_at is None and (one is run or not one.tree_in_flight):
                one.finished_at = now if one is run else one.last_at
                one.idle_since = None

    # -- what they look like -----------------------------------------------------------------------------------------

    def knows(self, tenant: str, run_id: str) -> bool:
        return self._find(tenant, run_id) is not None

    def facts(
        self, tenant: str, run_id: str, now: float, sent_at: Callable[[str], float | None] | None = None
    ) -> RunFacts | None:
        """The run as it stands; None for one that is not known. `sent_at` tells when a job in flight went out."""
        run = self._find(tenant, run_id)
        return None if run is None else self._facts(run, now, sent_at)

    def newest(self, tenant: str) -> Iterator[Run]:
        """The tenant's runs that have a name, by `called_at`: the latest first."""
        for key, run in reversed(self._runs.items()):
            if key[0] == tenant:
                yield run

    def status(self, run: Run) -> RunStatus:
        if self.is_cancelled(run):
            return RunStatus.CANCELLED
        if run.tree_in_flight:
            return RunStatus.ACTIVE
        return RunStatus.IDLE if run.finished_at is None else RunStatus.FINISHED

    def _find(self, tenant: str, run_id: str) -> Run | None:
        return self._runs.get((tenant, run_id)) or self._nameless.get((tenant, run_id))

    def _facts(self, run: Run, now: float, sent_at: Callable[[str], float | None] | None) -> RunFacts:
        tree_totals, tree_runs = Totals(), 0
        sent: list[tuple[float, float]] = []
        for one in tree_of(run):
            tree_runs += 1 + one.forgotten_runs
            tree_totals.add(one.totals)
            if one.forgotten is not None:
                tree_totals.add(one.forgotten)
            if sent_at is not None:
                sent += [(then, now) for job_id in one.in_flight if (then := sent_at(job_id)) is not None]
        buried = next((node.run_id for node in upwards(run) if node.cancelled_at is not None), None)
        return RunFacts(
            tenant=run.tenant,
            run_id=run.run_id,
            lineage=run.lineage,
            status=self.status(run),
            cancelled_with=buried,
            first_at=run.first_at,
            last_at=now if run.tree_in_flight else run.last_at,
            finished_at=run.finished_at,
            in_flight=tuple(run.in_flight.values()),
            tree_in_flight=run.tree_in_flight,
            refused=run.refused,
            steps=len(run.steps) + run.further_steps,
            totals=run.totals,
            tree_totals=tree_totals,
            tree_runs=tree_runs,
            children=tuple(name for name, child in run.children.items() if not child.is_nameless),
            own_active_s=run.own_active_s + (now - run.own_since if run.in_flight else 0.0),
            active_s=run.active_s + (now - run.active_since if run.tree_in_flight else 0.0),
            running_s=run.running_s + covered(run.spans + sent),
            tool_s=run.tool_s,
            idle_s=0.0 if run.idle_since is None else now - run.idle_since,
        )

    # -- forgetting --------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> int:
        """Forget what has been idle, or dead, for long; answers with how many runs that were."""
        before = len(self._runs)
        self._forget_oldest(now, before)
        while self._tombstones:
            key, cancelled_at = next(iter(self._tombstones.items()))
            if cancelled_at + self.tombstone_s > now:
                break
            self._dig_up(key)
        return before - len(self._runs)

    def _forget_oldest(self, now: float, passes: int) -> None:
        while self._runs:
            run = next(iter(self._runs.values()))
            if len(self._runs) <= self._most_runs and run.last_at + self._idle_limit_s > now:
                return
            if not run.tree_in_flight and not run.children:
                self._let_go(run)
            elif passes:
                # It is not idle: it has waited for its calls all this time. Its parents stay behind it.
                passes -= 1
                for node in upwards(run):
                    node.last_at = node.called_at = now
                    self._runs.move_to_end(node.key)
            else:
                return

    def _let_go(self, run: Run) -> None:
        key, parent = run.key, run.parent
        if run.is_nameless:
            del self._nameless[key]
        else:
            del self._runs[key]
            if self._tombstones and self.is_cancelled(run) and key not in self._tombstones:
                # Its parent may be forgotten next: it stays dead by itself.
                self._bury(run.tenant, run.run_id, run.last_at)
        if parent is not None:
            del parent.children[run.run_id]
            if parent.forgotten is None:
                parent.forgotten = Totals()
            parent.forgotten.add(run.totals)
            if run.forgotten is not None:
                parent.forgotten.add(run.forgotten)
            parent.forgotten_runs += 1 + run.forgotten_runs
        if self.on_forgotten is not None:
            self.on_forgotten(run.tenant, run.run_id)

    def _bury(self, tenant: str, run_id: str, now: float) -> None:
        key = (tenant, run_id)
        self._tombstones[key] = now
        self._tombstones.move_to_end(key)
        run = self._find(tenant, run_id)
        if run is not None:
            run.cancelled_at = now
        if len(self._tombstones) > self._most_tombstones:
            self._dig_up(next(iter(self._tombstones)))

    def _dig_up(self, key: Key) -> None:
        del self._tombstones[key]
        run = self._runs.get(key)
        if run is not None:
            run.cancelled_at = None


def _refuse_if_cancelled(run: Run, below: str | None = None) -> None:
    node: Run | None = run
    while node is not None:
        if node.cancelled_at is not None:
            raise _cancelled(below or run.run_id, node.run_id)
        node = node.parent


def _cancelled(run_id: str, buried: str) -> RunCancelled:
    if run_id == buried:
        return RunCancelled(f"run `{run_id}` was cancelled")
    return RunCancelled(f"run `{buried}` was cancelled, and run `{run_id}` is a part of it")


def _not_found(run_id: str) -> RunNotFound:
    return RunNotFound(f"there is no run `{run_id}`")
