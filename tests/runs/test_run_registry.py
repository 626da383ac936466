"""Runs: trees, tombstones, what is in flight, what it used, and what is forgotten."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferry.domain.attempts import Attempt
from inferry.domain.errors import (
    ClientClosed,
    GatewayError,
    InvalidRequest,
    QueueTimeout,
    RunCancelled,
    RunNotFound,
    WorkerLost,
)
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Done, Failed, FinishReason, Usage
from inferry.domain.values import replace
from inferry.runs.registry import MAX_DEPTH, PARENT_HEADER, Run, RunRegistry, RunStatus, Totals, union_length
from support.builders import a_job

_numbers = itertools.count()


def a_call(run: str | None, parent: str | None = None, *, tenant: str = "a", step: str | None = None) -> InferenceJob:
    job_id = f"call-{next(_numbers)}"
    job = a_job(job_id, tenant=tenant, run_id=job_id if run is None else run, step_id=step)
    return replace(job, parent_run=parent)


def ended(job: InferenceJob, *, sent_at: float | None = None, error: GatewayError | None = None) -> Attempt:
    attempt = Attempt(job)
    attempt.sent_at = sent_at
    usage = Usage()
    attempt.end = Done(job.job_id, FinishReason.STOP, usage) if error is None else Failed(job.job_id, error)
    return attempt


def call(runs: RunRegistry, job: InferenceJob, start: float, end: float, sent_at: float | None = None) -> Run:
    run = runs.admit(job, start)
    runs.job_ended(run, ended(job, sent_at=sent_at), Usage(10, 4, 5), 7, end)
    return run


# -- trees -----------------------------------------------------------------------------------------------------------


def test_a_lineage_goes_from_the_run_to_its_root_and_unknown_parents_are_made() -> None:
    runs = RunRegistry()
    assert runs.admit(a_call("child", "parent"), 0.0).lineage == ("child", "parent")
    assert runs.admit(a_call("grandchild", "child"), 1.0).lineage == ("grandchild", "child", "parent")
    assert runs.has_run("a", "parent")
    assert not runs.has_run("b", "parent")


def test_a_run_gets_its_parent_when_it_first_names_one_and_takes_along_what_is_below_it() -> None:
    runs = RunRegistry()
    leaf = runs.admit(a_call("leaf", "middle"), 0.0)
    nameless = runs.admit(a_call(None, "middle"), 0.0)
    middle = runs.admit(a_call("middle", "root"), 1.0)
    assert leaf.lineage == ("leaf", "middle", "root")
    assert nameless.lineage[1:] == ("middle", "root")
    assert middle.parent is not None
    assert middle.parent.tree_in_flight == 3


def test_a_run_keeps_its_first_parent_whatever_later_calls_say() -> None:
    runs = RunRegistry()
    runs.admit(a_call("run", "first"), 0.0)
    assert runs.admit(a_call("run", "second"), 1.0).lineage == ("run", "first")
    assert runs.admit(a_call("run"), 2.0).lineage == ("run", "first")
    assert not runs.has_run("a", "second")


@pytest.mark.parametrize("chain", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_circle_is_refused_and_leaves_no_trace(chain: list[str]) -> None:
    runs = RunRegistry()
    for child, parent in itertools.pairwise(chain):
        runs.admit(a_call(child, parent), 0.0)
    before = len(runs)
    with pytest.raises(InvalidRequest) as refusal:
        runs.admit(a_call(chain[-1], chain[0]), 1.0)
    assert refusal.value.param == PARENT_HEADER
    assert len(runs) == before


def test_a_tree_is_no_deeper_than_its_limit_from_either_end() -> None:
    runs = RunRegistry()
    for depth in range(1, MAX_DEPTH):
        runs.admit(a_call(f"run-{depth}", f"run-{depth - 1}"), 0.0)
    with pytest.raises(InvalidRequest, match="deeper"):
        runs.admit(a_call("too-deep", f"run-{MAX_DEPTH - 1}"), 0.0)
    with pytest.raises(InvalidRequest, match="deeper"):
        runs.admit(a_call("run-0", "above"), 0.0)
    assert len(runs) == MAX_DEPTH


# -- tombstones ------------------------------------------------------------------------------------------------------


def test_a_cancel_answers_with_everything_in_flight_in_the_tree_and_nothing_else() -> None:
    runs = RunRegistry()
    calls = [a_call("root"), a_call("child", "root"), a_call("grandchild", "child"), a_call(None, "child")]
    others = [a_call("other"), a_call("root", tenant="b"), a_call(None)]
    for one in calls + others:
        runs.admit(one, 0.0)
    over = call(runs, a_call("root"), 0.0, 1.0)
    assert sorted(runs.cancel("a", "root", 2.0)) == sorted(one.job_id for one in calls)
    assert runs.is_cancelled(over)
    assert [one.job_id for one in others] == [
        job_id
        for tenant, name in (("a", "other"), ("b", "root"), ("a", others[2].run_id))
        for job_id in runs.cancel(tenant, name, 3.0)
    ]


def test_nothing_of_a_cancelled_run_enters_and_the_refusal_names_the_run() -> None:
    runs = RunRegistry()
    child = runs.admit(a_call("child", "root"), 0.0)
    runs.cancel("a", "root", 1.0)
    for late in (
        a_call("root"),
        a_call("child"),
        a_call("new", "child"),
        a_call("newer", "root"),
        a_call(None, "root"),
    ):
        with pytest.raises(RunCancelled, match="`root`"):
            runs.admit(late, 2.0)
    assert child.tree_in_flight == 1
    runs.admit(a_call("root", tenant="b"), 2.0)


def test_a_sub_run_is_cancelled_alone() -> None:
    runs = RunRegistry()
    runs.admit(a_call("child", "root"), 0.0)
    runs.cancel("a", "child", 1.0)
    runs.admit(a_call("root"), 2.0)
    runs.admit(a_call("sibling", "root"), 2.0)
    with pytest.raises(RunCancelled):
        runs.admit(a_call("child", "root"), 2.0)


def test_what_nobody_knows_cannot_be_cancelled_unless_somebody_else_does() -> None:
    runs = RunRegistry()
    with pytest.raises(RunNotFound):
        runs.cancel("a", "run", 0.0)
    assert runs.cancel("a", "run", 0.0, is_known=True) == []
    assert runs.cancel("a", "run", 1.0) == [], "the tombstone is known"
    with pytest.raises(RunCancelled):
        runs.admit(a_call("run"), 2.0)
    with pytest.raises(RunCancelled):
        runs.admit(a_call("child", "run"), 2.0)


def test_a_tombstone_outlives_its_run_and_those_of_its_sub_runs_too() -> None:
    runs = RunRegistry(idle_timeout_s=10.0, tombstone_s=1000.0)
    call(runs, a_call("child", "root"), 0.0, 1.0)
    runs.cancel("a", "root", 2.0)
    assert runs.expire(500.0) == 2
    assert len(runs) == 0
    for late in ("root", "child"):
        with pytest.raises(RunCancelled):
            runs.admit(a_call(late), 500.0)
    runs.expire(2000.0)
    runs.admit(a_call("root"), 2000.0)
    runs.admit(a_call("child"), 2000.0)


def test_tombstones_are_bounded_and_a_run_whose_own_is_gone_may_go_on() -> None:
    runs = RunRegistry(max_tombstones=3)
    for number in range(5):
        runs.cancel("a", f"run-{number}", float(number), is_known=True)
    assert [runs.has_tombstone("a", f"run-{number}") for number in range(5)] == [False, False, True, True, True]
    runs.admit(a_call("run-0"), 10.0)


# -- what is counted -------------------------------------------------------------------------------------------------


def test_ends_are_counted_by_how_they_ended_and_steps_once() -> None:
    runs = RunRegistry()
    for error in (None, None, ClientClosed("x"), RunCancelled("x"), QueueTimeout("x"), WorkerLost("x")):
        job = a_call("run", step="same")
        run = runs.admit(job, 0.0)
        runs.job_ended(run, ended(job, sent_at=0.25 if error is None else None, error=error), Usage(10, 4, 5), 3, 1.0)
    snapshot = runs.snapshot("a", "run", 1.0)
    assert snapshot is not None
    assert snapshot.steps == 1
    assert snapshot.totals == Totals(
        jobs=6, done=2, cancelled=2, expired=1, failed=1, prompt_tokens=60, cached_tokens=24, output_tokens=30,
        cost_nanos=18, waits=2, wait_ms=500.0, max_wait_ms=250.0,
    )  # fmt: skip


def test_a_job_leaves_once() -> None:
    runs = RunRegistry()
    job = a_call("run")
    run = call(runs, job, 0.0, 1.0)
    with pytest.raises(KeyError):
        runs.job_ended(run, ended(job), Usage(), None, 2.0)
    assert run.tree_in_flight == 0


def test_a_rejected_job_counts_only_as_refused() -> None:
    runs = RunRegistry()
    job = a_call("run", "root")
    runs.reject(runs.admit(job, 0.0), job.job_id, 0.0)
    snapshot = runs.snapshot("a", "run", 1.0)
    assert snapshot is not None
    assert (snapshot.refused, snapshot.totals, snapshot.tree_in_flight, snapshot.active_s) == (1, Totals(), 0, 0.0)


def test_time_is_active_while_anything_of_the_tree_is_in_flight_and_tool_time_between() -> None:
    runs = RunRegistry()
    call(runs, a_call("root"), 0.0, 2.0, sent_at=1.0)
    one, other = a_call("child", "root"), a_call("child", "root")
    run = runs.admit(one, 5.0)
    runs.admit(other, 6.0)
    runs.job_ended(run, ended(one, sent_at=6.0), Usage(), None, 8.0)
    runs.job_ended(run, ended(other, sent_at=7.0), Usage(), None, 10.0)
    snapshot = runs.snapshot("a", "root", 14.0)
    assert snapshot is not None
    assert (snapshot.active_s, snapshot.running_s, snapshot.tool_s, snapshot.idle_s) == (7.0, 5.0, 3.0, 4.0)
    assert snapshot.own_active_s == 2.0
    assert snapshot.status is RunStatus.IDLE


def test_what_is_still_in_flight_counts_up_to_now() -> None:
    runs = RunRegistry()
    runs.admit(job := a_call("run"), 1.0)
    snapshot = runs.snapshot("a", "run", 5.0, {job.job_id: 3.0}.get)
    assert snapshot is not None
    assert (snapshot.status, snapshot.active_s, snapshot.running_s, snapshot.last_activity_at) == (
        RunStatus.ACTIVE,
        4.0,
        2.0,
        5.0,
    )


def test_finishing_ends_the_tool_time_and_a_later_call_opens_the_run_again() -> None:
    runs = RunRegistry()
    call(runs, a_call("run"), 0.0, 1.0)
    call(runs, a_call("child", "run"), 1.0, 2.0)
    runs.finish("a", "run", 5.0)
    snapshot = runs.snapshot("a", "run", 50.0)
    child = runs.snapshot("a", "child", 50.0)
    assert snapshot is not None
    assert child is not None
    assert (snapshot.status, snapshot.tool_s, snapshot.idle_s) == (RunStatus.FINISHED, 3.0, 0.0)
    assert (child.status, child.tool_s) == (RunStatus.FINISHED, 0.0)
    runs.admit(a_call("run"), 100.0)
    snapshot = runs.snapshot("a", "run", 101.0)
    assert snapshot is not None
    assert (snapshot.status, snapshot.tool_s, snapshot.active_s) == (RunStatus.ACTIVE, 3.0, 3.0)
    with pytest.raises(RunNotFound):
        runs.finish("b", "run", 5.0)


def test_a_run_that_is_finished_while_a_call_runs_is_finished_with_its_end_and_idles_no_more() -> None:
    runs = RunRegistry()
    run = runs.admit(job := a_call("run"), 0.0)
    runs.finish("a", "run", 1.0)
    assert runs.status(run) is RunStatus.ACTIVE
    runs.job_ended(run, ended(job), Usage(), None, 2.0)
    snapshot = runs.snapshot("a", "run", 10.0)
    assert snapshot is not None
    assert (snapshot.status, snapshot.active_s, snapshot.tool_s, snapshot.idle_s) == (RunStatus.FINISHED, 2.0, 0.0, 0.0)


def test_a_call_that_came_into_a_tree_while_it_ran_counts_there_from_then_on() -> None:
    runs = RunRegistry()
    run = runs.admit(job := a_call("run"), 0.0)
    other = a_call("run", "root")
    runs.reject(runs.admit(other, 6.0), other.job_id, 6.0)
    runs.job_ended(run, ended(job, sent_at=1.0), Usage(), None, 10.0)
    root = runs.snapshot("a", "root", 10.0)
    assert root is not None
    assert (root.active_s, root.running_s) == (4.0, 4.0)


# -- what is forgotten -----------------------------------------------------------------------------------------------


def test_a_call_without_a_run_leaves_nothing_behind() -> None:
    told: list[str] = []
    runs = RunRegistry(on_evicted=lambda tenant, run_id: told.append(run_id))
    job = a_call(None)
    run = runs.admit(job, 0.0)
    assert (run.lineage, len(runs), runs.has_run("a", job.job_id)) == ((job.job_id,), 0, True)
    runs.job_ended(run, ended(job), Usage(), None, 1.0)
    assert (runs.has_run("a", job.job_id), told) == (False, [job.job_id])


def test_idle_runs_are_forgotten_and_their_parents_keep_their_sums() -> None:
    told: list[str] = []
    runs = RunRegistry(idle_timeout_s=10.0, on_evicted=lambda tenant, run_id: told.append(run_id))
    call(runs, a_call("child", "root"), 0.0, 1.0)
    call(runs, a_call("root"), 8.0, 9.0)
    assert runs.expire(12.0) == 1
    assert told == ["child"]
    snapshot = runs.snapshot("a", "root", 12.0)
    assert snapshot is not None
    assert (
        snapshot.totals.jobs,
        snapshot.tree_totals.jobs,
        snapshot.tree_totals.output_tokens,
        snapshot.tree_runs,
    ) == (
        1,
        2,
        10,
        2,
    )


def test_beyond_the_limit_the_oldest_goes_and_never_one_with_a_job_in_flight() -> None:
    runs = RunRegistry(max_runs=2)
    runs.admit(a_call("busy"), 0.0)
    for number in range(4):
        call(runs, a_call(f"run-{number}"), number + 1.0, number + 1.5)
    assert runs.has_run("a", "busy")
    assert runs.has_run("a", "run-3")
    assert len(runs) == 2
    for number in range(4):
        runs.admit(a_call(f"child-{number}", "new"), 10.0)
    assert len(runs) == 6, "what is in flight is not forgotten, however many there are"


def test_the_newest_comes_first() -> None:
    runs = RunRegistry()
    for number, name in enumerate(["one", "two", "three", "one"]):
        call(runs, a_call(name), float(number), number + 0.5)
    call(runs, a_call("other", tenant="b"), 9.0, 9.5)
    assert [run.run_id for run in runs.newest_first("a")] == ["one", "three", "two"]


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


def test_covered_time_counts_what_overlaps_once() -> None:
    assert union_length([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)]) == 4.0
    assert union_length([]) == 0.0
