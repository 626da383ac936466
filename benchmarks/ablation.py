"""Which tuning constants of the scheduler pay: every one of them changed, on every workload, in the simulator.

Each constant is removed, halved and doubled (`ablation_constants`), one at a time, and the workloads of
`ablation_loads` are played with it. Near saturation a millisecond decides which job waits, so the default is played
four times for each seed, three of them with arrivals moved by about a millisecond. Differences are taken seed by seed
from the mean of those plays, and their spread is the noise.

Everything is played with one seed first. Where that moves any figure of a workload by more than twice the noise, the
variant is played there with the other seeds for choosing; where those agree, with the seeds for checking. An effect
counts when its mean over the seeds for choosing is above three times its noise and the seeds for checking, which decide
nothing else, show it too.

Verdicts:

- `pays`: without the constant some workload is worse.
- `removable`: without it nothing is worse, but a wrong value is.
- `unclear`: it may be worse without it, by more than twice the noise, but not for certain.
- `insensitive`: no workload notices any of the changes.
- `hurts`: another value is better on some workload and worse on none.
- `not reached`: every run is the same to the last token, whatever the value.

Constants are set in the modules while a workload is played, which compiled modules do not allow: run from a compiled
tree, the measurement starts itself again as plain Python. Two processes, at low priority. Needs the recorded traces
of `benchmarks.trace_files`.
"""

import ast
import multiprocessing
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, reduce
from importlib import import_module
from math import log, sqrt
from typing import Any, NamedTuple

from benchmarks import uncompiled
from benchmarks.ablation_constants import CONSTANTS, Constant
from benchmarks.ablation_loads import LOADS, direct, engine_model, jittered, one_engine, runs_of
from benchmarks.trace_files import SOURCES, trace_file
from inferry.cli.checkout import ROOT, is_compiled
from inferry.sim.report import Report, report
from inferry.sim.simulation import Simulation


class Seeds(NamedTuple):
    """Seeds for choosing, and those that only confirm effects."""

    choose: tuple[int, ...] = (1, 2, 3)
    check: tuple[int, ...] = (101, 102)


SEEDS = Seeds()
PLACEBOS = 3
PROCESSES = 2
NICE = 15
FLOORS = {"attainment": 0.5, "ttft_p95": 10.0, "rate": 1.0}
"""Differences too small to count: points of attainment, and per cent (100 times the logarithm of the ratio)."""
SCREENED, CHOSEN, SUSPECTED, CHECKED = 2.0, 3.0, 2.0, 1.5
"""Multiples of the noise: to be played again, to be chosen, to count against a variant, and to be confirmed."""
PATCHED = ("scheduling", "dispatch", "admission", "prediction", "sim")
"""Packages whose modules may import a constant by name."""

Figures = dict[str, float]
Task = tuple[str, int, str, str]
"""Workload, seed, constant (or `default`, `placebo`, `direct`) and variant."""
Results = dict[tuple[str, str, str], dict[int, Figures]]
"""Figures by constant, variant and workload, then by seed."""
Noise = dict[tuple[str, str], float]
"""The spread of one play's figures, by workload and figure."""


# -- changing a constant ---------------------------------------------------------------------------------------------


def variants(constant: Constant) -> dict[str, Any]:
    """The values it is changed to, by what is done to it. Those that would be the default are left out."""
    value = getattr(import_module(constant.module), constant.name)
    made = {"removed": constant.removed, "halved": constant.halved, "doubled": constant.doubled}
    if constant.halved is None:
        made["halved"] = max(1, value // 2) if isinstance(value, int) else value / 2
    if constant.doubled is None:
        made["doubled"] = value * 2
    return {name: one for name, one in made.items() if one is not None and one != value}


@contextmanager
def changed(constant: Constant, value: Any) -> Iterator[None]:
    """The constant has the value wherever its name or a default argument holds it, until the end of the block."""
    before = getattr(import_module(constant.module), constant.name)
    spots = [(constant.module, constant.name), *_importers().get((constant.module, constant.name), ())]
    functions = [_function(name) for name in constant.defaults]
    defaults = [(one, one.__defaults__, one.__kwdefaults__) for one in functions]
    try:
        for module, name in spots:
            setattr(import_module(module), name, value)
        for one, positional, named in defaults:
            one.__defaults__ = positional and tuple(value if x is before else x for x in positional)
            one.__kwdefaults__ = named and {key: value if x is before else x for key, x in named.items()}
        yield
    finally:
        for module, name in spots:
            setattr(import_module(module), name, before)
        for one, positional, named in defaults:
            one.__defaults__, one.__kwdefaults__ = positional, named


def _function(name: str) -> Any:
    module, _, path = name.partition(":")
    return reduce(getattr, path.split("."), import_module(module))


@cache
def _importers() -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Which modules have a name of another one as their own: (module, name) to (importer, name there)."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    root = ROOT / "src" / "inferry"
    for package in PATCHED:
        for path in sorted((root / package).rglob("*.py")):
            importer = ".".join(("inferry", *path.relative_to(root).with_suffix("").parts))
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    for one in node.names:
                        found[node.module, one.name].append((importer, one.asname or one.name))
    return found


# -- playing ---------------------------------------------------------------------------------------------------------


def play(task: Task) -> tuple[Task, Figures]:
    """One workload with one seed and one change."""
    _, _, key, variant = task
    if key not in CONSTANTS:
        return task, _figures(task)
    constant = CONSTANTS[key]
    with changed(constant, variants(constant)[variant]):
        return task, _figures(task)


def _figures(task: Task) -> Figures:
    load, seed, key, variant = task
    model = engine_model()
    runs, hashes = runs_of(load, seed)
    arm = direct(model) if key == "direct" else LOADS[load].arm(model)
    simulation = Simulation(arm.frontend(), model.costs, arm.flags, hashes=hashes)
    simulation.play(jittered(runs, seed, int(variant)) if key == "placebo" else runs)
    return figures_of(report(simulation, load))


def figures_of(result: Report) -> Figures:
    """Attainment in per cent and TTFT p95 in seconds by lane, output tokens a second, and the end of the last call."""
    figures: Figures = {}
    for lane, one in result.lanes.items():
        figures[f"{lane} attainment"] = 100 * one.attainment
        figures[f"{lane} ttft_p95"] = one.ttft_p95 or 0.0
    return {**figures, "output rate": result.output_rate, "wall rate": 1.0 / max(result.wall_s, 1e-9)}


def differences(figures: Figures, default: Figures) -> Figures:
    """Points of attainment; else 100 times the logarithm of the ratio, which is per cent where it is small."""
    return {
        name: value - default[name]
        if name.endswith("attainment")
        else 100 * log(max(value, 1e-9) / max(default[name], 1e-9))
        for name, value in figures.items()
    }


def play_all(tasks: Sequence[Task], into: Results, processes: int = PROCESSES) -> None:
    ordered = sorted(tasks, key=lambda task: task[:2])  # the runs of a workload and seed are made once
    with multiprocessing.Pool(processes, os.nice, (NICE - os.nice(0),)) as pool:
        for number, (task, figures) in enumerate(pool.imap(play, ordered, chunksize=16), 1):
            load, seed, key, variant = task
            into.setdefault((key, variant, load), {})[seed] = figures
            if not number % 200:
                print(f"{number} of {len(ordered)} played", file=sys.stderr, flush=True)


# -- what is an effect -----------------------------------------------------------------------------------------------


def default_of(results: Results, load: str, seed: int) -> list[Figures]:
    """All plays of the default: as they are, and with arrivals moved."""
    moved_too = [results["placebo", str(number), load][seed] for number in range(PLACEBOS)]
    return [results["default", "", load][seed], *moved_too]


def mean_of(rows: Sequence[Figures]) -> Figures:
    return {name: statistics.fmean([one[name] for one in rows]) for name in rows[0]}


def noise_of(results: Results, load: str, seeds: Sequence[int]) -> Noise:
    """The random deviation of one play from the mean of the default's plays, by figure of a workload."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for seed in seeds:
        plays = default_of(results, load, seed)
        for one in plays:
            for name, apart in differences(one, mean_of(plays)).items():
                found[load, name].append(apart * apart)
    count = PLACEBOS + 1
    # One of `count` is nearer to their mean than one more play would be.
    return {key: sqrt(statistics.fmean(squares) * (count + 1) / (count - 1)) for key, squares in found.items()}


class Judge:
    """Tells effects from chance."""

    def __init__(self, results: Results, noise: Noise, seeds: Seeds) -> None:
        self._results = results
        self.noise = noise
        self.seeds = seeds

    def difference(self, key: str, variant: str, load: str, seed: int) -> Figures:
        """Relative to the mean of the default's plays: a single play may be an outlier."""
        return differences(self._results[key, variant, load][seed], mean_of(default_of(self._results, load, seed)))

    def mean(self, key: str, variant: str, load: str, seeds: Sequence[int]) -> Figures:
        each = [self.difference(key, variant, load, seed) for seed in seeds]
        return {name: statistics.fmean([one[name] for one in each]) for name in each[0]}

    def exceeds_noise(self, load: str, name: str, value: float, seeds: int, times: float, floor: float = 1.0) -> bool:
        """Whether the mean of the differences exceeds the noise and the floor."""
        least = floor * FLOORS[name.split()[1]]
        return abs(value) > max(least, times * self.noise[load, name] / sqrt(seeds))

    def moves(self, load: str, key: str, variant: str) -> bool:
        """Whether the first seed alone shows an effect."""
        found = self.difference(key, variant, load, self.seeds.choose[0])
        return any(self.exceeds_noise(load, name, value, 1, SCREENED) for name, value in found.items())

    def is_chosen(self, load: str, key: str, variant: str) -> bool:
        """Whether the seeds for choosing show an effect."""
        choose = self.seeds.choose
        found = self.mean(key, variant, load, choose)
        return any(self.exceeds_noise(load, name, value, len(choose), SUSPECTED) for name, value in found.items())

    def effects(self, key: str, variant: str, load: str) -> list[dict[str, Any]]:
        """Effects of the variant on the workload: confirmed `better`, confirmed `worse`, or suspected worse."""
        if not set(self.seeds.check) <= set(self._results.get((key, variant, load), ())):
            return []
        chosen, checked = (self.mean(key, variant, load, seeds) for seeds in self.seeds)
        choices, checks = map(len, self.seeds)
        found = []
        for name, value in chosen.items():
            check = checked[name]
            good = value < 0 if name.endswith("ttft_p95") else value > 0
            agree = check * value > 0
            confirmed = (
                agree
                and self.exceeds_noise(load, name, value, choices, CHOSEN)
                and self.exceeds_noise(load, name, check, checks, CHECKED, 0.5)
            )
            suspected = agree and not good and self.exceeds_noise(load, name, value, choices, SUSPECTED)
            if confirmed or suspected:
                kind = ("better" if good else "worse") if confirmed else "suspected worse"
                found.append(
                    {"load": load, "figure": name, "is": kind, "choose": round(value, 2), "check": round(check, 2)}
                )
        return found


def verdict(found: dict[str, list[dict[str, Any]]], reached: bool) -> str:
    """The verdict on one constant, from the effects of its variants."""
    if not reached:
        return "not reached"
    kinds = {variant: {one["is"] for one in effects} for variant, effects in found.items()}
    if any("better" in one and not one & {"worse", "suspected worse"} for one in kinds.values()):
        return "hurts"
    removed = kinds.get("removed", set())
    if "worse" in removed:
        return "pays"
    if "suspected worse" in removed:
        return "unclear"
    if not any(one & {"better", "worse"} for one in kinds.values()):
        return "insensitive"
    return "removable" if "removed" in kinds else "pays"


# -- the table -------------------------------------------------------------------------------------------------------


def ablate(
    keys: Sequence[str], loads: Sequence[str], seeds: Seeds = SEEDS, processes: int = PROCESSES
) -> dict[str, Any]:
    """The table of some constants on some workloads, one workload after the other."""
    results: Results = {}
    noise: Noise = {}
    for load in loads:
        noise |= play_load(keys, load, results, seeds, processes)
    return table(keys, loads, results, noise, seeds)


def play_load(keys: Sequence[str], load: str, results: Results, chosen: Seeds, processes: int = PROCESSES) -> Noise:
    """Play everything of one workload; the noise of its figures."""
    seeds = (*chosen.choose, *chosen.check)
    reaching = [key for key in keys if (only := CONSTANTS[key].only) is None or load in only]
    cells = [(load, key, variant) for key in reaching for variant in variants(CONSTANTS[key])]
    tasks: list[Task] = [(load, seed, "default", "") for seed in seeds]
    tasks += [(load, seed, "placebo", str(number)) for seed in seeds for number in range(PLACEBOS)]
    if LOADS[load].arm(engine_model()).flags == one_engine(engine_model()).flags:
        tasks += [(load, seed, "direct", "fcfs") for seed in seeds]
    play_all([*tasks, *((load, chosen.choose[0], *cell[1:]) for cell in cells)], results, processes)
    noise = noise_of(results, load, seeds)
    judge = Judge(results, noise, chosen)
    for some, is_left in ((chosen.choose[1:], judge.moves), (chosen.check, judge.is_chosen)):
        cells = [cell for cell in cells if is_left(*cell)]
        print(f"{load}: {len(cells)} variants with the seeds {some}", file=sys.stderr, flush=True)
        play_all([(load, seed, *cell[1:]) for cell in cells for seed in some], results, processes)
    return noise


def table(
    keys: Sequence[str], loads: Sequence[str], results: Results, noise: Noise, seeds: Seeds = SEEDS
) -> dict[str, Any]:
    judge = Judge(results, noise, seeds)
    return {
        "seeds": {"choose": list(seeds.choose), "check": list(seeds.check)},
        "floors": FLOORS,
        "loads": {load: _load_row(results, judge, load) for load in loads},
        "constants": {key: _constant_row(results, judge, key, loads) for key in keys},
    }


def _load_row(results: Results, judge: Judge, load: str) -> dict[str, Any]:
    names = results["default", "", load][judge.seeds.choose[0]]
    row = {
        "words": LOADS[load].words,
        "default": _means({seed: mean_of(default_of(results, load, seed)) for seed in results["default", "", load]}),
        "noise": {name: round(judge.noise[load, name], 2) for name in names},
    }
    if ("direct", "fcfs", load) in results:
        row["direct"] = _means(results["direct", "fcfs", load])
    return row


def _constant_row(results: Results, judge: Judge, key: str, loads: Sequence[str]) -> dict[str, Any]:
    constant = CONSTANTS[key]
    values = variants(constant)
    played_on = [load for load in loads if constant.only is None or load in constant.only]
    found = {name: [effect for load in played_on for effect in judge.effects(key, name, load)] for name in values}
    cells: dict[str, dict[str, Any]] = {name: {} for name in values}
    for name in values:
        for load in played_on:
            by_seed = results.get((key, name, load), {})
            default = {seed: results["default", "", load][seed] for seed in by_seed}
            if by_seed != default:
                mean = judge.mean(key, name, load, [seed for seed in by_seed if seed in judge.seeds.choose])
                cells[name][load] = {
                    "seeds": len(by_seed),
                    **_means(by_seed),
                    "difference": {figure: round(one, 2) for figure, one in mean.items()},
                }
    return {
        "meaning": constant.meaning,
        "value": getattr(import_module(constant.module), constant.name),
        "variants": values,
        "verdict": verdict(found, any(cells.values())),
        "effects": found,
        "cells": cells,
    }


def _means(by_seed: dict[int, Figures]) -> dict[str, float]:
    """Means over seeds; the wall time as seconds again."""
    figures = mean_of(list(by_seed.values()))
    figures["wall_s"] = 1.0 / figures.pop("wall rate")
    return {name: round(value, 3) for name, value in figures.items()}


def measure() -> dict[str, Any]:
    for name in SOURCES:
        trace_file(name)
    if is_compiled():
        result: dict[str, Any] = uncompiled.call_uncompiled("benchmarks.ablation", "measure")
        return result
    return ablate(list(CONSTANTS), list(LOADS))
