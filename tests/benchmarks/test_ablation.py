"""The ablation sets and restores constants around a workload and tabulates the effect."""

import ast
import enum
import json
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import ablation, ablation_more, ablation_page
from benchmarks.ablation_constants import CONSTANTS, NOT_PLAYED
from benchmarks.ablation_loads import LOADS, Load, one_engine
from benchmarks.result_files import RESULTS
from inferry.scheduling import overload
from inferry.scheduling.capacity import controller, step_costs
from inferry.scheduling.capacity.prefill_bucket import TickContext
from inferry.scheduling.queues.quantum import QUANTUM_TOKENS
from inferry.sim.arrivals import poisson, uniform_lengths

SRC = Path(__file__).parents[2] / "src"
TINY = Load(
    "tiny", "a few calls", lambda seed: list(poisson(seed, 3.0, 2.0, uniform_lengths((50, 90), (3, 9)))), one_engine
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(LOADS, TINY.name, TINY)
    monkeypatch.setattr(ablation, "PLACEBOS", 1)
    return TINY.name


@pytest.mark.plain
def test_a_table_has_every_variant_and_the_constant_is_restored(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_this_process(tasks: list[ablation.Task], into: ablation.Results, _: int) -> None:
        for load, seed, key, variant in tasks:
            into.setdefault((key, variant, load), {})[seed] = ablation.play((load, seed, key, variant))[1]

    monkeypatch.setattr(ablation, "play_all", in_this_process)
    before = controller.SLACK_ITLS
    table = ablation.ablate(["controller.SLACK_ITLS"], [tiny], ablation.Seeds((1, 2), (3,)))
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


def _numbers(path: Path) -> list[str]:
    """Names of constants of a module that are numbers, or tuples of numbers."""
    module = import_module(_module(path))
    tree = ast.parse(path.read_text())
    targets: list[ast.expr] = [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    targets += [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    names = [target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper()]
    return [name for name in names if _is_number(getattr(module, name))]


def _module(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


def _is_number(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, enum.Enum)


def test_every_number_of_the_scheduler_is_played_or_is_said_not_to_be() -> None:
    paths = [path for path in (SRC / "inferry" / "scheduling").rglob("*.py") if path.name != "__init__.py"]
    there = {f"{_module(path)}.{name}" for path in paths for name in _numbers(path)}
    played = {f"{one.module}.{one.name}" for one in CONSTANTS.values()}
    not_played = {f"inferry.{name}" for names in NOT_PLAYED.values() for name in names}
    assert there - played == {name for name in not_played if name.startswith("inferry.scheduling.")}


def test_an_effect_that_the_check_seeds_do_not_show_is_none() -> None:
    default = {"P1 attainment": 90.0}
    better = {"P1 attainment": 95.0}
    chosen = ablation.Seeds((1, 2), (3,))
    seeds = (*chosen.choose, *chosen.check)
    placebos = {("placebo", str(n), "x"): dict.fromkeys(seeds, default) for n in range(ablation.PLACEBOS)}
    shown = dict.fromkeys(seeds, better)
    not_shown = shown | dict.fromkeys(chosen.check, default)
    results = {**placebos, ("default", "", "x"): dict.fromkeys(seeds, default)}
    noise = ablation.noise_of(results, "x", seeds)
    judge = ablation.Judge({**results, ("k", "removed", "x"): shown}, noise, chosen)
    assert [one["is"] for one in judge.effects("k", "removed", "x")] == ["better"]
    judge = ablation.Judge({**results, ("k", "removed", "x"): not_shown}, noise, chosen)
    assert judge.effects("k", "removed", "x") == []


def test_the_page_names_the_value_in_the_code_where_it_was_changed_after_the_measurement() -> None:
    stored = json.loads((RESULTS / "ablation.json").read_text())["result"]
    one = stored["constants"]["overload.MAX_PASSED_OVER_TTFTS"]
    changed = {"overload.MAX_PASSED_OVER_TTFTS": {**one, "value": 2}, "overload.NO_MORE": one}
    page = ablation_page.page({**stored, "constants": {**stored["constants"], **changed}})
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert f"| 2 (now {overload.MAX_PASSED_OVER_TTFTS:g}) |" in rows["overload.MAX_PASSED_OVER_TTFTS"]
    assert "(now" not in rows["overload.LATE_FRACTION"]
    assert "(removed) |" in rows["overload.NO_MORE"]


def test_rows_are_added_to_a_file_and_the_page_says_how_they_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "ablation.json"
    path.write_text((RESULTS / "ablation.json").read_text())
    before = json.loads(path.read_text())["result"]
    row = {**before["constants"]["overload.LATE_FRACTION"], "verdict": "insensitive", "effects": {}}
    table = {
        "seeds": {"choose": [1], "check": [9]},
        "loads": {"azure": {}},
        "constants": {"overload.LATE_FRACTION": row},
    }
    ablation_more.add(path, table, "overload.LATE_FRACTION --choose 1 --check 9")
    after = json.loads(path.read_text())["result"]
    assert after["loads"] == before["loads"]
    assert after["constants"].keys() == before["constants"].keys()
    measured = after["constants"]["overload.LATE_FRACTION"]["measured"]
    assert measured["command"] == "python -m benchmarks.ablation_more overload.LATE_FRACTION --choose 1 --check 9"
    page = ablation_page.page(after)
    assert r"| `overload.LATE_FRACTION` \* |" in page
    assert f"{measured['commit']}, with 1 seed for choosing and 1 for checking, on `azure` alone;" in " ".join(
        page.split()
    )


def test_the_page_is_what_the_results_say() -> None:
    stored = json.loads((RESULTS / "ablation.json").read_text())["result"]
    assert ablation_page.PAGE.read_text() == ablation_page.page(stored)
