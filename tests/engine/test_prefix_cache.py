"""The prefix cache of the engine: what is found, by which sequences, and that no output depends on it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace as with_fields

from inferry.domain.lanes import Lane
from inferry.domain.sampling import Sampling
from inferry.domain.values import replace
from inferry.domain.workers import EngineMode
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Account, Request
from inferry.engine.runner import TorchRunner
from support.engine_fixtures import FakeRunner, drain, fake_output, greedy, note

MODES: tuple[EngineMode, ...] = ("continuous", "hybrid", "dynamic", "static")
SMALL = EngineConfig(max_sequences=4, kv_tokens=48, chunk_tokens=8, block_tokens=4)
PROMPT = list(range(10, 20))


def a_core(config: EngineConfig = SMALL, clock: Callable[[], float] = lambda: 0.0) -> EngineCore:
    return EngineCore(FakeRunner(config), config, clock=clock)


def a_request(
    key: int, prompt: list[int], output: int = 4, *, salt: str | None = "a", run: str | None = None
) -> Request:
    return Request(key, prompt, greedy(output), Lane.P1, salt, run=run)


def run(core: EngineCore, *requests: Request) -> tuple[dict[int, list[int]], dict[int, Account]]:
    """Outputs and accounts of requests that run together."""
    for request in requests:
        assert core.add(request) is None
    outputs: dict[int, list[int]] = {}
    accounts: dict[int, Account] = {}
    while core.has_work:
        step = core.step()
        note(step, outputs)
        accounts.update({end.account.key: end.account for end in step.ends})
    return outputs, accounts


def cached(core: EngineCore, *requests: Request) -> list[int]:
    return [account.cached_tokens for _, account in sorted(run(core, *requests)[1].items())]


def test_a_repeated_prompt_is_computed_from_its_last_full_block_on() -> None:
    core = a_core()
    assert cached(core, a_request(1, PROMPT)) == [0]
    outputs, accounts = run(core, a_request(2, PROMPT))
    assert outputs[2] == fake_output(PROMPT, 4)
    assert (accounts[2].prompt_tokens, accounts[2].cached_tokens) == (10, 8)


def test_the_last_prompt_token_is_always_computed() -> None:
    core = a_core()
    run(core, a_request(1, PROMPT[:8]))
    outputs, accounts = run(core, a_request(2, PROMPT[:8]))
    assert outputs[2] == fake_output(PROMPT[:8], 4)
    assert accounts[2].cached_tokens == 4


def test_the_output_of_a_turn_is_found_by_the_next_turn() -> None:
    core = a_core()
    outputs, _ = run(core, a_request(1, PROMPT, 7))
    longer = [*PROMPT, *outputs[1], 3, 4, 5]
    # 10 + 7 tokens, of which the last was sampled and not computed: four full blocks.
    assert cached(core, a_request(2, longer)) == [16]


def test_only_the_common_prefix_is_found() -> None:
    core = a_core()
    run(core, a_request(1, PROMPT))
    assert cached(core, a_request(2, [*PROMPT[:5], 77, 78, 79, 80])) == [4]
    assert cached(core, a_request(3, [77, *PROMPT[1:]])) == [0]


def test_prompts_of_different_salts_share_nothing() -> None:
    core = a_core()
    run(core, a_request(1, PROMPT, salt="a"))
    assert cached(core, a_request(2, PROMPT, salt="b")) == [0]
    assert cached(core, a_request(3, PROMPT, salt=None)) == [0]
    assert cached(core, a_request(4, PROMPT, salt="")) == [0]
    assert cached(core, a_request(5, PROMPT, salt="a"), a_request(6, PROMPT, salt=None)) == [8, 8]


def test_running_sequences_share_the_blocks_of_a_prefix() -> None:
    core = a_core()
    run(core, a_request(1, PROMPT[:9], 1))
    for key in (2, 3, 4):
        core.add(a_request(key, [*PROMPT[:8], key], 8))
    core.step()
    assert core.pool.held == 2 + 3  # two shared blocks, one more for each
    outputs = drain(core, {})
    assert core.pool.held == 0
    for key in (2, 3, 4):
        assert fake_output([*PROMPT[:8], key], 8)[-len(outputs[key]) :] == outputs[key]


def test_equal_prompts_that_start_together_are_both_right() -> None:
    core = a_core()
    outputs, _ = run(core, a_request(1, PROMPT), a_request(2, PROMPT))
    assert outputs[1] == outputs[2] == fake_output(PROMPT, 4)
    assert core.pool.free == core.pool.total
    assert cached(core, a_request(3, PROMPT)) == [8]


def test_a_prefix_that_was_used_last_is_evicted_last() -> None:
    core = a_core()  # 12 blocks
    run(core, a_request(1, [1] * 17, 1))
    run(core, a_request(2, [2] * 17, 1))
    assert cached(core, a_request(3, [1] * 17, 1)) == [16]
    run(core, a_request(4, [4] * 29, 1))
    assert cached(core, a_request(5, [1] * 17, 1)) == [16]
    assert cached(core, a_request(6, [2] * 17, 1)) == [0]


def test_the_first_blocks_of_a_prefix_are_evicted_last() -> None:
    core = a_core()
    run(core, a_request(1, [1] * 32, 1))  # eight of twelve blocks
    run(core, a_request(2, [2] * 24, 1))
    assert cached(core, a_request(3, [1] * 32, 1)) == [24]


def test_a_preempted_sequence_finds_its_own_blocks_and_does_not_report_them_as_cached() -> None:
    core = a_core()
    prompts = {key: [key + 1, 3 * key, 7] for key in range(4)}
    computed = 0

    def count(work: object) -> None:
        nonlocal computed
        computed += sum(piece.tokens for piece in work)  # type: ignore[attr-defined]

    core._runner.before = count  # type: ignore[attr-defined]
    outputs, accounts = run(core, *(a_request(key, prompt, 30) for key, prompt in prompts.items()))
    assert core.stats().preemptions > 0
    assert outputs == {key: fake_output(prompt, 30) for key, prompt in prompts.items()}
    assert {account.cached_tokens for account in accounts.values()} == {0}
    with_cache, computed = computed, 0
    without = EngineConfig(max_sequences=4, kv_tokens=48, chunk_tokens=8, block_tokens=4, prefix_cache=False)
    core = a_core(without)
    core._runner.before = count  # type: ignore[attr-defined]
    run(core, *(a_request(key, prompt, 30) for key, prompt in prompts.items()))
    assert with_cache < computed


def test_a_victim_that_shares_its_blocks_frees_only_its_own() -> None:
    core = a_core(EngineConfig(max_sequences=4, kv_tokens=40, chunk_tokens=16, block_tokens=4))
    run(core, a_request(0, PROMPT[:9], 1))
    prompts = {key: [*PROMPT[:8], key] for key in range(1, 5)}
    outputs, _ = run(core, *(a_request(key, prompt, 16) for key, prompt in prompts.items()))
    assert core.stats().preemptions > 0
    assert outputs == {key: fake_output(prompt, 16) for key, prompt in prompts.items()}


def test_an_aborted_sequence_leaves_what_it_has_computed() -> None:
    core = a_core()
    core.add(a_request(1, PROMPT, 20))
    core.step()
    core.abort([1])
    assert (core.pool.held, core.pool.cached) == (0, 2)
    assert cached(core, a_request(2, PROMPT)) == [8]


def test_without_the_cache_nothing_stays() -> None:
    core = a_core(EngineConfig(max_sequences=4, kv_tokens=48, chunk_tokens=8, block_tokens=4, prefix_cache=False))
    assert cached(core, a_request(1, PROMPT)) == [0]
    assert core.pool.cached == 0
    assert cached(core, a_request(2, PROMPT)) == [0]


def test_pooled_sequences_neither_use_nor_fill_the_cache() -> None:
    core = a_core()
    run(core, a_request(1, PROMPT))
    before = core.pool.cached
    core._runner.execute = lambda work: []  # type: ignore[method-assign]
    core.add(Request(2, PROMPT, greedy(), Lane.P1, "a", pooled=True))
    (first, second) = core.step(), core.step()
    assert not first.ends
    assert second.ends[0].account.cached_tokens == 0
    assert core.pool.cached == before


# -- kept for the next call of a run ---------------------------------------------------------------------------------


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_blocks_of_an_open_run_are_evicted_after_later_blocks_of_others() -> None:
    core = a_core()  # 12 blocks
    run(core, a_request(1, [1] * 17, 1, run="r"))
    run(core, a_request(2, [2] * 17, 1))
    assert (core.pool.cached, core.pool.kept) == (8, 4)
    run(core, a_request(3, [3] * 29, 1))
    assert cached(core, a_request(4, [1] * 17, 1, run="r")) == [16]
    assert cached(core, a_request(5, [2] * 17, 1)) == [0]


def test_kept_blocks_count_as_free_and_are_evicted_before_a_sequence_waits() -> None:
    core = a_core()
    run(core, a_request(1, [1] * 17, 1, run="r"))
    assert core.pool.free == core.pool.total
    outputs, _ = run(core, a_request(2, [2] * 46, 1))
    assert outputs[2] == fake_output([2] * 46, 1)
    assert core.pool.kept == 0


@pytest.mark.parametrize(("elapsed_s", "kept"), [(59.0, 4), (60.0, 0)])
def test_blocks_are_kept_for_the_pause_and_no_longer(elapsed_s: float, kept: int) -> None:
    time = Time()
    core = a_core(clock=time)
    run(core, a_request(1, [1] * 17, 1, run="r"))
    time.now = elapsed_s
    run(core, a_request(2, [2], 1))
    assert (core.pool.kept, core.pool.cached) == (kept, 4)


def test_a_run_that_is_over_keeps_nothing_and_leaves_other_runs_alone() -> None:
    core = a_core()
    run(core, a_request(1, [1] * 9, 1, run="r"))
    run(core, a_request(2, [2] * 9, 1, run="other"))
    core.pool.end_run("r")
    core.pool.end_run("unknown")
    assert (core.pool.kept, core.pool.cached) == (2, 4)
    run(core, a_request(3, [3] * 33, 1))
    assert cached(core, a_request(4, [1] * 9, 1)) == [4]  # its first block is evicted last
    assert cached(core, a_request(5, [2] * 9, 1)) == [8]


def test_blocks_of_a_run_that_is_over_are_evicted_by_their_last_use() -> None:
    """They may be a prefix that other runs have too, such as a common system prompt."""
    core = a_core()  # 12 blocks
    run(core, a_request(1, [1] * 17, 1))
    run(core, a_request(2, [2] * 17, 1, run="r"))
    core.pool.end_run("r")
    assert (core.pool.kept, core.pool.cached) == (0, 8)
    run(core, a_request(3, [3] * 29, 1))  # takes the 4 empty blocks and 4 cached ones
    assert cached(core, a_request(4, [2] * 17, 1)) == [16]
    assert cached(core, a_request(5, [1] * 17, 1)) == [0]


def test_the_pool_remembers_a_bounded_number_of_uses() -> None:
    core = a_core()
    for key in range(100):
        run(core, a_request(key, PROMPT, 1))
    run(core, a_request(100, [2] * 17, 1))
    run(core, a_request(101, PROMPT, 1))
    assert len(core.pool._by_use) <= 2 * core.pool.total
    run(core, a_request(102, [3] * 29, 1))
    assert cached(core, a_request(103, PROMPT, 1)) == [8]


def test_at_most_half_of_the_pool_is_kept_and_the_oldest_blocks_give_way() -> None:
    core = a_core()  # 12 blocks
    run(core, a_request(1, [1] * 17, 1, run="a"))
    run(core, a_request(2, [2] * 17, 1, run="b"))
    assert (core.pool.kept, core.pool.cached) == (6, 8)
    core.pool.end_run("a")
    assert core.pool.kept == 4


def test_a_block_is_kept_for_the_run_that_used_it_last() -> None:
    core = a_core()
    run(core, a_request(1, PROMPT, 1, run="a"))
    run(core, a_request(2, PROMPT, 1, run="b"))
    core.pool.end_run("a")
    assert core.pool.kept == 2
    core.pool.end_run("b")
    assert core.pool.kept == 0


def test_without_a_pause_or_a_run_nothing_is_kept() -> None:
    core = a_core(with_fields(SMALL, kv_pause_s=0))
    run(core, a_request(1, PROMPT, run="r"))
    assert core.pool.kept == 0
    core = a_core()
    run(core, a_request(1, PROMPT))
    assert core.pool.kept == 0


# -- with a model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [greedy(24), Sampling(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)])
def test_warm_output_equals_cold_output(tiny_dir: Path, sampling: Sampling) -> None:
    shared = [(7 * at) % 4_000 + 7 for at in range(130)]
    prompts = {key: [*shared[: 60 + 17 * key], *(100 * key + at for at in range(5))] for key in range(5)}
    requests = [Request(key, prompt, replace(sampling), Lane.P1, "a") for key, prompt in prompts.items()]

    def outputs(config: EngineConfig, *, is_warm: bool) -> tuple[dict[int, list[int]], int]:
        core = EngineCore(TorchRunner.load(tiny_dir, config), config)
        if is_warm:
            run(core, Request(99, [*shared, 9], greedy(1), Lane.P1, "a"))
        found, accounts = run(core, *requests)
        return found, sum(account.cached_tokens for account in accounts.values())

    config = EngineConfig(kv_tokens=4_096, block_tokens=16)
    cold, nothing = outputs(EngineConfig(kv_tokens=4_096, block_tokens=16, prefix_cache=False), is_warm=False)
    warm, found = outputs(config, is_warm=True)
    assert nothing == 0
    assert found >= 5 * 48
    assert warm == cold


def test_many_decodes_that_share_blocks_equal_those_that_do_not(tiny_dir: Path) -> None:
    shared = [(11 * at) % 4_000 + 7 for at in range(100)]
    requests = [Request(key, [*shared, 7 + key], greedy(12), Lane.P1, "a") for key in range(24)]
    found = []
    for config in (
        EngineConfig(kv_tokens=8_192, block_tokens=16, chunk_tokens=128),
        EngineConfig(kv_tokens=8_192, block_tokens=16, chunk_tokens=128, prefix_cache=False),
    ):
        core = EngineCore(TorchRunner.load(tiny_dir, config), config)
        run(core, Request(99, [*shared, 9], greedy(1), Lane.P1, "a"))
        found.append(run(core, *requests)[0])
    assert found[0] == found[1]


# -- quotas ----------------------------------------------------------------------------------------------------------


def test_a_tenant_at_its_kv_quota_waits_and_others_overtake_it() -> None:
    core = a_core(with_fields(SMALL, kv_tokens=400, chunk_tokens=64))
    for key, tenant in ((1, "a"), (2, "a"), (3, "b")):
        core.add(Request(key, [key] * 10, greedy(8), Lane.P1, kv_quotas=((tenant, 20),)))
    core.step()
    assert (core.stats().running, core.stats().waiting) == (3, 0)
    core.add(Request(4, [4] * 9, greedy(8), Lane.P1, kv_quotas=(("a", 20),)))
    core.add(Request(5, [5], greedy(8), Lane.P1, kv_quotas=(("c", 20),)))
    core.step()
    assert [sequence.key for sequence in core._running] == [1, 3]  # 1 and 2 have grown beyond the quota together
    core.step()
    assert [sequence.key for sequence in core._running] == [1, 3, 5]
    outputs = drain(core, {})
    assert outputs[4] == fake_output([4] * 9, 8)
    assert core.pool.free == core.pool.total


@pytest.mark.parametrize("mode", ["continuous", "hybrid", "dynamic"])
def test_a_run_at_its_kv_quota_waits_and_other_runs_of_the_tenant_overtake_it(mode: EngineMode) -> None:
    core = a_core(with_fields(SMALL, kv_tokens=400, chunk_tokens=64, mode=mode))
    for key, run_name in ((1, "r"), (2, "r"), (3, "s")):
        quotas = (("a", 200), (run_name, 20))
        core.add(Request(key, [key] * 12, greedy(8), Lane.P1, kv_quotas=quotas))
    core.step()
    assert [sequence.key for sequence in core._running] == [1, 3]
    outputs = drain(core, {})
    assert outputs[2] == fake_output([2] * 12, 8)


@pytest.mark.parametrize("mode", MODES)
def test_sequences_that_grow_beyond_a_quota_together_are_preempted_and_finish(mode: EngineMode) -> None:
    core = a_core(with_fields(SMALL, kv_tokens=400, chunk_tokens=64, mode=mode))
    for key in (1, 2, 3):
        core.add(Request(key, [key] * 6, greedy(12), Lane.P1, kv_quotas=(("a", 200), ("r", 20))))
    core.add(Request(4, [4] * 6, greedy(12), Lane.P1, kv_quotas=(("a", 200),)))
    outputs: dict[int, list[int]] = {}
    while core.has_work:
        note(core.step(), outputs)
        held = [len(sequence.tokens) for sequence in core._running if sequence.key != 4]
        # Each has a token more than was planned for.
        assert len(held) < 2 or sum(held) <= 20 + len(held)
    assert outputs == {key: fake_output([key] * 6, 12) for key in (1, 2, 3, 4)}
    assert core.stats().preemptions > 0
    assert core.pool.free == core.pool.total


def test_a_sequence_beyond_its_tenants_quota_runs_alone() -> None:
    core = a_core(with_fields(SMALL, kv_tokens=400, chunk_tokens=64))
    for key in (1, 2):
        core.add(Request(key, [key] * 30, greedy(4), Lane.P1, kv_quotas=(("a", 20),)))
    core.step()
    assert core.stats().running == 1
    assert drain(core, {})[2] == fake_output([2] * 30, 4)
