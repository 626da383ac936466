"""The run registry under any sequence of calls, cancels and ends, against a simple model."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferry.domain.errors import (
    InvalidRequest,
    RunCancelled,
    RunNotFound,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Usage
from inferry.runs.registry import MAX_DEPTH, Run, RunRegistry, Totals
from runs.builders import a_call, ended


class RunsMachine(RuleBasedStateMachine):
    """Whatever comes: the registry agrees with a list of who is in flight, and with sums made by hand."""

    names = st.sampled_from(["a", "b", "c", "d", "e"])

    def __init__(self) -> None:
        super().__init__()
        self.runs = RunRegistry(
            idle_timeout_s=20.0, max_runs=4, tombstone_s=60.0, max_tombstones=3, on_evicted=self.forgot
        )
        self.now = 0.0
        self.inside: list[tuple[Run, InferenceJob]] = []
        self.came_at: dict[str, float] = {}

    def forgot(self, tenant: str, run_id: str) -> None:
        assert not any(run.run_id == run_id and job.job_id != run_id for run, job in self.inside), "it has jobs"

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(run=st.none() | names, parent=st.none() | names)
    def a_call_comes(self, run: str | None, parent: str | None) -> None:
        job = a_call(run, parent)
        known = len(self.runs)
        try:
            found = self.runs.admit(job, self.now)
        except (RunCancelled, InvalidRequest):
            assert len(self.runs) == known, "a refusal leaves no trace"
            return
        assert found.lineage[0] == job.run_id
        assert len(set(found.lineage)) == len(found.lineage) <= MAX_DEPTH
        self.inside.append((found, job))
        self.came_at[job.job_id] = self.now

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), was_sent=st.booleans(), is_refused=st.booleans())
    def a_call_ends(self, data: st.DataObject, was_sent: bool, is_refused: bool) -> None:
        run, job = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        if is_refused:
            self.runs.reject(run, job.job_id, self.now)
        else:
            sent_at = self.came_at[job.job_id] if was_sent else None
            self.runs.job_ended(run, ended(job, sent_at=sent_at), Usage(output_tokens=1), 1, self.now)

    @rule(run=names)
    def somebody_cancels(self, run: str) -> None:
        expected = {job.job_id for one, job in self.inside if run in one.lineage}
        try:
            found = self.runs.cancel("a", run, self.now)
        except RunNotFound:
            assert not expected
            return
        assert set(found) == expected
        for one, _ in self.inside:
            if run in one.lineage:
                assert self.runs.is_cancelled(one), "a tombstone covers everything below"

    @rule(run=names)
    def somebody_finishes(self, run: str) -> None:
        if self.runs.has_run("a", run):
            self.runs.finish("a", run, self.now)

    @rule()
    def time_is_up_for_some(self) -> None:
        self.runs.expire(self.now)

    @invariant()
    def figures_agree(self) -> None:
        known = list(self.runs.newest_first("a"))
        for run in known:
            below = [job for one, job in self.inside if run.run_id in one.lineage]
            assert run.tree_in_flight == len(below)
            assert set(run.in_flight) == {job.job_id for one, job in self.inside if one is run}
            snapshot = self.runs.snapshot("a", run.run_id, self.now)
            assert snapshot is not None
            wall = self.now - snapshot.first_call_at
            assert 0 <= snapshot.running_s <= snapshot.active_s + 1e-9
            assert snapshot.own_active_s <= snapshot.active_s + 1e-9
            assert snapshot.active_s + snapshot.tool_s + snapshot.idle_s <= wall + 1e-9
            parts = [self.runs.snapshot("a", name, self.now) for name in snapshot.children]
            gone = run.evicted_totals or Totals()
            nameless = sum(child.totals.jobs for child in run.children.values() if child.is_anonymous)
            assert snapshot.tree_totals.jobs == snapshot.totals.jobs + gone.jobs + nameless + sum(
                part.tree_totals.jobs for part in parts if part is not None
            )
            for name in snapshot.children:
                assert self.runs.has_run("a", name), "a known run's sub-runs are known, or summed up"
        order = {run.run_id: place for place, run in enumerate(known)}
        for run in known:
            assert run.parent is None or order[run.parent.run_id] < order[run.run_id]
        assert len(known) <= max(4, len({name for one, _ in self.inside for name in one.lineage}) + 1)


RunsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


TestRuns = RunsMachine.TestCase
