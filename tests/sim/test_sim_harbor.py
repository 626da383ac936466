"""Harbor: the same seed gives the same load, with bursts on a quiet floor."""

from inferry.domain.lanes import Lane
from inferry.sim.harbor import harbor, simple_harbor
from inferry.sim.prompts import block_hashes, length


def test_the_same_seed_gives_the_same_work_and_another_gives_other_work() -> None:
    assert harbor(3) == harbor(3)
    assert harbor(3) != harbor(4)


def test_runs_come_in_bursts_on_a_quiet_floor_while_digests_wait() -> None:
    runs = harbor(7)
    live = [run for run in runs if run.lane is not Lane.P2]
    digests = [run for run in runs if run.lane is Lane.P2]
    assert len(digests) == 300
    assert all(run.at <= 3 for run in digests)
    in_bursts = sum(5 <= run.at % 10 < 6 for run in live)
    assert in_bursts >= 6 * 39
    assert 340 <= len(live) <= 440
    calls = sum(len(run.steps) for run in live)
    assert 1500 <= calls <= 2000
    assert {run.lane for run in live} == {Lane.P0, Lane.P1}
    walked_away = sum(run.cancel_after_s is not None for run in live)
    assert 0.01 <= walked_away / len(live) <= 0.08


def test_steps_of_a_run_begin_alike_and_tenants_share_their_system_prompt() -> None:
    runs = [run for run in harbor(7) if run.lane is not Lane.P2]
    run = next(run for run in runs if len(run.steps) >= 4)
    first, second = (block_hashes(step.prompt, 16) for step in run.steps[:2])
    shared = sum(a == b for a, b in zip(first, second, strict=False))
    assert shared >= (length(run.steps[0].prompt) - 40) // 16
    same_tenant = next(other for other in runs if other is not run and other.tenant == run.tenant)
    assert same_tenant.steps[0].prompt[0] == run.steps[0].prompt[0]


def test_no_prompt_is_longer_than_the_context() -> None:
    assert max(length(step.prompt) for run in harbor(1, max_context=4000) for step in run.steps) <= 4000


def test_scale_and_digests_are_knobs() -> None:
    assert sum(run.lane is Lane.P2 for run in harbor(7, digests=10)) == 10
    assert len(harbor(7, scale=0.5, digests=0)) < 0.6 * len(harbor(7, digests=0))
    assert max(run.at for run in harbor(7, seconds=20)) < 20


def test_the_simple_workload_has_four_steps_of_fixed_lengths() -> None:
    runs = simple_harbor(7, seconds=20, digests=5)
    live = [run for run in runs if run.lane is not Lane.P2]
    assert {tuple((length(s.prompt), s.output) for s in run.steps) for run in live} == {
        ((600, 16), (1200, 160), (900, 24), (1500, 64))
    }
    assert [length(run.steps[0].prompt) for run in runs if run.lane is Lane.P2] == [4000] * 5
    assert runs == simple_harbor(7, seconds=20, digests=5)
