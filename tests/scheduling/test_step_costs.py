"""Step costs where every step is full."""

import random

import pytest

from inferry.scheduling.capacity.step_costs import StepCostModel

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
