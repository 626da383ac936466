"""Deadlines of stages and sizes of batches: pure functions."""

from hypothesis import given
from hypothesis import strategies as st

from inferry.pipelines.batch_sizes import FULL_QUEUE, MAX_INPUTS, MIN_WINDOW, MapLoad, batch_sizes, may_start
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


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4)), min_size=1, max_size=50), st.integers(1, 2000))
def test_all_maps_together_never_fill_the_queue(maps: list[tuple[int, int]], limit: int) -> None:
    """All maps start what they may before any job is in the queue; then all jobs are queued, and they look again."""
    load, in_flight = MapLoad(), [0] * len(maps)
    load.maps = len(maps)
    for queued in (0, None):
        for index, (items, width) in enumerate(maps):
            known = load.jobs if queued is None else queued
            while in_flight[index] < items and may_start(in_flight[index], width, load, known, limit):
                in_flight[index] += 1
                load.jobs += width
    beyond_first = sum(max(0, count - 1) * width for count, (_, width) in zip(in_flight, maps, strict=True))
    assert beyond_first <= limit // 2
    assert all(count >= min(1, items) for count, (items, _) in zip(in_flight, maps, strict=True))


def test_one_map_fills_the_next_batches_and_many_share_them() -> None:
    load = MapLoad()
    load.maps = 1
    assert may_start(FULL_QUEUE - 1, 1, load, 0, 10_000)
    assert not may_start(FULL_QUEUE, 1, load, 0, 10_000)
    load.maps = 16
    assert may_start(15, 1, load, 0, 10_000)
    assert not may_start(16, 1, load, 0, 10_000)
    load.maps = 1000
    assert may_start(MIN_WINDOW - 1, 1, load, 0, 10_000)
    assert not may_start(1, 1, load, 5000, 10_000), "the queue is half full"
