"""Sampling: reproducible by seed, inside its cuts, and of the right shape."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.lanes import Lane
from inferry.domain.sampling import Sampling
from inferry.engine.sampling import sample, uniform
from inferry.engine.sequences import Sequence


def a_sequence(seed: int = 0, position: int = 1, **how: float) -> Sequence:
    sampling = Sampling(
        temperature=how.get("temperature", 1.0),
        top_p=how.get("top_p", 1.0),
        top_k=int(how["top_k"]) if "top_k" in how else None,
    )
    return Sequence(seed, [0] * position, sampling=sampling, lane=Lane.P1, arrival=0, limit=10**6, seed=seed)


def some_logits(rows: int, vocabulary: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_temperature_zero_takes_the_best() -> None:
    logits = some_logits(5)
    assert sample(logits, [a_sequence(temperature=0.0)] * 5) == logits.argmax(dim=1).tolist()


@given(st.integers(-(2**63), 2**64), st.integers(0, 2**40))
def test_the_drawn_number_is_in_the_unit_interval(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(0, 11))
def test_a_seed_draws_the_same_token_in_any_batch(seed: int, rows: int, place: int) -> None:
    place %= rows
    logits = some_logits(rows, seed=seed % 1000)
    mine = a_sequence(seed, 5, temperature=0.8, top_p=0.9)
    others = [
        a_sequence(n, n + 1, temperature=(0.0, 1.3)[n % 2], **({"top_k": 3.0} if n % 3 == 0 else {}))
        for n in range(rows)
    ]
    batch = [*others[:place], mine, *others[place + 1 :]]
    assert sample(logits, batch)[place] == sample(logits[place : place + 1], [mine])[0]


@given(st.integers(0, 2**32), st.integers(1, 60), st.floats(0.0, 1.0))
def test_nothing_outside_top_k_and_top_p_is_ever_drawn(seed: int, top_k: int, top_p: float) -> None:
    logits = some_logits(1, seed=seed % 997)
    weights = torch.softmax(logits[0].double(), 0)
    order = weights.argsort(descending=True)[:top_k]
    kept = weights[order] / weights[order].sum()
    nucleus = int((kept.cumsum(0) - kept < max(top_p, 1e-12)).sum())
    allowed = set(order[: max(1, nucleus)].tolist())
    for position in range(20):
        (token,) = sample(logits, [a_sequence(seed, position + 1, top_k=top_k, top_p=top_p)])
        assert token in allowed


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_in_proportion_to_their_weight(temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]])
    draws = 20_000
    batch = [a_sequence(seed, 3, temperature=temperature) for seed in range(draws)]
    counts = Counter(sample(logits.expand(draws, -1), batch))
    expected = torch.softmax(logits[0].double() / temperature, 0)
    for token, weight in enumerate(expected.tolist()):
        assert counts[token] / draws == pytest.approx(weight, abs=0.015)


def test_a_token_without_weight_is_never_drawn_even_at_the_edge() -> None:
    logits = torch.tensor([[0.0, float("-inf"), float("-inf")]])
    batch = [a_sequence(seed) for seed in range(500)]
    assert set(sample(logits.expand(500, -1), batch)) == {0}


def test_rows_drawn_in_groups_are_drawn_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(1))
    sampling = [Sampling(temperature=0.0 if row == 3 else 1.0, top_p=0.9 if row % 2 else 1.0) for row in range(7)]
    sequences = [
        Sequence(row, [1], sampling=one, lane=0, arrival=0, limit=9, seed=row) for row, one in enumerate(sampling)
    ]
    together = sample(logits, sequences)
    monkeypatch.setattr("inferry.engine.sampling.MAX_DRAWN_LOGITS", 100)
    assert sample(logits, sequences) == together
