"""Break the scheduler in one place at a time and see that a test notices.

`python tests/mutants/run.py [NAME …]` copies the source aside, applies each mutation there, and runs the sentence and
property tests of scheduling against it. Exits with 1 if a mutant survives, and with 2 if a mutation no longer applies.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("inferry/scheduling")
TESTS = ("tests/scheduling", "tests/properties")
TIMEOUT_S = 300


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant("idle tenants hoard credit", "fairness.py", "account.at = parent.clock\n", "pass\n"),
    Mutant("a weight changes nothing", "fairness.py", "account.at += paid / account.weight", "account.at += paid"),
    Mutant("refunds are lost", "fairness.py", "account.refund -= tokens\n            else", "pass\n            else"),
    Mutant("the clock stands still", "fairness.py", "parent.clock += paid / parent._ready_weight", "pass"),
    Mutant(
        "past service is a penalty",
        "fairness.py",
        "elif not parent.ready and account.at > parent.clock:",
        "elif False:",
    ),
    Mutant(
        "accounts are never forgotten",
        "fairness.py",
        "del parent.members[account.name]\n                else",
        "pass\n                else",
    ),
    Mutant("stale keys are believed", "flows.py", "elif at == account.at:", "elif True:"),
    Mutant(
        "warmth does not decide between equals",
        "flows.py",
        "(account.at, -member.warmth, account.rank, member)",
        "(account.at, 0, account.rank, member)",
    ),
    Mutant("a run forgets its order", "flows.py", "insort(row, ticket, key=_arrival)", "row.append(ticket)"),
    Mutant("prompts are not charged", "billing.py", "ticket.charged = ticket.prefill_tokens", "ticket.charged = 0"),
    Mutant("output is charged twice", "billing.py", "end.output_tokens - ticket.produced)", "end.output_tokens)"),
    Mutant("siblings ignore the quantum", "placing/place.py", "ticket.prefill_tokens <= at_most and ", ""),
    Mutant("strangers are siblings", "kin.py", "job.template_id or job.run_id", '""'),
    Mutant(
        "affinity ignores room",
        "placing/place.py",
        "worker.sequences < fair_load and worker.takes(ticket, fill)",
        "worker.sequences < fair_load",
    ),
    Mutant("affinity ignores load", "placing/affinity.py", "ceil((1.0 + SLACK)", "10**6 * ceil((1.0 + SLACK)"),
    Mutant("no discount for what is warm", "placing/place.py", "prompt - prompt * depth // len(job.prefix)", "prompt"),
    Mutant(
        "any precision will do",
        "placing/routes.py",
        "(route.precision is None or route.precision == view.precision)",
        "True",
    ),
    Mutant(
        "groups have no order",
        "placing/routes.py",
        "for group in self._groups]",
        "for group in sorted(self._groups, reverse=True)]",
    ),
    Mutant("the rate always binds", "packing.py", "self.pace is None or not self.live or", "self.pace is None or"),
    Mutant("prompts spend nothing", "pacing.py", "self._level -= tokens", "pass"),
    Mutant("the bucket has no brim", "pacing.py", "min(beat.burst_tokens, self._level", "max(0.0, self._level"),
    Mutant("lower lanes drain the bucket", "pacing.py", " + burst * (1.0 - fill)\n", "\n"),
    Mutant("nobody wakes for a refill", "pacing.py", "beat.retry_at = at", "pass"),
    Mutant("anybody may be stopped", "preemption.py", "job.resume is Resume.NEVER or ", ""),
    Mutant("no minimum of progress", "preemption.py", "ticket.produced >= MIN_PROGRESS_TOKENS", "True"),
    Mutant("no maximum of preemptions", "preemption.py", " or job.attempt > MAX_PREEMPTIONS", ""),
    Mutant(
        "the dearest job is stopped",
        "preemption.py",
        "key=lambda ticket: (_loss(ticket), -ticket.number)",
        "key=lambda ticket: -_loss(ticket)",
    ),
    Mutant(
        "more are stopped than needed", "preemption.py", "            victims.remove(ticket)\n", "            pass\n"
    ),
    Mutant("a promise is not counted", "preemption.py", "        worker.take(head)\n", ""),
    Mutant(
        "a victim may be stopped twice", "preemption.py", "                        del worker.stoppable[victim]\n", ""
    ),
    Mutant(
        "prefill is reason enough to stop", "preemption.py", "if not worker.is_full_for(head, line.fill):", "if False:"
    ),
    Mutant("nobody is kept a worker", "passing.py", "if worker is not kept", ""),
    Mutant("passing has no end", "passing.py", "head.passed += ticket.kv_tokens", "pass"),
    Mutant(
        "late messages count", "scheduler.py", "if attempt is not None and attempt != ticket.job.attempt:", "if False:"
    ),
    Mutant("a blocked head keeps nothing", "placing/loads.py", "worker.closed_in = walk\n", "pass\n"),
    Mutant(
        "lower lanes are owed nothing", "shares.py", "lower.credit = min(QUANTUM_TOKENS, lower.credit + earned)", "pass"
    ),
)


def apply(mutant: Mutant, source: Path) -> None:
    path = source / PACKAGE / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        print(f"{mutant.name}: {mutant.file} has {text.count(mutant.old)} places that read {mutant.old!r}, not one")
        sys.exit(2)
    path.write_text(text.replace(mutant.old, mutant.new))


def survives(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        apply(mutant, source)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
        environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        if done.returncode not in (0, 1):
            print(done.stdout.decode()[-2_000:])
            sys.exit(2)
        return done.returncode == 0


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    with tempfile.TemporaryDirectory() as folder:  # all of them must apply before any is run
        for mutant in chosen:
            source = Path(folder) / "src"
            shutil.copytree(ROOT / "src" / PACKAGE, source / PACKAGE, dirs_exist_ok=True)
            apply(mutant, source)
    survivors = 0
    for mutant in chosen:
        started = time.monotonic()
        alive = survives(mutant)
        survivors += alive
        verdict = "SURVIVED" if alive else "killed"
        print(f"{verdict:<9} {time.monotonic() - started:6.1f} s  {mutant.file:<20} {mutant.name}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
