"""Deadlines of stages and sizes of batches: pure functions."""

from hypothesis import given
from hypothesis import strategies as st

from inferry.pipelines.batch_sizes import MAX_INPUTS, batch_sizes, map_window
from inferry.pipelines.deadlines import StageDurations, stage_deadline, times_after

SECONDS = st.floats(0.001, 100)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, tuple[str, ...]], dict[str, float]]:
    names = [f"s{index}" for index in range(draw(st.integers(1, 8)))]
    needs = {
        name: tuple(draw(st.lists(st.sampled_from(names[:index]), unique=True)) if index else [])
        for index, name in enumerate(names)
    }
    return needs, {name: draw(SECONDS) for name in names}


@given(graphs(), SECONDS)
def test_stages_that_take_their_predicted_time_end_by_the_deadline(
    graph: tuple[dict[str, tuple[str, ...]], dict[str, float]], total: float
) -> None:
    """Each stage uses all of its part, and starts when those that it needs have ended."""
    needs, durations = graph
    after = times_after(needs, durations)
    ends: dict[str, float] = {}
    for name, needed in needs.items():
        start = max((ends[one] for one in needed), default=0.0)
        ends[name] = stage_deadline(start, total, durations[name], after[name])
        assert start <= ends[name] <= total + 1e-9
    for name, needed in needs.items():
        assert all(ends[one] <= ends[name] for one in needed)
    used = {one for needed in needs.values() for one in needed}
    assert all(ends[name] == total for name in needs if name not in used)


@given(graphs())
def test_parts_are_proportional_along_the_critical_path(
    graph: tuple[dict[str, tuple[str, ...]], dict[str, float]],
) -> None:
    needs, durations = graph
    after = times_after(needs, durations)
    first = max(needs, key=lambda name: durations[name] + after[name])
    longest = durations[first] + after[first]
    part = stage_deadline(10.0, 10.0 + 3 * longest, durations[first], after[first]) - 10.0
    assert abs(part - 3 * durations[first]) < 1e-6 * longest + 1e-6


def test_time_that_a_stage_did_not_use_is_divided_again() -> None:
    assert stage_deadline(0.0, 10.0, 1.0, 1.0) == 5.0
    assert stage_deadline(1.0, 10.0, 1.0, 0.0) == 10.0


def test_a_deadline_that_has_passed_gives_no_time() -> None:
    assert stage_deadline(5.0, 4.0, 1.0, 1.0) == 5.0


def test_durations_follow_what_is_observed() -> None:
    durations = StageDurations()
    assert durations.predict(["a", "b"]) == {"a": 1.0, "b": 1.0}
    durations.observe("a", 4.0)
    assert durations.predict(["a", "b"]) == {"a": 4.0, "b": 4.0}
    for _ in range(100):
        durations.observe("a", 2.0)
    assert abs(durations.predict(["a"])["a"] - 2.0) < 0.01


@given(st.integers(1, 10_000), st.integers(0, 100), st.integers(0, 20))
def test_every_item_is_in_one_call_of_a_permitted_size(items: int, queued: int, workers: int) -> None:
    sizes = batch_sizes(items, queued, workers)
    assert sum(sizes) == items
    assert all(1 <= size <= MAX_INPUTS for size in sizes)
    assert max(sizes) - min(sizes) <= 1


def test_idle_workers_share_a_stage_and_a_queue_makes_it_one_call() -> None:
    assert batch_sizes(10, 0, 4) == [2, 2, 3, 3]
    assert batch_sizes(10, 1, 4) == [10]
    assert batch_sizes(2, 0, 4) == [1, 1]


@given(st.integers(1, 5000), st.integers(0, 2000), st.integers(1, 1000))
def test_a_map_never_fills_the_queue(items: int, queued: int, limit: int) -> None:
    window = map_window(items, queued, limit)
    assert 1 <= window <= items
    assert window == 1 or queued + window <= limit
