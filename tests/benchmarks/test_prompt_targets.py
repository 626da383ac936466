"""Prompts that miss their target even alone."""

import pytest

from benchmarks.prompt_targets import alone, hopeless
from inferry.domain.lanes import Lane
from inferry.domain.values import replace
from inferry.sim.arrivals import poisson, uniform_lengths
from inferry.sim.costs import load_model


@pytest.mark.parametrize(("ms_per_1k_tokens", "part"), [(0, 0.5), (40, 0.5), (50, 0.0)])
def test_a_longer_target_for_long_prompts_makes_them_possible(ms_per_1k_tokens: float, part: float) -> None:
    calls = [(30_000, 1.8), (300, 0.02)]
    assert hopeless(calls, 0.5, ms_per_1k_tokens) == part


def test_blocks_of_an_earlier_call_take_no_time() -> None:
    model = load_model()
    run = next(poisson(1, 1.0, 60.0, uniform_lengths((3_000, 3_000), (1, 1)), lane=Lane.P0))
    (first_tokens, first_s), (second_tokens, second_s) = alone([run, replace(run, at=run.at + 1.0)], model)
    assert first_tokens == 3_000
    assert second_tokens == 3_000 % model.flags.block_tokens
    assert second_s < first_s / 5
