"""Break the source in one place at a time and see that a test notices.

`python tests/mutants/run.py [--group GROUP] [--jobs N] [NAME …]` copies the source aside for each mutant, applies it
there and runs the tests of its group against it. Exits with 1 if a mutant survives or its tests do not end in time, and
with 2 if one cannot be tried: it no longer applies, there is none of that name, or its tests did not run.
"""

import argparse
import compileall
import os
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

TIMEOUT_S = 600


class Verdict(StrEnum):
    KILLED = "killed"
    OUT_OF_TIME = "out of time"  # it may hang the tests, or the machine is too busy for them
    SURVIVED = "SURVIVED"


class MutantResult(NamedTuple):
    group: str
    mutant: Mutant
    verdict: Verdict
    seconds: float


def verdict_of(mutant: Mutant, tests: tuple[str, ...], base: Path) -> Verdict:
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
            return Verdict.OUT_OF_TIME
    if done.returncode not in (0, 1):
        raise CannotBeTried(f"{mutant.name}: its tests did not run\n{done.stdout.decode()[-2_000:]}")
    return Verdict.KILLED if done.returncode else Verdict.SURVIVED


def try_one(group: str, mutant: Mutant, base: Path) -> MutantResult:
    started = time.monotonic()
    others = tuple(test for test in GROUPS[group].tests if test not in mutant.tests)
    # Most fall to the tests that are named for them: to collect the others would take longer than these do.
    verdict = Verdict.SURVIVED
    for tests in (mutant.tests, others):
        if not tests or verdict is Verdict.KILLED:
            continue
        found = verdict_of(mutant, tests, base)
        if found is not Verdict.SURVIVED:
            verdict = found
    return MutantResult(group, mutant, verdict, time.monotonic() - started)


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
    not_killed: list[MutantResult] = []
    try:
        if unknown := set(given.names) - {mutant.name for _, mutant in todo}:
            raise CannotBeTried(f"there is no mutant {', '.join(sorted(unknown))}")
        for _, mutant in todo:  # all of them must apply before any is tried
            mutated(mutant, ROOT / "src" / "inferry")
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, given.jobs)) as pool:
            base = Path(folder) / "src"
            shutil.copytree(ROOT / "src", base, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            compileall.compile_dir(base, quiet=2)
            trials = [pool.submit(try_one, *one, base) for one in todo]
            try:
                for number, mutant_result in enumerate(trials, 1):
                    result = mutant_result.result()
                    if result.verdict is not Verdict.KILLED:
                        not_killed.append(result)
                    at = f"{number}/{len(todo)}"
                    what = f"{result.group}: {result.mutant.name}"
                    print(f"{at:>8} {result.verdict:<11} {result.seconds:6.1f} s  {what}", flush=True)
            finally:
                pool.shutdown(cancel_futures=True)
    except CannotBeTried as error:
        print(error)
        return 2
    print(f"{len(todo) - len(not_killed)} of {len(todo)} killed in {time.monotonic() - started:.0f} s")
    for result in not_killed:
        print(f"{result.verdict} {result.mutant.name}")
    return 1 if not_killed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
