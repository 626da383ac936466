"""`python -m benchmarks.ablation_page`: write docs/explanation/constants.md from benchmarks/results/ablation.json."""

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import exp
from typing import Any

from benchmarks.ablation_constants import CONSTANTS, NOT_PLAYED
from benchmarks.ablation_loads import LOADS
from benchmarks.result_files import RESULTS
from inferry.cli.checkout import ROOT

PAGE = ROOT / "docs" / "explanation" / "constants.md"
MOST_SHOWN = 3
VERDICTS = {
    "pays": "Removing the constant makes some workload worse.",
    "hurts": "Another value is better on some workload and worse on none.",
    "removable": "Removing the constant makes nothing worse, but a wrong value does.",
    "unclear": "Removing the constant may make a workload worse, by more than twice the noise, but not for certain.",
    "insensitive": "No workload notices any of the changes that were played.",
    "not reached": "Every run is the same to the last token, whatever the value.",
}
_ABOUT = """# Constants of the scheduler

Which tuning constants decide anything, measured in the simulator. This page is generated from
[ablation.json](../../benchmarks/results/ablation.json) by `python -m benchmarks.ablation_page`;
`make bench BENCH=ablation` measures it anew.

Each constant is removed, halved and doubled, one at a time; all others keep their values. "Removed" is a value that
takes the rule away, such as no bound or no memory. Where twice a part would be more than all of it, a value nearer to
the bound stands for "doubled". One seed is played first, and the others where that seed notices a change.

Differences from the default are taken seed by seed over {choose} seeds for choosing and {check} seeds that only check.
The noise of a figure is its spread when arrivals move by a millisecond. An effect counts when its mean is above three
times its noise and above {attainment} points of attainment, {ttft_p95:.0f} % of a TTFT p95 or {rate:.0f} % of the
output rate or wall time, and the seeds for checking agree. Effects below are those of the seeds for choosing: points of
attainment, or the factor by which a figure changes.

A constant that no workload notices may still matter on traffic that is not among them. On small workloads one call is a
point of attainment or more: `mooncake` has 110 calls. Interactions are outside this measurement: two constants may
each be removable only because the other is there.

Constants that an earlier ablation found to decide nothing were removed
([decision 20](../adr/0020-fewer-constants-in-capacity-control.md)); those that stay without an effect are guarantees,
or are needed on traffic that the simulator does not have. Where the code has another value by now, brackets say so.
Every number among the constants of `inferry.scheduling` is here: measured, to be measured, or not played for a reason.
"""


def page(result: Mapping[str, Any]) -> str:
    """The page, from what `ablation.measure` returned."""
    seeds, floors = result["seeds"], result["floors"]
    parts = [_ABOUT.format(choose=len(seeds["choose"]), check=len(seeds["check"]), **floors)]
    parts += [*_measured_later(result["constants"]), _loads(result["loads"])]
    for verdict, words in VERDICTS.items():
        rows = [(key, one) for key, one in result["constants"].items() if one["verdict"] == verdict]
        if rows:
            parts.append(_section(verdict, words, rows))
    if missing := [key for key in CONSTANTS if key not in result["constants"]]:
        parts.append(_not_measured(missing))
    parts.append(_not_played())
    return "\n".join(parts)


def _measured_later(constants: Mapping[str, Any]) -> list[str]:
    """How the rows were measured that were added to the file."""
    measured = {json.dumps(one["measured"]): one["measured"] for one in constants.values() if "measured" in one}
    return [
        f"Rows with an asterisk were measured at commit {one['commit']},\n"
        f"with {_seeds(one['seeds']['choose'])} for choosing and {len(one['seeds']['check'])} for checking,\n"
        f"on {_all_or_some(one['loads'])}.\n"
        for one in measured.values()
    ]


def _seeds(seeds: Sequence[int]) -> str:
    return "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _all_or_some(loads: Sequence[str]) -> str:
    if len(loads) == len(LOADS):
        return "all workloads"
    return ", ".join(f"`{name}`" for name in loads) + " alone; other workloads may notice what these do not"


def _loads(loads: Mapping[str, Any]) -> str:
    lines = [
        "## Workloads",
        "",
        "Means over all seeds: attainment in per cent and TTFT p95 in seconds, the gateway and direct (FCFS).",
        "",
        "| workload | what | P0 | P1 | P2 | direct: P0 | P1 | P2 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in loads.items():
        cells = [_lane(one.get(arm), lane) for arm in ("default", "direct") for lane in ("P0", "P1", "P2")]
        lines.append(f"| `{name}` | {one['words']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _lane(figures: Mapping[str, float] | None, lane: str) -> str:
    if figures is None or f"{lane} attainment" not in figures:
        return ""
    return f"{figures[f'{lane} attainment']:.1f} %, {figures[f'{lane} ttft_p95']:.2f} s"


def _section(verdict: str, words: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    lines = [
        f"## {verdict[0].upper()}{verdict[1:]}",
        "",
        words,
        "",
        "| constant | value | meaning | largest effects |",
        "| --- | --- | --- | --- |",
    ]
    for key, one in rows:
        value = _value(one["value"]) + _changed(key, one["value"])
        mark = r" \*" if "measured" in one else ""
        lines.append(f"| `{key}`{mark} | {value} | {one['meaning']} | {_evidence(one)} |")
    return "\n".join([*lines, ""])


def _changed(key: str, measured: Any) -> str:
    """What the code has instead of the measured value; empty where that is the same."""
    constant = CONSTANTS.get(key)
    if constant is None:
        return " (removed)"
    now = _value(getattr(import_module(constant.module), constant.name))
    return "" if now == _value(measured) else f" (now {now})"


def _evidence(one: Mapping[str, Any]) -> str:
    """The largest confirmed effects of each variant, as multiples of what is worth a word."""
    told = []
    for variant, effects in one["effects"].items():
        sure = [effect for effect in effects if effect["is"] in ("better", "worse")]
        sure.sort(key=lambda effect: -_weight(effect))
        if sure:
            shown = ", ".join(map(_effect, sure[:MOST_SHOWN]))
            more = f" and {len(sure) - MOST_SHOWN} more" if len(sure) > MOST_SHOWN else ""
            told.append(f"{variant} ({_value(one['variants'][variant])}): {shown}{more}")
    return "; ".join(told) or "none"


def _weight(effect: Mapping[str, Any]) -> float:
    scale = {"attainment": 0.5, "ttft_p95": 10.0, "rate": 1.0}[effect["figure"].split()[1]]
    return abs(float(effect["choose"])) / scale


def _effect(effect: Mapping[str, Any]) -> str:
    what, figure = effect["figure"].split()
    value = effect["choose"]
    sign = "**better**" if effect["is"] == "better" else "worse"
    if figure == "attainment":
        return f"`{effect['load']}` {what} {value:+.1f} points ({sign})"
    if figure == "ttft_p95":
        return f"`{effect['load']}` {what} TTFT p95 {exp(value / 100):.2f} times ({sign})"
    name = "output rate" if what == "output" else "wall time"
    factor = exp(value / 100) if what == "output" else exp(-value / 100)
    return f"`{effect['load']}` {name} {factor:.3f} times ({sign})"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_value, value)) + ")"
    if isinstance(value, float | int) and value >= 10**8:
        return "no bound"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _not_played() -> str:
    lines = [
        "## Not played",
        "",
        "Constants that the workloads cannot reach, and those that are no tuning.",
        "",
        "| constants | why |",
        "| --- | --- |",
    ]
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {why} |" for why, names in NOT_PLAYED.items()]
    return "\n".join([*lines, *rows, ""])


def _not_measured(keys: Sequence[str]) -> str:
    lines = [
        "## Not measured yet",
        "",
        "Constants that the next measurement plays.",
        "",
        "| constant | value | meaning |",
        "| --- | --- | --- |",
    ]
    for key in keys:
        one = CONSTANTS[key]
        lines.append(f"| `{key}` | {_value(getattr(import_module(one.module), one.name))} | {one.meaning} |")
    return "\n".join([*lines, ""])


def main() -> None:
    PAGE.write_text(page(json.loads((RESULTS / "ablation.json").read_text())["result"]))


if __name__ == "__main__":
    main()
