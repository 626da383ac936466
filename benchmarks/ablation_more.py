"""`python -m benchmarks.ablation_more CONSTANT …`: measure some constants and add their rows to the results.

The rows of other constants and the table of workloads stay. Each added row says with which command, commit and seeds it
was measured (`measured`). Fewer seeds take less time and tell less: `--choose 1 2 --check 101`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.ablation import SEEDS, Seeds, ablate
from benchmarks.ablation_constants import CONSTANTS
from benchmarks.ablation_loads import LOADS
from benchmarks.result_files import RESULTS, commit_of
from benchmarks.uncompiled import SOURCE
from inferry.cli.checkout import ROOT, is_compiled


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure constants and add their rows to the ablation.")
    parser.add_argument("constants", nargs="+", choices=list(CONSTANTS), metavar="CONSTANT")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS), metavar="WORKLOAD")
    parser.add_argument("--choose", nargs="+", type=int, default=SEEDS.choose, metavar="SEED")
    parser.add_argument("--check", nargs="+", type=int, default=SEEDS.check, metavar="SEED")
    given = parser.parse_args(arguments)
    if is_compiled():
        environment = os.environ | {"PYTHONPATH": str(SOURCE)}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.ablation_more", *arguments], environment)
    seeds = Seeds(tuple(given.choose), tuple(given.check))
    add(RESULTS / "ablation.json", ablate(given.constants, given.loads, seeds), " ".join(arguments))
    return 0


def add(path: Path, table: Mapping[str, Any], arguments: str) -> None:
    """Add the rows of a table to the file, with how they were measured."""
    record = json.loads(path.read_text())
    measured = {
        "command": f"python -m benchmarks.ablation_more {arguments}",
        "commit": commit_of(ROOT) or "unknown",
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seeds": table["seeds"],
        "loads": list(table["loads"]),
    }
    for key, row in table["constants"].items():
        record["result"]["constants"][key] = {**row, "measured": measured}
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
