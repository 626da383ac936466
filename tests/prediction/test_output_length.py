"""Output lengths: what is expected, learned, forgotten and measured."""

import random
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.jobs import Estimate
from inferry.prediction import output_length
from inferry.prediction.output_length import OutputLengthModel
from prediction.length_queries import a_length_query, trained_model
from support.builders import a_job


def test_before_any_history_longer_prompts_mean_somewhat_longer_answers() -> None:
    model = OutputLengthModel()
    short, long = (model.predict(a_length_query(prompt=size)) for size in (64, 16_384))
    assert short.expected < long.expected < 8 * short.expected
    assert short.low < short.expected < short.high


def test_a_template_with_history_is_known_by_it() -> None:
    model = trained_model(a_length_query(template="label"), [3] * 50)
    told = model.predict(a_length_query(template="label"))
    assert told.expected <= 4
    assert told.high <= 5


def test_a_new_template_leans_on_its_tenant_and_a_new_tenant_on_the_model() -> None:
    model = trained_model(a_length_query(tenant="a", template="x"), [1000] * 100)
    for other in (
        a_length_query(tenant="a", template="new"),
        a_length_query(tenant="b"),
        a_length_query(tenant="b", template="x"),
    ):
        assert 800 < model.predict(other).expected < 1300


def test_old_outputs_of_a_template_lose_their_weight() -> None:
    model = trained_model(a_length_query(template="t"), [2000] * 300 + [50] * 900)
    told = model.predict(a_length_query(template="t"))
    assert told.expected < 100
    assert told.high < 100


def test_nothing_is_expected_beyond_the_budget() -> None:
    model = trained_model(a_length_query(template="t"), [1000] * 50)
    assert model.predict(a_length_query(template="t", budget=100, hint=900)) == Estimate(100, 100, 100)


def test_truncated_outputs_count_as_lower_bounds() -> None:
    model = OutputLengthModel()
    rng = random.Random(1)
    for _ in range(600):
        whole, limit = round(rng.lognormvariate(6, 0.4)), rng.choice((200, 400, 4000))
        query = a_length_query(template="t", budget=limit)
        model.observe(query, model.predict(query), min(whole, limit), truncated=whole >= limit)
    told = model.predict(a_length_query(template="t", budget=100_000))
    assert told.expected == pytest.approx(437, rel=0.2)  # the mean of what they would have written


def test_with_only_truncated_outputs_the_expectation_exceeds_the_longest() -> None:
    model = trained_model(a_length_query(template="t"), [64] * 50, truncated=True)
    assert model.predict(a_length_query(template="t", budget=4096)).expected > 90


def test_good_hints_are_followed_and_bad_ones_ignored() -> None:
    rng = random.Random(2)
    model = OutputLengthModel()
    for _ in range(300):
        output_tokens = round(rng.lognormvariate(5.5, 1.2)) + 1
        for tenant, hint in (("good", output_tokens * 2), ("bad", rng.choice((1, 4096)))):
            query = a_length_query(tenant=tenant, hint=hint, budget=100_000)
            model.observe(query, model.predict(query), output_tokens, truncated=False)
    good = model.predict(a_length_query(tenant="good", hint=40, budget=100_000)).expected
    assert good == pytest.approx(20, rel=0.3), "this tenant always hints twice what it needs"
    bad = [model.predict(a_length_query(tenant="bad", hint=hint, budget=100_000)).expected for hint in (4, 4096)]
    assert bad[1] / bad[0] < 8


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_four_in_five_lengths_are_within_low_and_high(seed: int) -> None:
    rng = random.Random(seed)
    model = OutputLengthModel()
    kinds = [(f"t{number}", rng.uniform(1, 7), rng.uniform(0.1, 0.9)) for number in range(12)]
    for _ in range(4000):
        template, mean, spread = rng.choice(kinds)
        query = a_length_query(template=template, budget=100_000)
        model.observe(query, model.predict(query), round(rng.lognormvariate(mean, spread)) or 1, truncated=False)
    assert model.accuracy.jobs == 4000
    assert 0.76 <= model.accuracy.coverage <= 0.93
    assert model.accuracy.mean_abs_log_error < 0.55


def test_client_chosen_names_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_length, "MAX_TENANTS", 4)
    monkeypatch.setattr(output_length, "MAX_TEMPLATES_PER_TENANT", 3)
    monkeypatch.setattr(output_length, "MAX_MODELS", 2)
    model = trained_model(a_length_query(tenant="quiet", template="kept"), [7] * 50)
    for number in range(100):
        query = a_length_query(tenant="loud", template=f"made-up-{number}", model=f"m{number % 5}")
        model.observe(query, model.predict(query), 500, truncated=False)
    assert len(model._tenants) <= 4
    assert len(model._models) <= 2
    assert len(model._tenants["loud"].templates) <= 3
    assert model.predict(a_length_query(tenant="quiet", template="kept")).expected <= 9, "neighbours forget nothing"


def test_short_and_long_jobs_are_told_apart_by_what_they_are_expected_to_write() -> None:
    model = OutputLengthModel(short_output_tokens=100)
    assert model.is_short(a_job(output=100))
    assert not model.is_short(a_job(output=101))


@given(
    output_tokens=st.lists(st.tuples(st.integers(0, 2**21), st.booleans()), max_size=60),
    prompt=st.integers(0, 10**6),
    budget=st.integers(1, 10**6),
    hint=st.none() | st.integers(0, 10**12),
)
def test_estimates_are_ordered_and_within_the_budget_whatever_was_seen(
    output_tokens: list[tuple[int, bool]], prompt: int, budget: int, hint: int | None
) -> None:
    model = OutputLengthModel()
    query = a_length_query(template="t", prompt=prompt, budget=budget, hint=hint)
    for tokens, truncated in output_tokens:
        model.observe(query, model.predict(query), tokens, truncated=truncated)
    told = model.predict(query)
    assert 1 <= told.low <= told.expected <= told.high <= budget


def test_many_observations_do_not_overflow_the_weights() -> None:
    from inferry.prediction.length_sketch import LengthSketch

    sketch = LengthSketch()
    for number in range(100_000):
        sketch.add(20, number % 2 == 0)
    spread = sketch.spread()
    assert spread is not None
    assert spread.low <= spread.mean <= spread.high < 10


def test_the_error_falls_as_history_grows() -> None:
    """Three templates of one tenant, each with answers of its own length."""
    model, draw = OutputLengthModel(), random.Random(3)
    means = {"label": 1.5, "draft": 5.0, "report": 7.0}
    errors: list[float] = []
    for _ in range(600):
        template = draw.choice(list(means))
        output_tokens = max(1, round(draw.lognormvariate(means[template], 0.3)))
        query = a_length_query(template=template)
        predicted = model.predict(query)
        model.observe(query, predicted, output_tokens, truncated=False)
        errors.append(abs(log(output_tokens / predicted.expected)))
    first, later, last = (sum(errors[begin : begin + 50]) / 50 for begin in (0, 50, 550))
    assert last < later < first / 1.5
    assert last < 0.35, "about what the answers themselves vary by"
    assert model.accuracy.mean_abs_log_error < sum(errors[:100]) / 100
