"""The ablation sets and restores constants around a workload and tabulates the effect."""

import json
from importlib import import_module

import pytest

from benchmarks import ablation, ablation_page
from benchmarks.ablation_constants import CONSTANTS
from benchmarks.ablation_loads import LOADS, Load, one_engine
from benchmarks.result_files import RESULTS
from inferry.scheduling.capacity import controller, step_costs
from inferry.scheduling.capacity.prefill_bucket import TickContext
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.sim.arrivals import poisson, uniform_lengths

TINY = Load(
    "tiny", "a few calls", lambda seed: list(poisson(seed, 3.0, 2.0, uniform_lengths((50, 90), (3, 9)))), one_engine
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(LOADS, TINY.name, TINY)
    monkeypatch.setattr(ablation, "CHOOSE", (1, 2))
    monkeypatch.setattr(ablation, "CHECK", (3,))
    monkeypatch.setattr(ablation, "PLACEBOS", 1)
    return TINY.name


@pytest.mark.plain
def test_a_table_has_every_variant_and_the_constant_is_restored(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_this_process(tasks: list[ablation.Task], into: ablation.Results, _: int) -> None:
        for load, seed, key, variant in tasks:
            into.setdefault((key, variant, load), {})[seed] = ablation.play((load, seed, key, variant))[1]

    monkeypatch.setattr(ablation, "play_all", in_this_process)
    before = controller.SLACK_ITLS
    table = ablation.ablate(["controller.SLACK_ITLS"], [tiny])
    assert before == controller.SLACK_ITLS
    row = table["constants"]["controller.SLACK_ITLS"]
    assert row["value"] == before
    assert set(row["variants"]) == set(row["effects"]) == {"removed", "halved", "doubled"}
    assert row["verdict"] in ablation_page.VERDICTS
    assert set(table["loads"][tiny]["default"]) == {"P1 attainment", "P1 ttft_p95", "output rate", "wall_s"}
    assert f"`{tiny}`" in ablation_page.page(table)


@pytest.mark.plain
def test_a_constant_changes_wherever_its_name_is_imported_and_where_it_is_a_default() -> None:
    with ablation.changed(CONSTANTS["step_costs.MEMORY_S"], 3.0):
        assert step_costs.MEMORY_S == vars(controller)["MEMORY_S"] == 3.0
    assert step_costs.MEMORY_S == vars(controller)["MEMORY_S"] == 20.0
    with ablation.changed(CONSTANTS["quantum.QUANTUM_TOKENS"], 64):
        assert TickContext().burst_tokens == 64
    assert TickContext().burst_tokens == QUANTUM_TOKENS


@pytest.mark.plain
def test_a_constant_is_restored_when_a_workload_fails() -> None:
    before = controller.SLACK_ITLS
    with pytest.raises(ZeroDivisionError), ablation.changed(CONSTANTS["controller.SLACK_ITLS"], 0):
        assert controller.SLACK_ITLS == 0
        _ = 1 / 0
    assert before == controller.SLACK_ITLS


@pytest.mark.parametrize("key", CONSTANTS)
def test_every_constant_is_there_and_no_variant_is_its_default(key: str) -> None:
    constant = CONSTANTS[key]
    value = getattr(import_module(constant.module), constant.name)
    assert value not in ablation.variants(constant).values()


def test_an_effect_that_the_check_seeds_do_not_show_is_none() -> None:
    default = {"P1 attainment": 90.0}
    better = {"P1 attainment": 95.0}
    seeds = (*ablation.CHOOSE, *ablation.CHECK)
    placebos = {("placebo", str(n), "x"): dict.fromkeys(seeds, default) for n in range(ablation.PLACEBOS)}
    shown = dict.fromkeys(seeds, better)
    not_shown = shown | dict.fromkeys(ablation.CHECK, default)
    results = {**placebos, ("default", "", "x"): dict.fromkeys(seeds, default)}
    noise = ablation.noise_of(results, "x", seeds)
    judge = ablation.Judge({**results, ("k", "removed", "x"): shown}, noise)
    assert [one["is"] for one in judge.effects("k", "removed", "x")] == ["better"]
    judge = ablation.Judge({**results, ("k", "removed", "x"): not_shown}, noise)
    assert judge.effects("k", "removed", "x") == []


def test_the_page_is_what_the_results_say() -> None:
    stored = json.loads((RESULTS / "ablation.json").read_text())["result"]
    assert ablation_page.PAGE.read_text() == ablation_page.page(stored)
