"""Two commits side by side in one run, measured by the benchmarks of this tree, in alternating rounds.

    PYTHONPATH=build/compiled python -m benchmarks.before_after BEFORE AFTER [--only NAME ...] [--effort PERCENT]

BEFORE and AFTER are `[COMMIT=]PATH`: checkouts with a compiled package (`make compiled`). Neither network, git history
nor other gateways are needed. An earlier layout of the package is translated (`layouts`). `--effort` scales the number
of rounds; with 100 all benchmarks take about eight minutes on sixteen cores. Every figure is one line: before, after,
the median of the ratios, its 95 % interval where there are six pairs or more, and whether it is worse by more than 2 %.
Results are kept in `results/before-after.json`, a section for each benchmark.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from statistics import fmean
from typing import Any

from msgspec import Struct

from benchmarks.before_after_served import (
    Trees,
    lanes_figures,
    overload_figures,
    path_figures,
    runs_figures,
    streams_figures,
)
from benchmarks.commit_process import run_commit_process
from benchmarks.comparison import Figure, Tree, compared, line_of, tree_of
from benchmarks.result_files import RESULTS, circumstances

RESULT = RESULTS / "before-after.json"
HARBOR_SEEDS = range(10)


def scheduler_figures(trees: Trees, rounds: int) -> list[Figure]:
    """CPU microseconds of the scheduler per job. The first round is warm-up."""
    before: dict[str, list[float]] = {}
    after: dict[str, list[float]] = {}
    with ExitStack() as stack:
        arms = [stack.enter_context(run_commit_process(tree.package)) for tree in trees]
        cells, _ = (arm.call("scheduler", "cell_names") for arm in arms)
        for number in range(rounds + 1):
            for cell in cells:
                costs = {
                    which: arms[which].call("scheduler", "cost_of", cell) for which in ((0, 1), (1, 0))[number % 2]
                }
                if number:
                    before.setdefault(cell, []).append(costs[0])
                    after.setdefault(cell, []).append(costs[1])
    return [Figure(f"{cell}: us per job", before[cell], after[cell]) for cell in cells]


def fairness_figures(trees: Trees, rounds: int) -> list[Figure]:
    """Shares of tenants and bounds of lanes, in virtual time: one round says it all."""
    with ExitStack() as stack:
        arms = [stack.enter_context(run_commit_process(tree.package)) for tree in trees]
        for arm in arms:
            arm.start("fairness", "measure")
        before, after = [arm.result() for arm in arms]
    tenants, bounds = "tenants", "lanes_at_three_times_overload"

    def figure(name: str, of: Callable[[dict[str, Any]], float], higher_is_better: bool = False) -> Figure:
        return Figure(name, [of(before)], [of(after)], higher_is_better)

    return [
        figure("Jain index", lambda one: one[tenants]["jain_index"], higher_is_better=True),
        figure("throughput of FCFS", lambda one: 1 - one[tenants]["throughput_loss"], higher_is_better=True),
        figure("tokens that overtake a P0 job", lambda one: one[bounds]["overtaken_by"]),
        figure("tokens P1 is behind its share", lambda one: one[bounds]["behind_its_share"]["P1"]),
        figure("tokens P2 is behind its share", lambda one: one[bounds]["behind_its_share"]["P2"]),
    ]


def harbor_figures(trees: Trees, rounds: int) -> list[Figure]:
    """The Harbor burst in the simulator with the default configuration: means over ten seeds."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as threads:
        played = threads.map(_simulate, [tree for tree in trees for _ in HARBOR_SEEDS], [*HARBOR_SEEDS, *HARBOR_SEEDS])
        reports = list(played)
    before, after = reports[: len(HARBOR_SEEDS)], reports[len(HARBOR_SEEDS) :]

    def figure(name: str, of: Callable[[dict[str, Any]], float], higher_is_better: bool = False) -> Figure:
        return Figure(name, [fmean(map(of, before))], [fmean(map(of, after))], higher_is_better)

    figures = [
        figure("total time s", lambda one: one["wall_s"]),
        figure("output tokens per s", lambda one: one["output_rate"], higher_is_better=True),
    ]
    for lane in ("P0", "P1", "P2"):
        figures.append(figure(f"{lane} attainment", partial(_of_lane, lane, "attainment"), higher_is_better=True))
        figures += [figure(f"{lane} {name} s", partial(_of_lane, lane, name)) for name in ("ttft_p50", "ttft_p95")]
    return figures


def _of_lane(lane: str, name: str, report: dict[str, Any]) -> float:
    value: float = report["lanes"][lane][name]
    return value


def _simulate(tree: Tree, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "inferry", "simulate", "--scenario", "harbor", "--seed", str(seed), "--json"]
    environment = os.environ | {"PYTHONPATH": str(tree.package)}
    done = subprocess.run(command, cwd=tree.root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)["arms"][0]["reports"][0]
    return report


class Comparison(Struct, frozen=True):
    """How a benchmark is compared, and the rounds it takes at full effort."""

    figures: Callable[[Trees, int], list[Figure]]
    rounds: int


COMPARISONS = {
    "scheduler": Comparison(scheduler_figures, 15),
    "fairness": Comparison(fairness_figures, 1),
    "harbor": Comparison(harbor_figures, 1),
    "overload": Comparison(overload_figures, 2),
    "path": Comparison(path_figures, 6),
    "streams": Comparison(streams_figures, 2),
    "lanes": Comparison(lanes_figures, 2),
    "runs": Comparison(runs_figures, 8),
}
"""In the order they run."""
CORES_FOR_OVERLOAD_BESIDE_OTHERS = 8


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before_after")
    parser.add_argument("before", type=tree_of)
    parser.add_argument("after", type=tree_of)
    parser.add_argument("--only", nargs="+", choices=tuple(COMPARISONS), default=tuple(COMPARISONS), metavar="NAME")
    parser.add_argument("--effort", type=float, default=100.0, metavar="PERCENT")
    options = parser.parse_args(arguments)
    trees = (options.before, options.after)
    rounds_of = {name: max(1, round(COMPARISONS[name].rounds * options.effort / 100)) for name in COMPARISONS}
    worse, failed = 0, 0
    print(f"before: {trees[0].commit}, after: {trees[1].commit}", flush=True)
    # Overload mostly waits, for over two minutes. What is measured before it is CPU time or virtual time.
    background: Future[list[Figure]] | None = None
    if "overload" in options.only and (os.cpu_count() or 1) >= CORES_FOR_OVERLOAD_BESIDE_OTHERS:
        background = ThreadPoolExecutor(1).submit(overload_figures, trees, rounds_of["overload"])
    for name in [name for name in COMPARISONS if name in options.only]:
        rounds, started = rounds_of[name], time.monotonic()
        try:
            if name == "overload" and background is not None:
                figures = background.result()
            else:
                figures = COMPARISONS[name].figures(trees, rounds)
        except Exception:  # the others are still worth measuring
            traceback.print_exc()
            failed += 1
            continue
        rows = {figure.name: compared(figure) for figure in figures}
        worse += sum(row["worse_by_more_than_2_percent"] for row in rows.values())
        print(f"== {name}, {rounds} rounds, {time.monotonic() - started:.0f} s", flush=True)
        for title, row in rows.items():
            print(line_of(title, row), flush=True)
        _keep(name, trees, rounds, rows)
    print(f"{worse} figures are worse by more than 2 %, {failed} benchmarks failed; see {RESULT}")
    return 1 if failed else 0


def _keep(name: str, trees: Trees, rounds: int, rows: dict[str, Any]) -> None:
    """Replace the section of a benchmark."""
    sections: dict[str, Any] = json.loads(RESULT.read_text())["sections"] if RESULT.exists() else {}
    before, after = trees
    sections[name] = {
        "command": f"make before-after BEFORE={before.commit}=PATH AFTER={after.commit}=PATH BENCH={name}",
        "before": before.commit,
        "after": after.commit,
        "rounds": rounds,
        **circumstances(),
        "figures": rows,
    }
    RESULT.write_text(json.dumps({"bench": "before-after", "sections": sections}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
