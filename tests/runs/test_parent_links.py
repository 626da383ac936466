"""Parents of runs that are not in memory: forgotten here, known from the ledger, or seen by another gateway."""

import pytest

from inferry.domain.errors import InvalidRequest, RunCancelled
from inferry.runs.registry import MAX_DEPTH, RunRegistry
from runs.builders import a_call, call

HOUR_S = 3600.0


def test_a_forgotten_run_comes_back_below_its_first_parent() -> None:
    runs = RunRegistry()
    call(runs, a_call("leaf", "middle"), 0.0, 1.0)
    call(runs, a_call("middle", "root"), 2.0, 3.0)
    runs.expire(2 * HOUR_S)
    assert not len(runs)
    assert runs.admit(a_call("leaf"), 2 * HOUR_S).lineage == ("leaf", "middle", "root")
    assert runs.tree_of("a", "root") == ["root", "middle", "leaf"]


def test_a_forgotten_run_keeps_its_parent_whatever_later_calls_say() -> None:
    runs = RunRegistry()
    call(runs, a_call("run", "first"), 0.0, 1.0)
    runs.expire(2 * HOUR_S)
    assert runs.admit(a_call("run", "second"), 2 * HOUR_S).lineage == ("run", "first")


def test_the_parent_of_a_run_that_was_idle_for_a_day_is_forgotten() -> None:
    runs = RunRegistry()
    call(runs, a_call("run", "root"), 0.0, 1.0)
    runs.expire(2 * HOUR_S)
    runs.expire(25 * HOUR_S)
    assert runs.admit(a_call("run"), 25 * HOUR_S).lineage == ("run",)


def test_parents_are_bounded_and_the_oldest_goes_first() -> None:
    runs = RunRegistry(max_links=2)
    for name in ("first", "second", "third"):
        runs.learn_parent("a", name, "root", 0.0)
    assert [runs.admit(a_call(name), 0.0).lineage[1:] for name in ("first", "second")] == [(), ("root",)]


def test_a_learned_parent_applies_to_the_next_call_and_to_one_tenant() -> None:
    runs = RunRegistry()
    assert runs.learn_parent("a", "middle", "root", 0.0) is None
    assert runs.admit(a_call("leaf", "middle"), 0.0).lineage == ("leaf", "middle", "root")
    assert runs.admit(a_call("middle", tenant="b"), 0.0).lineage == ("middle",)


def test_a_learned_parent_applies_to_a_known_root_with_its_calls_in_flight() -> None:
    runs = RunRegistry()
    leaf = runs.admit(a_call("leaf", "middle"), 0.0)
    runs.learn_parent("a", "root", "top", 1.0)
    attached = runs.learn_parent("a", "middle", "root", 1.0)
    assert attached is leaf.parent
    assert leaf.lineage == ("leaf", "middle", "root", "top")
    assert len(runs.cancel("a", "top", 2.0)) == 1


def test_a_run_keeps_the_parent_that_was_learned_first() -> None:
    runs = RunRegistry()
    known = runs.admit(a_call("known", "first"), 0.0)
    for name in ("known", "unknown"):
        runs.learn_parent("a", name, "first", 0.0)
        runs.learn_parent("a", name, "second", 1.0)
    assert known.lineage == ("known", "first")
    assert runs.admit(a_call("unknown"), 1.0).lineage == ("unknown", "first")


def test_a_learned_parent_that_would_form_a_cycle_is_ignored() -> None:
    runs = RunRegistry()
    runs.learn_parent("a", "child", "parent", 0.0)
    runs.learn_parent("a", "parent", "child", 0.0)
    runs.learn_parent("a", "self", "self", 0.0)
    assert runs.admit(a_call("child"), 0.0).lineage == ("child", "parent")
    assert runs.admit(a_call("self"), 0.0).lineage == ("self",)
    with pytest.raises(InvalidRequest):
        runs.admit(a_call("parent", "child"), 0.0)


def test_a_learned_tree_is_no_deeper_than_its_limit() -> None:
    runs = RunRegistry()
    for level in range(MAX_DEPTH, 0, -1):
        runs.learn_parent("a", str(level - 1), str(level), 0.0)
    assert len(runs.admit(a_call("1"), 0.0).lineage) == MAX_DEPTH
    with pytest.raises(InvalidRequest):
        runs.admit(a_call("0"), 0.0)


def test_a_run_below_a_cancelled_one_is_refused_also_where_its_parent_was_learned() -> None:
    runs = RunRegistry()
    runs.learn_parent("a", "middle", "root", 0.0)
    runs.restore([("a", "root")], 0.0)
    with pytest.raises(RunCancelled, match="`root` was cancelled"):
        runs.admit(a_call("leaf", "middle"), 0.0)
    assert not len(runs)


def test_a_known_run_that_is_learned_to_be_below_a_cancelled_one_is_cancelled() -> None:
    runs = RunRegistry()
    run = runs.admit(a_call("run"), 0.0)
    runs.restore([("a", "root")], 0.0)
    runs.learn_parent("a", "run", "root", 1.0)
    assert runs.is_cancelled(run)
