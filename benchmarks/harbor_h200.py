"""`python -m benchmarks.harbor_h200`: the comparison on the H200, computed from its recordings.

It computes every figure from token times, reports differences from the figures printed during the measurement
(benchmarks/results/harbor-h200.json), and explains why calls missed their targets behind the gateway. Earlier
comparisons contribute the gateway's arms. No GPU is needed. `--plots` draws the plots beside the recordings; `--costs`
shows what the current cost model would learn from them; `--simulator` plays their seeds with the current scheduler;
`--store ROWS ARM SEED [ATTEMPT] [LOG]` makes a recording from the load generator's `--rows` and the gateway's debug
log.
"""

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harbor_costs import UNTIL_S, underestimated_prompt_cost
from benchmarks.harbor_figures import SLO_TARGETS_MS, differences, figures
from benchmarks.harbor_misses import missed_by_lane, summary
from benchmarks.harbor_record import Recording, read, to_recording, write
from benchmarks.harbor_simulator import PromptMemoryFrontend, simulate_seed
from benchmarks.result_files import RESULTS
from inferry.domain.lanes import DEFAULT_LANES
from inferry.sim.controlled_gateway import ControlledFrontend

RECORDINGS = RESULTS / "harbor-h200"
BEFORE = (RECORDINGS / "5561493", RECORDINGS / "e6d0335")
"""The gateway's arms of earlier comparisons, latest first, by the measured commit; each on another engine start."""
GATEWAY = "inferry"
DIRECT = ("direct", "priority")
ARMS = (*DIRECT, "sketch", GATEWAY)
MAX_TIME_RATIO = 1.10
MAX_BATCH_LOSS = 0.02
MIN_ATTAINMENT = {"P0": 0.95, "P1": 0.99}


def recordings(directory: Path = RECORDINGS) -> list[Recording]:
    """All recordings, by seed, arm and attempt."""
    found = [read(path) for path in sorted(directory.glob("*.json.xz"))]
    return sorted(found, key=lambda one: (one.seed, ARMS.index(one.arm), one.attempt))


def file_name(arm: str, seed: int, attempt: int) -> str:
    return f"{arm}_{seed}.json.xz" if attempt == 1 else f"{arm}_{seed}_{attempt}.json.xz"


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The gateway's rows beside the direct ones of their seed, if there are any, and whether each target is met."""
    found = []
    for row in rows:
        if row["label"] != GATEWAY:
            continue
        beside = {other["label"]: other for other in rows if other["seed"] == row["seed"] and other["label"] in DIRECT}
        if len(beside) < len(DIRECT):
            continue
        time = row["wall_s"] / min(other["wall_s"] for other in beside.values())
        batch = row["P2"]["slo"] - beside["priority"]["P2"]["slo"]
        met = {
            **{f"{lane} at least {least:.0%}": row[lane]["slo"] >= least for lane, least in MIN_ATTAINMENT.items()},
            "no failed call": row["failed"] == 0,
            "P2 at most 2 points below priority": batch >= -MAX_BATCH_LOSS,
            "all done within 1.10 of the faster direct arm": time <= MAX_TIME_RATIO,
        }
        found.append(
            {
                "seed": row["seed"],
                "attempt": row["attempt"],
                "time_over_faster_direct": round(time, 3),
                "p2_minus_priority": round(batch, 4),
                "tokens_over_priority": round(row["out_tokens"] / beside["priority"]["out_tokens"], 4),
                "met": met,
            }
        )
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "seed  arm         P0 kept  P1 kept  P2 kept  all done  tokens  tokens/s  failed  resets  "
        "P0 ttft p50     p95  P0 gap p50     p95"
    ]
    for row in rows:
        name = row["label"] + (f" #{row['attempt']}" if row["attempt"] > 1 else "")
        stored = "  ".join(f"{100 * row[lane]['slo']:6.1f}%" for lane in SLO_TARGETS_MS)
        p0 = row["P0"]
        lines.append(
            f"{row['seed']:4d}  {name:10s}  {stored}  {row['wall_s']:6.1f} s  {row['out_tokens']:6d}  "
            f"{row['out_tok_s']:8.0f}  {row['failed']:6d}  {row['resets']:6d}  "
            f"{1000 * p0['ttft_p50']:8.0f} ms  {1000 * p0['ttft_p95']:6.0f}  "
            f"{1000 * p0['gap_p50']:7.1f} ms  {1000 * p0['gap_p95']:6.1f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] == "--store":
        print(f"kept in {_store(*arguments[1:])}")
        return 0
    found, before = recordings(), {directory.name: recordings(directory) for directory in BEFORE}
    rows = [figures(one) for one in found]
    print(table(rows))
    for verdict in verdicts(rows):
        missed = [target for target, is_met in verdict["met"].items() if not is_met]
        print(
            f"seed {verdict['seed']}, attempt {verdict['attempt']}: {verdict['time_over_faster_direct']:.3f}x the time "
            f"of the faster direct arm, {100 * verdict['p2_minus_priority']:+.1f} points of P2, "
            + (f"missed: {', '.join(missed)}" if missed else "every target met")
        )
    _print_misses(found)
    stored = json.loads((RESULTS / "harbor-h200.json").read_text())
    mismatches = _mismatches(rows, stored["result"])
    for comparison in stored["before"]:
        earlier = before[comparison["commit"]]
        earlier_rows = [figures(one) for one in earlier]
        print(f"\nbefore, at {comparison['commit']}:\n{table(earlier_rows)}")
        _print_misses(earlier)
        mismatches += _mismatches(earlier_rows, comparison["result"])
    if "--costs" in arguments:
        _print_costs([*found, *(one for earlier in before.values() for one in earlier)])
    if "--simulator" in arguments:
        _print_simulator(sorted({one.seed for one in found}))
    print("\n".join(mismatches) if mismatches else "all as the load generator printed it")
    if "--plots" in arguments:
        from benchmarks.harbor_plots import draw

        for path in draw(RECORDINGS, found):
            print(f"drawn {path}")
    return 1 if mismatches else 0


def _print_misses(found: Sequence[Recording]) -> None:
    for one in found:
        if one.arm == GATEWAY:
            of = summary(one)
            causes = ", ".join(f"{count} {cause}" for cause, count in of["causes"].items())
            print(f"seed {one.seed}, attempt {one.attempt}: {of['missed']} of {of['calls']} P0 calls missed: {causes}")
            others = (f"{count['missed']} of {count['calls']} {lane}" for lane, count in missed_by_lane(one).items())
            print(f"  call by call: {', '.join(others)}")


def _print_costs(found: Sequence[Recording]) -> None:
    for one in found:
        of = underestimated_prompt_cost(one)
        print(
            f"{one.arm} {one.seed} #{one.attempt}: prompts look free for {of['mean_s']} of {UNTIL_S:.0f} s "
            f"({of['seconds']}), a prompt token {of['least_prompt_us']} us at least"
        )


def _print_simulator(seeds: Sequence[int]) -> None:
    for seed in seeds:
        for what, frontend in (
            ("knows what is cached", ControlledFrontend(DEFAULT_LANES)),
            ("meets prompts", PromptMemoryFrontend()),
        ):
            print(f"simulator, {what}: {simulate_seed(seed, frontend)}")


def _mismatches(rows: Sequence[dict[str, Any]], stored: Sequence[dict[str, Any]]) -> list[str]:
    """Differences of rows from the load generator's figures."""
    printed = {(row["label"], row["seed"], row["attempt"]): row for row in stored}
    return [
        f"{row['label']} {row['seed']} #{row['attempt']} {difference}"
        for row in rows
        for difference in differences(row, printed[row["label"], row["seed"], row["attempt"]])
    ]


def _store(rows: str, arm: str, seed: str, attempt: str = "1", log: str | None = None) -> Path:
    path = RECORDINGS / file_name(arm, int(seed), int(attempt))
    with gzip.open(rows, "rt") if rows.endswith(".gz") else open(rows) as file:
        calls = json.load(file)
    lines = Path(log).read_text().splitlines() if log else ()
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, to_recording(calls, arm, int(seed), int(attempt), lines))
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
