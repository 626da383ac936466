"""Step costs: what observations decide, and what the prior decides where they cannot."""

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.scheduling.capacity.step_costs import PRIOR_COSTS, StepCostModel

BASE_S, TOKEN_S, PROMPT_S = 0.0048, 0.0001, 24e-6
CHUNK = 2048
LEARNING_INTERVAL_S = 0.25


def full_steps(seed: int, seconds: float) -> StepCostModel:
    """An engine that has more prompts than it can compute: every step has a full chunk of them, and prompts are counted
    when they are done."""
    dice = random.Random(seed)
    costs, now, next_beat = StepCostModel(), 0.0, LEARNING_INTERVAL_S
    decoding: list[int] = []
    prompt, computed = 0, 0
    steps = tokens = prompts = 0
    busy_s = 0.0
    while now < seconds:
        left = used = CHUNK - len(decoding)
        while left > 0:
            if computed >= prompt:
                prompt, computed = max(1500, min(15_500, int(dice.lognormvariate(8.2, 0.5)))), 0
            taken = min(left, prompt - computed)
            computed += taken
            left -= taken
            if computed == prompt:
                prompts += prompt
                decoding.append(dice.randint(150, 400))
        step_s = (BASE_S + TOKEN_S * len(decoding) + PROMPT_S * used) * dice.gauss(1, 0.02)
        now += step_s
        steps, tokens, busy_s = steps + 1, tokens + len(decoding), busy_s + step_s
        decoding = [more - 1 for more in decoding if more > 1]
        if now >= next_beat:
            costs.add(now - next_beat + LEARNING_INTERVAL_S, busy_s, steps, tokens, prompts)
            next_beat = now + LEARNING_INTERVAL_S
            steps = tokens = prompts = 0
            busy_s = 0.0
    return costs


@pytest.mark.parametrize("seed", range(12))
def test_prompts_do_not_look_free_where_every_step_is_full_of_them(seed: int) -> None:
    costs = full_steps(seed, 20.0)
    assert costs.prompt_s > 0.6 * PROMPT_S
    assert costs.step_s(20) + costs.prompt_s * (CHUNK - 20) == pytest.approx(
        BASE_S + TOKEN_S * 20 + PROMPT_S * (CHUNK - 20), rel=0.15
    )


def test_the_first_interval_is_split_in_the_ratios_of_the_prior() -> None:
    costs = StepCostModel()
    costs.add(0.1, 0.1, 3, 0, 2000)
    base, token, prompt = PRIOR_COSTS
    assert costs.prompt_s == pytest.approx(0.1 * prompt / (3 * base + 2000 * prompt))
    assert costs.base_s == pytest.approx(base * costs.prompt_s)
    assert costs.token_s == pytest.approx(token * costs.prompt_s), "a token was not observed yet"


def test_costs_are_unknown_until_prompt_tokens_were_observed() -> None:
    costs = StepCostModel()
    costs.add(0.5, 0.5, 20, 100, 0)
    assert not costs.known
    costs.add(0.5, 0.5, 20, 100, 500)
    assert costs.known


@pytest.mark.parametrize("truth", [(0.002, 7e-4, 7e-5), (0.02, 1e-4, 2e-5), (0.001, 1e-3, 1e-5)])
def test_observations_that_vary_overrule_the_prior(truth: tuple[float, float, float]) -> None:
    """The engines have other cost ratios than the prior, by a factor of up to 40; its weight leaves some bias."""
    dice = random.Random(5)
    costs = StepCostModel()
    for _ in range(120):
        steps, streams, prompts = dice.randint(10, 30), dice.randint(2, 60), dice.choice((0, 2_000, 20_000))
        busy_s = steps * truth[0] + steps * streams * truth[1] + prompts * truth[2]
        costs.add(busy_s, busy_s, steps, steps * streams, prompts)
    assert costs.step_s(30) == pytest.approx(truth[0] + 30 * truth[1], rel=0.35)
    assert costs.prompt_s == pytest.approx(truth[2], rel=0.35)


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 5.0),
            st.floats(0.0, 1.0),
            st.integers(0, 200),
            st.integers(0, 20_000),
            st.integers(0, 100_000),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_costs_are_positive_and_finite_for_any_observations(seen: list[tuple[float, float, int, int, int]]) -> None:
    costs = StepCostModel()
    for elapsed_s, busy, steps, tokens, prompt_tokens in seen:
        costs.add(elapsed_s, busy * elapsed_s, steps, tokens, prompt_tokens)
        if costs.known:
            assert 0 < costs.base_s < inf
            assert 0 < costs.token_s < inf
            assert 0 < costs.prompt_s < inf
