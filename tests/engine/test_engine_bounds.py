"""The engine exactly at its bounds: seeds and cuts of zero, the last block, a stop at the limit."""

import math
from collections.abc import Sequence as Ordered

import pytest
import torch

from inferry.domain.lanes import Lane
from inferry.domain.sampling import Sampling
from inferry.domain.work_costs import WorkCosts
from inferry.domain.work_prices import prefill_s
from inferry.engine import sampling as drawing
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.planner import Limits, Work, plan_step
from inferry.engine.sampling import sample
from inferry.engine.sequences import Sequence
from support.engine_fixtures import FakeRunner, fake_output, greedy

CONFIG = EngineConfig(max_sequences=4, kv_tokens=48, chunk_tokens=8, block_tokens=4)
LIMITS = Limits(max_sequences=8, chunk_tokens=32, block_tokens=4, min_held_tokens=4)


class SeedsSeen(FakeRunner):
    seeds: tuple[int, ...] = ()

    def execute(self, work: Ordered[Work]) -> list[int]:
        self.seeds = tuple(piece.sequence.seed for piece in work)
        return super().execute(work)


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_seed_of_zero_is_the_clients_and_only_a_missing_one_is_drawn() -> None:
    runner = SeedsSeen(CONFIG, context_tokens=100, eos_ids=frozenset())
    core = EngineCore(runner, CONFIG, make_seed=lambda: 77)
    for key, seed in ((1, 0), (2, None), (3, 5)):
        core.add(Request(key, [1, 2], Sampling(max_tokens=2, seed=seed), Lane.P1))
    core.step()
    assert runner.seeds == (0, 77, 5)


def test_a_stop_token_that_is_also_the_last_that_may_be_written_is_a_stop() -> None:
    expected = fake_output([5, 6, 7], 3)
    core = EngineCore(FakeRunner(CONFIG, context_tokens=100, eos_ids=frozenset()), CONFIG)
    core.add(Request(1, [5, 6, 7], Sampling(temperature=0.0, max_tokens=3, stop_token_ids=(expected[2],)), Lane.P1))
    ends = [end for _ in range(3) for end in core.step().ends]
    assert [(end.stopped, end.account.output_tokens) for end in ends] == [(True, 3)]


def test_the_time_of_a_step_is_shared_by_what_it_did_for_each_sequence() -> None:
    core = EngineCore(FakeRunner(CONFIG, context_tokens=100, eos_ids=frozenset()), CONFIG, clock=Ticks())
    core.add(Request(1, [5] * 6, greedy(1), Lane.P1))
    core.add(Request(2, [5] * 2, greedy(1), Lane.P1))
    costs = WorkCosts()
    long_s, short_s = (costs.base_s / 2 + prefill_s(costs, tokens, tokens) for tokens in (6, 2))
    seconds = {end.account.key: end.account.gpu_seconds for end in core.step().ends}
    assert seconds[1] == pytest.approx(long_s / (long_s + short_s))
    assert seconds[1] + seconds[2] == pytest.approx(1.0)


# -- planning --------------------------------------------------------------------------------------------------------


def a_sequence(key: int, tokens: int, *, lane: Lane = Lane.P1, computed: int = 0, blocks: int = 0) -> Sequence:
    sequence = Sequence(
        key, [1] * tokens, sampling=greedy(), lane=lane, arrival=key, limit=10_000, is_batch=lane is Lane.P2
    )
    sequence.computed, sequence.blocks = computed, list(range(blocks))
    return sequence


def decoding(key: int, lane: Lane = Lane.P1) -> Sequence:
    return a_sequence(key, 8, lane=lane, computed=7, blocks=2)


@pytest.mark.parametrize(("free", "admitted"), [(2, [2]), (1, [])])
def test_a_newcomer_is_admitted_when_one_block_is_left_for_each_that_runs(free: int, admitted: list[int]) -> None:
    plan = plan_step([decoding(1)], [a_sequence(2, 4)], free, LIMITS)
    assert [sequence.key for sequence in plan.admitted] == admitted


@pytest.mark.parametrize(("batch", "is_held"), [(3, False), (4, True)])
def test_batch_work_is_held_back_only_above_a_minimum_of_its_tokens(batch: int, is_held: bool) -> None:
    running = [decoding(key, Lane.P2) for key in range(1, batch + 1)]
    plan = plan_step(running, [a_sequence(9, 5, lane=Lane.P0)], 100, LIMITS)
    assert plan.held_back is is_held


def test_no_sequence_is_admitted_in_the_step_of_a_preemption() -> None:
    growing = a_sequence(1, 9, computed=8, blocks=2)
    victim = a_sequence(2, 12, computed=11, blocks=3)
    plan = plan_step([growing, victim], [a_sequence(3, 4)], 0, LIMITS)
    assert [sequence.key for sequence in plan.preempted] == [2]
    assert plan.admitted == ()


# -- sampling --------------------------------------------------------------------------------------------------------


def drawn(
    monkeypatch: pytest.MonkeyPatch, number: float, logits: list[float], *, top_p: float = 1.0, top_k: int | None = None
) -> int:
    monkeypatch.setattr(drawing, "uniform", lambda seed, position: number)
    sampling = Sampling(temperature=1.0, top_p=top_p, top_k=top_k)
    sequence = Sequence(1, [0], sampling=sampling, lane=Lane.P1, arrival=0, limit=10)
    (token,) = sample(torch.tensor([logits]), [sequence])
    return token


ALMOST = 1.0 - 2**-53


def test_a_draw_on_a_boundary_never_selects_a_token_of_zero_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, 0.0, [-math.inf, 0.0, 0.0]) == 1
    assert drawn(monkeypatch, 0.5, [0.0, -math.inf, 0.0]) == 2
    assert drawn(monkeypatch, 1.0, [0.0, 0.0, -math.inf]) == 1, "rounding may carry a number past the last weight"


def test_top_p_is_reached_exactly_by_the_heavier_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, ALMOST, [0.0, 0.0], top_p=0.5) == 0
    assert drawn(monkeypatch, ALMOST, [0.0, 0.0], top_p=0.51) == 1


def test_a_top_p_of_zero_keeps_the_best_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, ALMOST, [0.0, 3.0, 1.0], top_p=0.0) == 1


def test_top_p_applies_after_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, ALMOST, [0.0] * 4, top_k=2, top_p=0.5) == 0
    assert drawn(monkeypatch, ALMOST, [0.0] * 4, top_k=2, top_p=0.51) == 1
    assert drawn(monkeypatch, ALMOST, [0.0] * 4, top_k=4) == 3
