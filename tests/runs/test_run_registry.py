"""Runs: trees, tombstones, jobs in flight, usage and eviction."""

import itertools

import pytest

from inferry.domain.errors import (
    ClientClosed,
    InvalidRequest,
    QueueTimeout,
    RunCancelled,
    RunNotFound,
    WorkerLost,
)
from inferry.domain.streams import Usage
from inferry.runs.registry import MAX_DEPTH, PARENT_HEADER, RunRegistry, RunStatus, Totals, union_length
from inferry.runs.run import tree_totals
from runs.builders import a_call, call, ended

# -- trees -----------------------------------------------------------------------------------------------------------


def test_a_lineage_goes_from_the_run_to_its_root_and_unknown_parents_are_made() -> None:
    runs = RunRegistry()
    assert runs.admit(a_call("child", "parent"), 0.0).lineage == ("child", "parent")
    assert runs.admit(a_call("grandchild", "child"), 1.0).lineage == ("grandchild", "child", "parent")
    assert runs.has_run("a", "parent")
    assert not runs.has_run("b", "parent")


def test_a_run_gets_the_first_parent_it_names_and_keeps_its_sub_runs() -> None:
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


def test_jobs_of_a_cancelled_run_are_refused_with_its_name() -> None:
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


def test_an_unknown_run_is_cancelled_only_if_the_ledger_knows_it() -> None:
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


def test_a_run_finished_during_a_call_ends_with_that_call() -> None:
    runs = RunRegistry()
    run = runs.admit(job := a_call("run"), 0.0)
    runs.finish("a", "run", 1.0)
    assert runs.status(run) is RunStatus.ACTIVE
    runs.job_ended(run, ended(job), Usage(), None, 2.0)
    snapshot = runs.snapshot("a", "run", 10.0)
    assert snapshot is not None
    assert (snapshot.status, snapshot.active_s, snapshot.tool_s, snapshot.idle_s) == (RunStatus.FINISHED, 2.0, 0.0, 0.0)


def test_a_running_call_counts_in_a_tree_from_when_its_run_joined() -> None:
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


def test_roots_of_all_tenants_are_listed_with_those_in_flight_first() -> None:
    runs = RunRegistry()
    for number, name in enumerate(["one", "two", "three"]):
        call(runs, a_call(name, tenant="ab"[number % 2]), float(number), number + 0.5)
    runs.admit(a_call("child", "two", tenant="b"), 5.0)
    call(runs, a_call("last"), 6.0, 6.5)
    assert [run.run_id for run in runs.newest_of_all(9)] == ["two", "last", "three", "one"]
    assert [run.run_id for run in runs.newest_of_all(1)] == ["two", "last"]


def test_totals_of_a_tree_are_bounded_by_the_number_of_its_runs() -> None:
    runs = RunRegistry()
    call(runs, a_call("root"), 0.0, 0.5)
    for number in range(5):
        call(runs, a_call(f"child-{number}", "root"), 1.0 + number, 1.5 + number)
    (root,) = runs.newest_of_all(1)
    totals, count = tree_totals(root, 100)
    assert (totals.jobs, count) == (6, 6)
    assert tree_totals(root, 3)[1] == 3


def test_covered_time_counts_what_overlaps_once() -> None:
    assert union_length([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)]) == 4.0
    assert union_length([]) == 0.0
