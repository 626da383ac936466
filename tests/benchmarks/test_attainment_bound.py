"""The largest set of prompts that one machine can finish in time."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.attainment_bound import Prompt, _served, _without, harbor_calls, largest_set, most_in_time
from inferry.domain.lanes import Lane
from inferry.sim.costs import load_model

TTFT_S = 5


def in_time(prompts: tuple[Prompt, ...]) -> bool:
    spans = _served(prompts)
    return all(end <= prompt.due for prompt, (_, end) in zip(prompts, spans, strict=True))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=8))
def test_no_larger_set_of_prompts_is_in_time(drawn: list[tuple[int, int]]) -> None:
    prompts = [Prompt(float(at), float(work), float(at + TTFT_S)) for at, work in sorted(drawn)]
    chosen = largest_set(prompts)
    assert in_time(tuple(chosen))
    larger = combinations(prompts, len(chosen) + 1)
    assert not any(in_time(one) for one in larger)


def test_the_clock_of_a_lower_lane_stands_still_while_a_higher_one_is_served() -> None:
    busy = [(1.0, 2.0), (2.0, 3.0), (10.0, 12.0)]
    assert _without(busy, [Prompt(0.5, 1.0, 4.0)]) == [Prompt(0.5, 1.0, 2.0)]
    assert _without(busy, [Prompt(2.5, 1.0, 11.0)]) == [Prompt(1.0, 1.0, 8.0)]
    assert _without([], [Prompt(2.5, 1.0, 11.0)]) == [Prompt(2.5, 1.0, 11.0)]


def test_the_steps_of_harbor_are_calls_of_their_own_in_their_order() -> None:
    model = load_model()
    runs = harbor_calls(0.5, model, 1)
    assert all(len(run.steps) == 1 for run in runs)
    first, second = (next(run for run in runs if run.run_id.endswith(f"/{number}")) for number in (0, 1))
    assert second.at > first.at + first.steps[0].tool_s
    for lane, (calls, in_time) in most_in_time(runs, model).items():
        assert calls == sum(run.lane is lane for run in runs)
        assert (0.9 if lane is Lane.P0 else 0.5) * calls < in_time <= calls
