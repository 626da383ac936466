"""Break the source in one place at a time and see that a test notices.

`python tests/mutants/run.py [--group GROUP] [--jobs N] [NAME …]` copies the source aside for each mutant, applies it
there and runs the tests of its group against it. Exits with 1 if a mutant survives or its tests do not end in time, and
with 2 if one cannot be tried: it no longer applies, there is none of that name, or its tests did not run.

The test that killed a mutant is kept in `killers.json` and runs first the next time: one test takes two seconds, a
group half a minute.
"""

import argparse
import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Groups are named like folders of tests, which import from each other: this folder must not be on the import path.
sys.path[0] = str(ROOT / "tests")

from mutants.groups import GROUPS  # noqa: E402
from mutants.mutant import CannotBeTried, Mutant, mutated  # noqa: E402

KILLERS = ROOT / "tests" / "mutants" / "killers.json"
TIMEOUT_S = 600
_NO_SUCH_TEST = 4
"""What pytest exits with where a test that is named does not exist."""


class Verdict(StrEnum):
    KILLED = "killed"
    OUT_OF_TIME = "out of time"  # it may hang the tests, or the machine is too busy for them
    SURVIVED = "SURVIVED"


class Trial(NamedTuple):
    """How tests ended, and the test that failed."""

    verdict: Verdict
    killer: str | None = None


class MutantResult(NamedTuple):
    group: str
    mutant: Mutant
    trial: Trial
    seconds: float


def trial_of(mutant: Mutant, tests: tuple[str, ...], base: Path) -> Trial | None:
    """None where a test that is named does not exist."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(base, source)
        package = source / "inferry"
        (package / mutant.file).write_text(mutated(mutant, package))
        for stale in (package / mutant.file).parent.glob(f"__pycache__/{Path(mutant.file).stem}.*"):
            stale.unlink()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "mutants.no_shrinking"]
        path = os.pathsep.join((str(source), str(ROOT / "tests")))
        environment = os.environ | {"PYTHONPATH": path}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # to compile all of it anew each time takes longer than tests
        try:
            done = subprocess.run(
                [*command, *tests], cwd=ROOT, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Trial(Verdict.OUT_OF_TIME)
    output = done.stdout.decode(errors="replace")
    if done.returncode == _NO_SUCH_TEST and "ERROR: not found:" in output:
        return None
    if done.returncode not in (0, 1):
        raise CannotBeTried(f"{mutant.name}: its tests did not run\n{output[-2_000:]}")
    if not done.returncode:
        return Trial(Verdict.SURVIVED)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?::\w+)", output, re.MULTILINE)
    return Trial(Verdict.KILLED, failed[1] if failed else None)


def try_one(group: str, mutant: Mutant, base: Path, killer: str | None) -> MutantResult:
    started = time.monotonic()
    others = tuple(test for test in GROUPS[group].tests if test not in mutant.tests)
    # The tests of a whole group take longer to collect than those that are named for the mutant take to run.
    trial = Trial(Verdict.SURVIVED)
    for tests in ((killer,) if killer else (), mutant.tests, others):
        if tests and trial.verdict is not Verdict.KILLED:
            found = trial_of(mutant, tests, base)
            if found is not None and found.verdict is not Verdict.SURVIVED:
                trial = found
    return MutantResult(group, mutant, trial, time.monotonic() - started)


def read_killers() -> dict[str, dict[str, str]]:
    """By group and mutant, the test that killed it last."""
    return json.loads(KILLERS.read_text()) if KILLERS.is_file() else {}


def write_killers(known: dict[str, dict[str, str]], results: list[MutantResult]) -> None:
    """Keep the latest killers of all mutants that exist."""
    for result in results:
        if result.trial.killer is not None:
            known.setdefault(result.group, {})[result.mutant.name] = result.trial.killer
    kept = {
        name: {mutant.name: known[name][mutant.name] for mutant in group.mutants if mutant.name in known[name]}
        for name, group in GROUPS.items()
        if name in known
    }
    KILLERS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def chosen(group: str | None, names: list[str]) -> Iterator[tuple[str, Mutant]]:
    for name, found in GROUPS.items():
        if group in (None, name):
            yield from ((name, mutant) for mutant in found.mutants if not names or mutant.name in names)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Break the source in named ways and see that tests notice.")
    parser.add_argument("--group", choices=list(GROUPS), help="only this group")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at the same time")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only the mutants of these names")
    given = parser.parse_args(arguments)
    todo = list(chosen(given.group, given.names))
    started = time.monotonic()
    results: list[MutantResult] = []
    killers = read_killers()
    try:
        if unknown := set(given.names) - {mutant.name for _, mutant in todo}:
            raise CannotBeTried(f"there is no mutant {', '.join(sorted(unknown))}")
        for _, mutant in todo:  # all of them must apply before any is tried
            mutated(mutant, ROOT / "src" / "inferry")
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, given.jobs)) as pool:
            base = Path(folder) / "src"
            shutil.copytree(ROOT / "src", base, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            compileall.compile_dir(base, quiet=2)
            trials = [
                pool.submit(try_one, group, mutant, base, killers.get(group, {}).get(mutant.name))
                for group, mutant in todo
            ]
            try:
                for number, mutant_result in enumerate(trials, 1):
                    result = mutant_result.result()
                    results.append(result)
                    at = f"{number}/{len(todo)}"
                    what = f"{result.group}: {result.mutant.name}"
                    print(f"{at:>8} {result.trial.verdict:<11} {result.seconds:6.1f} s  {what}", flush=True)
            finally:
                pool.shutdown(cancel_futures=True)
                write_killers(killers, results)
    except CannotBeTried as error:
        print(error)
        return 2
    not_killed = [result for result in results if result.trial.verdict is not Verdict.KILLED]
    print(f"{len(todo) - len(not_killed)} of {len(todo)} killed in {time.monotonic() - started:.0f} s")
    for result in not_killed:
        print(f"{result.trial.verdict} {result.mutant.name}")
    return 1 if not_killed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
