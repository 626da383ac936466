"""The four modes on the same core, with a model without arithmetic: rules of their steps, and their tokens."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferry.domain.lanes import Lane
from inferry.domain.workers import EngineMode
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.planner import Work
from support.engine_fixtures import FakeRunner, drain, fake_output, greedy, note

MODES: tuple[EngineMode, ...] = ("continuous", "hybrid", "dynamic", "static")


class StepRules:
    """Checks every step before it is computed: what it holds, and which sequences are in it."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._members: set[int] = set()
        self._has_decoded = False
        self.holds_blocks: Callable[[int], object] = bool
        self.steps: list[dict[str, int]] = []

    def check(self, work: Sequence[Work]) -> None:
        real = [piece for piece in work if piece.sequence.key >= 0]
        padding = [piece for piece in work if piece.sequence.key < 0]
        prompts = [piece for piece in real if piece.sequence.pending > 1 or not piece.sequence.computed]
        decodes = [piece for piece in real if piece not in prompts]
        padding_rows = sum(piece.sequence.computed > 0 for piece in padding)
        padding_tokens = sum(piece.tokens for piece in padding if not piece.sequence.computed)
        assert work, "a step computes something"
        long_prompts = sum(piece.tokens for piece in prompts if piece.tokens > 1)
        assert long_prompts + padding_tokens <= self._config.chunk_tokens
        if self._config.pads and not self._config.prefix_cache:
            assert not (prompts or padding_tokens) or not (decodes or padding_rows)
        if self._config.mode in ("continuous", "hybrid"):
            assert not padding
        if self._config.pads:
            self._check_members(real, bool(decodes))
            assert len({piece.sequence.batch for piece in real}) <= 1
            assert len(decodes) + padding_rows <= self._config.max_sequences
        self.steps.append(
            {
                "prompts": sum(piece.tokens for piece in prompts),
                "decodes": len(decodes),
                "padding_rows": padding_rows,
                "padding_tokens": padding_tokens,
            }
        )

    def _check_members(self, real: Sequence[Work], decodes: bool) -> None:
        """No sequence joins a static pass that decodes, while one of its members is left."""
        begun = {piece.sequence.key for piece in real if not piece.sequence.computed}  # some again, after a preemption
        if not any(map(self.holds_blocks, self._members - begun)):
            self._members, self._has_decoded = set(), False
        keys = {piece.sequence.key for piece in real}
        if self._config.mode == "static" and self._has_decoded and not self._config.prefix_cache:
            assert keys <= self._members
        self._members |= keys
        self._has_decoded |= decodes


def a_core(
    mode: EngineMode,
    *,
    prefix_cache: bool = False,
    max_sequences: int = 4,
    kv_tokens: int = 512,
    chunk_tokens: int = 16,
) -> tuple[EngineCore, StepRules]:
    config = EngineConfig(
        mode=mode,
        prefix_cache=prefix_cache,
        max_sequences=max_sequences,
        kv_tokens=kv_tokens,
        chunk_tokens=chunk_tokens,
        block_tokens=4,
    )
    runner, rules = FakeRunner(config), StepRules(config)
    runner.before = rules.check
    core = EngineCore(runner, config)
    rules.holds_blocks = core.pool.blocks_of
    return core, rules


def a_request(key: int, prompt: list[int], tokens: int, *, lane: Lane = Lane.P1, batch: int = 0) -> Request:
    return Request(key, prompt, greedy(tokens), lane, batch=batch, is_batch=lane is Lane.P2)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(MODES),
    st.integers(0, 2**32),
    st.sampled_from([16, 24, 48, 96, 400]),
    st.sampled_from([5, 64]),
    st.booleans(),
)
def test_every_sequence_ends_once_with_its_own_tokens_in_every_mode(
    mode: EngineMode, seed: int, kv_tokens: int, chunk_tokens: int, prefix_cache: bool
) -> None:
    rng = random.Random(seed)
    core, rules = a_core(
        mode, prefix_cache=prefix_cache, max_sequences=3, kv_tokens=kv_tokens, chunk_tokens=chunk_tokens
    )
    prompts: dict[int, list[int]] = {}
    outputs: dict[int, list[int]] = {}
    ended: list[int] = []

    def step() -> None:
        steps = len(rules.steps)
        done = core.step()
        assert not core.has_work or len(rules.steps) > steps
        note(done, outputs)
        ended.extend(end.account.key for end in done.ends)

    for key in range(12):
        # Some prompts begin alike.
        prompts[key] = [7] * rng.choice((0, 9)) + [rng.randrange(97) for _ in range(rng.randint(1, 12))]
        lane, batch = Lane(rng.randrange(3)), rng.randrange(2)
        if core.add(a_request(key, prompts[key], rng.randint(1, 20), lane=lane, batch=batch)) is not None:
            ended.append(key)
        for _ in range(rng.randint(0, 3)):
            if core.has_work:
                step()
        if rng.random() < 0.3:
            ended.extend(account.key for account in core.abort([rng.randrange(12)]))
        assert core.pool.free + core.pool.held == core.pool.total
    for _ in range(2_000):
        if not core.has_work:
            break
        step()
    assert sorted(ended) == list(range(12))
    assert (core.pool.free, core.pool.holders) == (core.pool.total, 0)
    for key, output in outputs.items():
        assert output == fake_output(prompts[key], len(output))
    stats = core.stats()
    assert stats.padding_rows == sum(step["padding_rows"] for step in rules.steps)
    assert stats.padding_tokens == sum(step["padding_tokens"] for step in rules.steps)
    computed = sum(step["prompts"] + step["decodes"] for step in rules.steps)
    assert stats.prompt_tokens + stats.decode_rows == computed


def test_a_static_pass_pads_prompts_to_the_longest_and_computes_ended_rows_until_its_end() -> None:
    core, rules = a_core("static", chunk_tokens=64)
    for key, (prompt, tokens) in enumerate([(3, 2), (10, 5), (6, 1)]):
        core.add(a_request(key, [key + 1] * prompt, tokens))
    drain(core)
    assert [tuple(step.values()) for step in rules.steps] == [
        (19, 0, 0, 11),
        (0, 2, 1, 0),
        (0, 1, 2, 0),
        (0, 1, 2, 0),
        (0, 1, 2, 0),
    ]
    stats = core.stats()
    assert (stats.prompt_tokens, stats.decode_rows, stats.padding_tokens, stats.padding_rows) == (19, 5, 11, 7)


def test_no_sequence_joins_a_static_pass() -> None:
    core, rules = a_core("static")
    core.add(a_request(1, [1] * 4, 6))
    core.step()
    core.add(a_request(2, [2] * 4, 1))
    keys = [key for _ in range(5) for key, _ in core.step().tokens]
    assert keys == [1] * 5
    assert [key for key, _ in core.step().tokens] == [2]
    assert rules.steps[-1]["padding_rows"] == 0


def test_an_abort_leaves_the_others_of_a_static_pass_running_and_its_row_as_padding() -> None:
    core, rules = a_core("static")
    for key in (1, 2, 3):
        core.add(a_request(key, [key] * 4, 8))
    core.step()
    (freed,) = core.abort([2])
    assert (freed.key, core.pool.holders) == (2, 2)
    outputs = drain(core)
    assert {key: len(tokens) for key, tokens in outputs.items()} == {1: 7, 3: 7}
    assert rules.steps[1] == {"prompts": 0, "decodes": 2, "padding_rows": 1, "padding_tokens": 0}


def test_a_free_row_of_a_dynamic_pass_is_refilled_at_once() -> None:
    core, rules = a_core("dynamic", max_sequences=2)
    for key, (prompt, tokens) in enumerate([(4, 2), (4, 9), (3, 2), (5, 2)]):
        core.add(a_request(key, [key + 1] * prompt, tokens))
    drain(core)
    composition = [(step["prompts"], step["decodes"], step["padding_rows"]) for step in rules.steps]
    # The first row ends after two tokens, and the next two sequences take it one after the other.
    assert composition[:6] == [(8, 0, 0), (0, 2, 0), (3, 0, 0), (0, 2, 0), (5, 0, 0), (0, 2, 0)]
    assert set(composition[6:]) == {(0, 1, 1)}


def test_sequences_that_refill_a_dynamic_pass_together_are_padded_to_the_longer() -> None:
    core, rules = a_core("dynamic", max_sequences=3)
    for key, tokens in enumerate([2, 2, 9]):
        core.add(a_request(key, [key + 1] * 4, tokens))
    core.step()
    core.add(a_request(3, [3] * 2, 3))
    core.add(a_request(4, [4] * 7, 3))
    drain(core)
    assert rules.steps[2] == {"prompts": 9, "decodes": 0, "padding_rows": 0, "padding_tokens": 5}


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_sequences_of_different_batch_keys_never_share_a_pass_and_none_starves(mode: EngineMode) -> None:
    core, _ = a_core(mode)
    for key in range(8):
        core.add(a_request(key, [key + 1] * 3, 4, batch=key // 2 % 2))
    ends = []
    while core.has_work:
        ends += [end.account.key for end in core.step().ends]
    assert ends == [0, 1, 4, 5, 2, 3, 6, 7]


def test_a_dynamic_pass_ends_before_a_sequence_of_another_batch_key_waits_for_long() -> None:
    core, _ = a_core("dynamic", max_sequences=2)
    core.add(a_request(0, [1] * 3, 2))
    core.add(a_request(1, [2] * 3, 4))
    core.step()
    for key in range(2, 8):
        core.add(a_request(key, [key] * 3, 2, batch=key == 2))
    ends = []
    while core.has_work:
        ends += [end.account.key for end in core.step().ends]
    assert ends[:3] == [0, 1, 2]


def test_padding_is_spread_over_steps_like_prompts() -> None:
    core, rules = a_core("static", chunk_tokens=8)
    core.add(a_request(1, [1] * 12, 2))
    core.add(a_request(2, [2] * 2, 2))
    drain(core)
    assert [(step["prompts"], step["padding_tokens"]) for step in rules.steps[:3]] == [(8, 0), (6, 2), (0, 8)]
    stats = core.stats()
    assert stats.prompt_tokens + stats.padding_tokens == 2 * 12


def test_time_of_padding_is_in_the_accounts_of_the_pass() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    config = EngineConfig(mode="static", max_sequences=4, kv_tokens=512, chunk_tokens=8, block_tokens=4)
    core = EngineCore(FakeRunner(config), config, clock=clock)
    core.add(a_request(1, [1] * 12, 3))
    core.add(a_request(2, [2] * 2, 1))
    accounts = []
    while core.has_work:
        accounts += [end.account for end in core.step().ends]
    assert sum(account.gpu_seconds for account in accounts) == pytest.approx(core.busy_seconds)
