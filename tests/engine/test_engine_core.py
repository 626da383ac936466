"""The core with a model that computes arithmetic on its KV cells: schedule, execute, postprocess."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from inferry.domain.lanes import Lane
from inferry.domain.sampling import Sampling
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request, StepDone
from inferry.engine.planner import Work
from support.engine_fixtures import FakeRunner, drain, fake_output, greedy, note

SMALL = EngineConfig(max_sequences=4, kv_tokens=48, chunk_tokens=8, block_tokens=4)


class Ticks:
    """A clock that moves by one at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def a_core(
    config: EngineConfig = SMALL, *, context_tokens: int = 1_000, eos_ids: frozenset[int] = frozenset()
) -> EngineCore:
    return EngineCore(FakeRunner(config, context_tokens=context_tokens, eos_ids=eos_ids), config, clock=Ticks())


def a_request(key: int, prompt: list[int], sampling: Sampling | None = None, lane: Lane = Lane.P1) -> Request:
    return Request(key, prompt, sampling or greedy(), lane, is_batch=lane is Lane.P2)


def all_steps(core: EngineCore) -> list[StepDone]:
    steps = []
    while core.has_work:
        steps.append(core.step())
    return steps


def test_a_sequence_ends_with_length_after_max_tokens() -> None:
    core = a_core()
    core.add(a_request(1, [5, 6, 7], greedy(4)))
    steps = all_steps(core)
    assert [token for step in steps for _, token in step.tokens] == fake_output([5, 6, 7], 4)
    (end,) = steps[-1].ends
    assert (end.stopped, end.account.prompt_tokens, end.account.output_tokens) == (False, 3, 4)


def test_a_stop_token_is_given_out_and_ends_the_sequence() -> None:
    expected = fake_output([5, 6, 7], 10)
    core = a_core()
    core.add(a_request(1, [5, 6, 7], Sampling(temperature=0.0, max_tokens=10, stop_token_ids=(expected[2],))))
    steps = all_steps(core)
    assert [token for step in steps for _, token in step.tokens] == expected[:3]
    assert steps[-1].ends[0].stopped


def test_eos_ends_a_sequence_unless_it_is_ignored() -> None:
    expected = fake_output([5, 6, 7], 6)
    core = a_core(eos_ids=frozenset([expected[1]]))
    core.add(a_request(1, [5, 6, 7], greedy(6, ignore_eos=False)))
    core.add(a_request(2, [5, 6, 7], greedy(6, ignore_eos=True)))
    assert drain(core) == {1: expected[:2], 2: expected}


def test_the_context_ends_a_sequence_with_length() -> None:
    core = a_core(context_tokens=10)
    core.add(a_request(1, [1] * 7, greedy(100)))
    steps = all_steps(core)
    assert steps[-1].ends[0].account.output_tokens == 3
    assert not steps[-1].ends[0].stopped


@pytest.mark.parametrize(
    ("prompt", "sampling", "too_long"),
    [
        ([], greedy(), False),
        ([1], greedy(0), False),
        ([1] * 20, greedy(), True),
        ([100], greedy(), False),
        ([-1], greedy(), False),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt: list[int], sampling: Sampling, too_long: bool) -> None:
    core = a_core(context_tokens=20)
    refused = core.add(a_request(1, prompt, sampling))
    assert refused is not None
    assert refused.too_long is too_long
    assert not core.has_work


def test_a_prompt_that_can_never_fit_the_kv_cache_is_refused() -> None:
    refused = a_core().add(a_request(1, [1] * 48))
    assert refused is not None
    assert "KV cache" in refused.message


def test_the_time_of_all_steps_is_in_the_accounts_of_the_sequences() -> None:
    core = a_core()
    for key in range(6):
        core.add(a_request(key, [key + 1] * (3 + key), greedy(5 + key)))
    for _ in range(3):
        core.step()
    aborted = core.abort([0, 5])
    steps = all_steps(core)
    accounts = [*aborted, *(end.account for step in steps for end in step.ends)]
    assert len(accounts) == 6
    assert sum(account.gpu_seconds for account in accounts) == pytest.approx(core.busy_seconds)


def test_an_aborted_sequence_frees_everything_and_reports_usage() -> None:
    core = a_core()
    core.add(a_request(1, [1] * 10, greedy(20)))
    core.add(a_request(2, [2] * 10, greedy(20)))
    for _ in range(3):
        core.step()
    (account,) = core.abort([1, 77])
    assert (account.key, account.prompt_tokens) == (1, 10)
    assert core.pool.holders == 1
    assert core.abort([1]) == []


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_sequences_that_outgrow_the_kv_cache_give_the_same_tokens_as_with_plenty(prefix_cache: bool) -> None:
    prompts = {key: [key + 1, 3 * key, 7] for key in range(4)}
    core = a_core(replace(SMALL, prefix_cache=prefix_cache))
    for key, prompt in prompts.items():
        core.add(a_request(key, prompt, greedy(30), Lane(key % 3)))
    outputs = drain(core)
    assert core.stats().preemptions > 0
    assert outputs == {key: fake_output(prompt, 30) for key, prompt in prompts.items()}
    assert core.pool.free == core.pool.total


def test_batch_work_is_held_back_in_no_two_steps_in_a_row() -> None:
    config = EngineConfig(max_sequences=64, kv_tokens=4_096, chunk_tokens=16, block_tokens=4)
    runner = FakeRunner(config)
    core = EngineCore(runner, config)
    for key in range(20):
        core.add(a_request(key, [key + 1], greedy(40), Lane.P2))
    core.step()
    core.step()
    batch_decodes: list[int] = []

    def watch(work: Sequence[Work]) -> None:
        batch_decodes.append(sum(piece.sequence.lane == Lane.P2 for piece in work))

    runner.before = watch
    for key in range(100, 110):
        core.add(a_request(key, [1] * 16, greedy(1), Lane.P0))
        core.step()
    assert batch_decodes == [0, 20] * 5


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([16, 24, 48, 96]))
def test_every_added_key_ends_exactly_once_and_nothing_leaks(seed: int, kv_tokens: int) -> None:
    rng = random.Random(seed)
    core = a_core(EngineConfig(max_sequences=3, kv_tokens=kv_tokens, chunk_tokens=5, block_tokens=4))
    prompts: dict[int, list[int]] = {}
    outputs: dict[int, list[int]] = {}
    told: list[int] = []
    for key in range(12):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 20))]
        prompts[key] = prompt
        refused = core.add(a_request(key, prompt, greedy(rng.randint(1, 20)), Lane(rng.randrange(3))))
        if refused is not None:
            told.append(key)
        for _ in range(rng.randint(0, 3)):
            step = core.step()
            note(step, outputs)
            told += [end.account.key for end in step.ends]
        if rng.random() < 0.3:
            told += [account.key for account in core.abort([rng.randrange(12)])]
        assert core.pool.free + core.pool.held == core.pool.total
    for _ in range(2_000):
        if not core.has_work:
            break
        step = core.step()
        note(step, outputs)
        told += [end.account.key for end in step.ends]
    assert sorted(told) == list(range(12))
    assert (core.pool.free, core.pool.holders) == (core.pool.total, 0)
    for key, output in outputs.items():
        assert output == fake_output(prompts[key], len(output))
