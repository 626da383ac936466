"""Results of seeded runs in benchmarks/results, with command, commit and versions; of partial runs in build/results."""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from openai import OpenAIError

from benchmarks import result_files
from inferry.cli.checkout import ROOT

KILLS = 3
FAULTS = ["kill -9 of the gateway"] * KILLS
KILLED_SEEDS = 100
PARTIAL = ROOT / "build" / "results"
LONGEST_PROBLEM = 1000


class SeedResults:
    """What the seeds of one command have shown: one part of a results file, whose other parts stay.

    `whole` is the number of seeds of a whole run. What fewer have shown is written to `PARTIAL`, so that it never
    replaces evidence. With `adds` the runs that the part had before are kept in its `earlier`, so any number can be
    added. `longest_s` has the longest duration of each kind.
    """

    def __init__(
        self, file: str, module: str, first: int, *, whole: int, part: str | None = None, adds: bool = False
    ) -> None:
        self._command = f"python -m support.{module} {' '.join(sys.argv[1:])}"
        self._file, self._part = file, part or module
        self._first, self._whole, self._played = first, whole, 0
        self._problems: dict[int, str] = {}
        self._faults: Counter[str] = Counter()
        self._longest_s: dict[str, float] = {}
        self._adds = adds
        self._earlier: list[Any] = self._runs_before() if adds else []

    def _runs_before(self) -> list[Any]:
        """The runs of this part, the oldest first."""
        if (part := _parts(result_files.RESULTS / f"{self._file}.json").get(self._part)) is None:
            return []
        return [*part.pop("earlier", []), part]

    def add(self, seed: int, *, problem: str | None, faults: Iterable[str] = (), **durations_s: float) -> None:
        """A seed was played. `problem` is what went wrong; None: it has passed."""
        self._played += 1
        if problem is not None:
            self._problems[seed] = problem[:LONGEST_PROBLEM]
        self._faults.update(faults)
        for name, duration_s in durations_s.items():
            self._longest_s[name] = round(max(self._longest_s.get(name, 0.0), duration_s), 2)

    @property
    def path(self) -> Path:
        """Where the results are written."""
        folder = result_files.RESULTS if self._adds or self._played >= self._whole else PARTIAL
        return folder / f"{self._file}.json"

    def write(self) -> bool:
        """Write what is known by now. Returns whether every seed has passed."""
        part: dict[str, Any] = {
            "command": self._command,
            "commit": result_files.commit_of(ROOT),
            "at": result_files.circumstances()["at"],
            "first_seed": self._first,
            "played": self._played,
            "passed": self._played - len(self._problems),
            "failed_seeds": list(self._problems),
            "problems": self._problems,
            "faults": dict(sorted(self._faults.items())),
            "longest_s": self._longest_s,
        } | ({"earlier": self._earlier} if self._earlier else {})
        path = self.path
        parts = _parts(path)
        result_files.save(self._file, {**parts, self._part: part}, command=self._command, folder=path.parent)
        return not self._problems


def _parts(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["result"] if path.exists() else {}
    return found


def play_killed(module: str, run: Callable[[Path, int], dict[str, float]]) -> int:
    """`python -m support.MODULE FIRST COUNT [--add]`: seeds one after the other. The results are written after each.

    With `--add` the runs that the results file has are kept.
    """
    first, count = int(sys.argv[1]), int(sys.argv[2])
    results, is_good = SeedResults("killed", module, first, whole=KILLED_SEEDS, adds="--add" in sys.argv[3:]), True
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as directory:
            try:
                found = run(Path(directory), seed)
                print(f"seed {seed}: {', '.join(f'{value:g} {name}' for name, value in found.items())}", flush=True)
                results.add(seed, problem=None, faults=FAULTS, restart=found["longest_restart_s"])
            except (AssertionError, OpenAIError, OSError) as error:
                print(f"seed {seed} FAILED: {error!r}", flush=True)
                results.add(seed, problem=repr(error), faults=FAULTS)
        is_good = results.write()
    print(f"results: {results.path}")
    return 0 if is_good else 1
