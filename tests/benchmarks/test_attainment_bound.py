"""The largest set of prompts that one machine can finish in time."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.attainment_bound import Prompt, _served, _without, largest_set

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
