"""`python -m benchmarks.targets_table`: the table of goals on other traffic in docs/explanation/capacity.md.

From `never-worse.json` (attainment, the engine alone, the rule, throughput) and `attainment-bound.json` (the share of
the bound).
"""

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.attainment_bound import GOALS
from benchmarks.result_files import RESULTS
from inferry.cli.checkout import ROOT

PAGE = ROOT / "docs" / "explanation" / "capacity.md"
BEGIN, END = "<!-- targets: begin -->\n", "<!-- targets: end -->\n"
THROUGHPUT_GOAL = 0.95
TIMES = "\N{MULTIPLICATION SIGN}"
_HEAD = (
    "| workload | P0 | P1 | P2 | of the bound: P0, P1 | goal | rule, seeds | throughput |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)


def table() -> str:
    """One row by workload; what misses its goal is bold."""
    workloads = _result("never-worse")["workloads"]
    bound = _result("attainment-bound")
    lines = [_row(name, one, bound["workloads"].get(name)) for name, one in workloads.items()]
    return "\n".join([*_HEAD, *lines, ""])


def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())["result"]


def _row(name: str, one: Mapping[str, Any], bound: Mapping[str, Any] | None) -> str:
    lanes = " | ".join(_lane(one["lanes"][lane]) for lane in ("P0", "P1", "P2"))
    shares, goal = "", ""
    if bound is not None:
        least = bound["P0"]["goal"]
        assert least == GOALS[float(name.split()[-1])]
        shares = ", ".join(_bold(f"{of:.2f}", of < least) for of in (bound[lane]["of_bound"] for lane in ("P0", "P1")))
        goal = f"{least:.2f}"
    kept = f"{_bold('kept' if one['kept'] else 'broken', not one['kept'])}, {one['seeds_kept']} of 10"
    throughput = _bold(f"{one['throughput']:.2f}{TIMES}", one["throughput"] < THROUGHPUT_GOAL)
    return f"| {name} | {lanes} | {shares} | {goal} | {kept} | {throughput} |"


def _lane(one: Mapping[str, Any]) -> str:
    ratio = _bold(f"{one['ratio']:.2f}{TIMES}", not one["kept"])
    return f"{100 * one['attainment']:.1f} ({100 * one['direct_attainment']:.1f}) %, {ratio}"


def _bold(text: str, is_missed: bool) -> str:
    return f"**{text}**" if is_missed else text


def with_table(page: str) -> str:
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + table() + END + rest.partition(END)[2]


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
