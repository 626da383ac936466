"""Two commits are compared pair by pair, and an earlier layout of the package is translated."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import before_after_served, path
from benchmarks.before_after import COMPARISONS, main
from benchmarks.before_after_served import path_figures
from benchmarks.comparison import Figure, Tree, compared, line_of, tree_of
from benchmarks.layouts import AT_91C68FC, TODAY, Layout, config_for, install, layout_of
from benchmarks.path import config_for_backend
from benchmarks.scheduler import _FULL_LANES, cell_names
from benchmarks.serving import parse_metrics
from inferry.domain.lanes import Lane


def test_a_figure_is_worse_when_the_median_ratio_is_off_by_more_than_two_percent_in_its_bad_direction() -> None:
    def is_worse(before: list[float], after: list[float], higher_is_better: bool = False) -> bool:
        row = compared(Figure("f", before, after, higher_is_better))
        return bool(row["worse_by_more_than_2_percent"])

    assert is_worse([100.0], [102.1])
    assert not is_worse([100.0], [102.0])
    assert not is_worse([100.0], [50.0])
    assert is_worse([100.0], [97.9], higher_is_better=True)
    assert not is_worse([100.0], [200.0], higher_is_better=True)
    assert is_worse([100.0], [0.0], higher_is_better=True)
    assert not is_worse([10.0, 20.0, 30.0], [10.0, 20.0, 60.0]), "one pair of three"


def test_the_ratio_is_the_median_of_the_pairs_with_an_interval_where_there_are_enough() -> None:
    few = compared(Figure("f", [1.0, 10.0, 2.0], [2.0, 15.0, 2.0]))
    assert (few["before"], few["after"], few["ratio"]) == (2.0, 2.0, 1.5)
    assert "interval" not in few
    many = compared(Figure("f", [1.0] * 6, [0.9, 1.0, 1.1, 1.2, 1.3, 1.4]))
    assert many["interval"] == [0.9, 1.4]
    assert "[0.900, 1.400]" in line_of("f", many)


def test_nothing_before_and_something_after_is_an_infinite_ratio() -> None:
    assert compared(Figure("f", [0.0], [0.0]))["ratio"] == 1.0
    assert compared(Figure("f", [0.0], [1.0]))["ratio"] == inf


def test_a_gateway_of_an_earlier_commit_gets_its_own_configuration_keys() -> None:
    config = config_for_backend(1) | {"server": {"retry_slots": False, "drain_timeout_s": 1}}
    config["workers"][0]["capacity"] = "fixed"
    earlier = config_for(AT_91C68FC, config)
    assert earlier["sharing"] == {"identical": False}
    assert earlier["server"] == {"keep_turns": False, "drain_timeout_s": 1}
    assert earlier["workers"][0]["room"] == "fixed"
    assert not {"single_flight", "capacity"} & {*earlier, *earlier["workers"][0]}
    assert config_for(TODAY, config) == config


def test_metrics_of_an_earlier_commit_have_the_names_of_today() -> None:
    text = '# HELP x\ninferry_running_sequences{worker="a"} 2\ninferry_running_sequences{worker="b"} 1\nother 4\n'
    assert parse_metrics(text) == {"inferry_worker_running_sequences": 3.0, "other": 4.0}


def test_the_layout_of_a_package_is_recognised(tmp_path: Path) -> None:
    assert layout_of(tmp_path) is TODAY
    (tmp_path / "inferry" / "bench").mkdir(parents=True)
    assert layout_of(tmp_path) is AT_91C68FC


def test_modules_attributes_and_keywords_of_today_are_found_in_an_earlier_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier = ModuleType("earlier_plans")
    earlier.__dict__.update(Room=dict, View=dict)
    monkeypatch.setitem(sys.modules, "earlier_plans", earlier)
    monkeypatch.setitem(sys.modules, "today_workers", None)
    install(
        Layout(
            modules={"today_workers": "earlier_plans"},
            attributes={"today_workers": {"Capacity": "Room"}},
            keywords={"today_workers.View": {"capacity": "room", "groups": None}},
        )
    )
    today = sys.modules["today_workers"]
    assert today.Capacity is dict
    assert today.View(capacity=1, groups=2, name=3) == {"room": 1, "name": 3}
    assert earlier.View is dict, "the earlier package itself is unchanged"


def test_a_tree_without_a_compiled_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make compiled"):
        tree_of(f"abc={tmp_path}")
    (tmp_path / "build" / "compiled").mkdir(parents=True)
    (tmp_path / "build" / "compiled" / "x__mypyc.so").touch()
    assert tree_of(f"abc={tmp_path}").commit == "abc"
    assert tree_of(str(tmp_path)).commit == tmp_path.name


def test_an_unknown_benchmark_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "build" / "compiled").mkdir(parents=True)
    (tmp_path / "build" / "compiled" / "x__mypyc.so").touch()
    with pytest.raises(SystemExit):
        main([str(tmp_path), str(tmp_path), "--only", "nothing"])
    told = capsys.readouterr().err
    assert all(name in told for name in COMPARISONS)


def test_the_benchmark_of_the_scheduler_has_live_lanes() -> None:
    assert [lane for lane, policy in _FULL_LANES.items() if policy.is_live] == [Lane.P0, Lane.P1]
    assert len(cell_names()) == 19


def test_everything_on_is_compared_with_the_limits_of_the_earlier_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No process is started: every arm is known by its options, and its calls cost what these options cost."""

    @contextmanager
    def run_backend(tools: Any, itl_us: int) -> Iterator[int]:
        yield 9

    @contextmanager
    def run_gateway(config: dict[str, Any], *, core: int, package: Path) -> Iterator[tuple[int, Any]]:
        yield 1, _Process(package)

    @contextmanager
    def run_with_key(
        config: dict[str, Any], tenant: str, *, core: int, package: Path
    ) -> Iterator[tuple[int, Any, str]]:
        yield (2 if "tracing" in config else 1), _Process(package), "key"

    @contextmanager
    def run_viewer(command: list[str], **options: Any) -> Iterator[Any]:
        yield _Process(tmp_path)

    def load_with(tools: Any, body: Path, connections: int, seconds: float) -> Callable[[path.Arm], path.Run]:
        cost = {"n": 1.0, "errors": 0.0, "non200": 0.0, "rps": 1.0, "events_per_s": 1.0, "wall_s": 1.0}
        # The port says what is on, the process says which commit it is.
        return lambda arm: {**cost, "cpu_s": 1e-6 * (arm.port + 10 * (arm.pid + bool(arm.headers)))}

    monkeypatch.setattr(before_after_served, "build_tools", lambda directory: _Tools(tmp_path))
    monkeypatch.setattr(before_after_served, "run_gateway", run_gateway)
    for name, fake in {
        "run_backend": run_backend,
        "run_gateway_with_key": run_with_key,
        "run_process": run_viewer,
        "load_with": load_with,
    }.items():
        monkeypatch.setattr(path, name, fake)
    trees = Tree("old", tmp_path / "old"), Tree("new", tmp_path / "new")
    figures = {figure.name: (round(figure.before[0]), round(figure.after[0])) for figure in path_figures(trees, 1)}
    assert figures["c1: CPU us per request"] == (1, 101)
    assert figures["c32, key and every limit: CPU us per request"] == (11, 111)
    for case in ("c1", "c32", "c32_stream"):
        found = figures[f"{case}, everything on, beside limits alone: CPU us per request"]
        assert found == (11, 112)


class _Process:
    def __init__(self, package: Path) -> None:
        self.pid = 10 if "new" in package.parts else 0

    def poll(self) -> None: ...


class _Tools:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
