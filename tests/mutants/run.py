"""Break the scheduler, or the gate, in one place at a time and see that a test notices.

`python tests/mutants/run.py [NAME …]` copies the source aside, applies each mutation there, and runs the sentence and
property tests of its room against it. Exits with 1 if a mutant survives, and with 2 if a mutation no longer applies.
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
PACKAGE = Path("inferry")
TESTS = {
    "scheduling": ("tests/scheduling", "tests/properties"),
    "admission": (
        *("tests/admission/test_quotas.py", "tests/admission/test_leases.py", "tests/admission/test_gate.py"),
        *("tests/properties/test_gate_machine.py", "tests/simulation/test_sub_agents_in_budget.py"),
    ),
}
TIMEOUT_S = 300


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    room: str = "scheduling"

    @property
    def path(self) -> Path:
        return PACKAGE / self.room / self.file


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "idle tenants hoard credit",
        "fairness.py",
        "            tenant.at = lane.clock\n            tenant.refund = 0.0\n\n    def left",
        "            pass\n\n    def left",
    ),
    Mutant("a weight changes nothing", "fairness.py", "member.at += tokens / member.weight", "member.at += tokens"),
    Mutant("refunds are lost", "fairness.py", "        member.refund -= tokens\n", "        pass\n"),
    Mutant("the clock stands still", "fairness.py", "family.clock += tokens / family.ready_weight", "pass"),
    Mutant(
        "past service is a penalty",
        "fairness.py",
        "elif not family.ready and member.at > family.clock:",
        "elif False:",
    ),
    Mutant(
        "accounts are never forgotten",
        "fairness.py",
        "            del self.members[member.name]\n",
        "            pass\n",
    ),
    Mutant(
        "whoever has a rival is served free",
        "fairness.py",
        "if lane.active > 1 or lane.clock < lane.ahead_until:",
        "if lane.active > 2:",
    ),
    Mutant("stale keys are believed", "flows.py", "elif at == account.at:", "elif True:"),
    Mutant(
        "a head stays whatever it is charged",
        "flows.py",
        "if run.at == self._run_at and run.tenant.at == self._tenant_at:",
        "if True:",
    ),
    Mutant(
        "warmth does not decide between equals",
        "flows.py",
        "(account.at, -warmth, account.rank, self._came, member)",
        "(account.at, 0, account.rank, self._came, member)",
    ),
    Mutant(
        "whoever comes is never the head",
        "flows.py",
        "        return flow.add(ticket)\n",
        "        flow.add(ticket)\n        return False\n",
    ),
    Mutant("a run forgets its order", "flows.py", "insort(row, ticket, key=_arrival)", "row.append(ticket)"),
    Mutant(
        "whoever is late never gives way",
        "hopes.py",
        "if head.job.arrived_at >= late_since and head not in given_up:",
        "if head not in given_up:",
    ),
    Mutant(
        "whoever is late gives way for ever",
        "hopes.py",
        "if not row or now - head.job.arrived_at > YIELDS * ttft_s:",
        "if not row:",
    ),
    Mutant(
        "the late give way to the late",
        "hopes.py",
        "row, late_since = self._row, now - LOST * ttft_s",
        "row, late_since = self._row, now - YIELDS * ttft_s",
    ),
    Mutant(
        "the shortest is given up",
        "hopes.py",
        "heappush(longest, (-needs_s,",
        "heappush(longest, (needs_s,",
    ),
    Mutant(
        "slack is spent to nothing",
        "controller.py",
        "max(KEEP_AT_LEAST, KEEP_FROM_LIVE * urgency)",
        "KEEP_FROM_LIVE * urgency",
    ),
    Mutant(
        "counts are as old as when they are looked at",
        "controller.py",
        "        if since_s <= 0:\n            return 0.0, 0.0\n        busy",
        "        if since_s >= 0:\n            return 0.0, 0.0\n        busy",
    ),
    Mutant(
        "nobody is given up",
        "hopes.py",
        "if head.job.arrived_at >= late_since and head not in given_up:",
        "if head.job.arrived_at >= late_since:",
    ),
    Mutant(
        "somebody is given up before there is distress",
        "hopes.py",
        "if now - row[0].job.arrived_at < DISTRESS * ttft_s:",
        "if False:",
    ),
    Mutant(
        "what is cached is deducted twice",
        "placing/place.py",
        "    if job.footprint.cached.high > 0:\n        return ticket.prefill_tokens\n",
        "",
    ),
    Mutant("one run is all there is", "lanes.py", "if only.account is run:", "if True:"),
    Mutant("prompts are not charged", "boarding.py", "ticket.run.goes(tokens, in_turn)", "ticket.run.goes(0, in_turn)"),
    Mutant("output is charged twice", "billing.py", "end.output_tokens - ticket.produced)", "end.output_tokens)"),
    Mutant("siblings ignore the quantum", "placing/place.py", "ticket.prefill_tokens <= at_most and ", ""),
    Mutant("strangers are siblings", "kin.py", "job.template_id or job.run_id", '""'),
    Mutant(
        "affinity ignores room",
        "placing/place.py",
        "            and (fleet.touched_in != walk or fleet.is_open(worker, ticket, walk))\n"
        "            and worker.takes(ticket, fill)\n",
        "",
    ),
    Mutant("affinity ignores load", "placing/place.py", "worker.sequences < fair_load", "True"),
    Mutant(
        "no discount for what is warm", "placing/place.py", "tokens = prompt - prompt * depth", "tokens = prompt - 0"
    ),
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
    Mutant(
        "the rate binds whoever decodes",
        "packing.py",
        "if lane < self.best_live and lane in LIVE:",
        "if lane < self.best_live:",
    ),
    Mutant(
        "the rate binds its own lane",
        "packing.py",
        "pace is None or ticket.lane <= self.best_live or",
        "pace is None or ticket.lane < self.best_live or",
    ),
    Mutant(
        "the rate binds nobody once P0 has ended",
        "packing.py",
        "                self.best_live = lane\n",
        "                pass\n",
    ),
    Mutant("prompts spend nothing", "pacing.py", "        self._level -= tokens\n", "        pass\n"),
    Mutant("who need not wait spends nothing", "packing.py", "self.pace.spend_unasked(ticket.prefill_tokens)", "pass"),
    Mutant(
        "live prompts put lower lanes in debt for good",
        "pacing.py",
        "max(self._level - tokens, min(self._level, -DEBT_S * self._rate))",
        "self._level - tokens",
    ),
    Mutant("the bucket has no brim", "pacing.py", "min(beat.burst_tokens, self._level", "max(0.0, self._level"),
    Mutant("lower lanes drain the bucket", "pacing.py", " + burst * (1.0 - fill)\n", "\n"),
    Mutant("nobody wakes for a refill", "pacing.py", "self.retry_at = at", "pass"),
    Mutant(
        "a turn that waits for pace keeps everybody out",
        "keeping.py",
        "worker.best_live + 1 if worker.lacks_only_pace(ticket, 1.0) else 0",
        "0",
    ),
    Mutant(
        "a turn keeps every worker",
        "boarding.py",
        "                keep_for_turn(ticket, ticket.wait, self._walk)\n",
        "                queue.route.close(self._walk)\n",
    ),
    Mutant(
        "a turn keeps no worker",
        "keeping.py",
        "    worker.closed_in = walk\n",
        "",
    ),
    Mutant("turns have no bound", "shares.py", "other.overtaken and other.overtaken + head", "False and head"),
    Mutant("anybody may be stopped", "preemption.py", "job.resume is Resume.NEVER or ", ""),
    Mutant("no minimum of progress", "preemption.py", "ticket.produced >= MIN_PROGRESS_TOKENS", "True"),
    Mutant("no maximum of preemptions", "preemption.py", " or job.preemptions >= MAX_PREEMPTIONS", ""),
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
    Mutant("a victim may be stopped twice", "preemption.py", "                del worker.stoppable[victim]\n", ""),
    Mutant("prefill is reason enough to stop", "preemption.py", "if not worker.is_full_for(head, fill):", "if False:"),
    Mutant(
        "a promised job loses its queue",
        "scheduler.py",
        "            if not self._preemption.promising:\n",
        "            if True:\n",
    ),
    Mutant("nobody is smaller than the first", "lanes.py", "if ticket.kv_tokens < self.least_kv_tokens:", "if False:"),
    Mutant(
        "whoever was idle stays so",
        "placing/fleets.py",
        "                    self._idle -= 1\n",
        "                    pass\n",
    ),
    Mutant(
        "room is where it was not",
        "placing/fleets.py",
        "        return least > 0 and least + kv_tokens > limit * fill\n",
        "        return least > 0\n",
    ),
    Mutant("nobody is kept a worker", "passing.py", "if worker is not kept\n", "if True\n"),
    Mutant("passing has no end", "passing.py", "wait.passed += ticket.kv_tokens", "pass"),
    Mutant(
        "late messages count", "scheduler.py", "if attempt is not None and attempt != ticket.job.attempt:", "if False:"
    ),
    Mutant("a blocked head keeps nothing", "placing/fleets.py", "        self.closed_in = walk\n", "        pass\n"),
    Mutant(
        "a blocked head keeps nothing from other routes",
        "placing/fleets.py",
        "                worker.closed_in = walk\n",
        "                pass\n",
    ),
    Mutant(
        "lower lanes are owed nothing",
        "shares.py",
        "lower.credit = credit if credit < QUANTUM_TOKENS else QUANTUM_TOKENS",
        "pass",
    ),
    Mutant(
        "a load is never found out again",
        "packing.py",
        "                fleet.stale.append(self)\n",
        "                pass\n",
    ),
    Mutant(
        "a freed worker goes unnoticed",
        "scheduler.py",
        "        self._changed[worker] = None\n        if type",
        "        if type",
    ),
    Mutant("a look at part of the room will do", "boarding.py", "            and wait.fill >= fill\n", ""),
    Mutant(
        "a look past closed workers will do",
        "boarding.py",
        "self._round if route.is_untouched(self._walk) else -1",
        "self._round",
    ),
    Mutant(
        "the express waits for nobody",
        "scheduler.py",
        "if not self._hall.waiting and self._alone is None",
        "if self._alone is None",
    ),
    Mutant(
        "the express breaks promises",
        "scheduler.py",
        "None if self._preemption.promising else send_alone(",
        "send_alone(",
    ),
    Mutant("the express is free", "express.py", "ticket.run.goes_alone(tokens)", "ticket.run.goes_alone(0)"),
    Mutant("the express keeps no deadline", "express.py", "        agenda.drop(ticket)\n", "        pass\n"),
    Mutant("the express is not stoppable", "express.py", "        worker.stoppable[ticket] = None\n", "        pass\n"),
    Mutant("what is warm is worth nothing", "placing/place.py", "fair_load + worth", "fair_load"),
    Mutant("a worker that lost a job gets it again", "placing/routes.py", "if self.key.avoid:", "if False:"),
    Mutant("who was let in is turned away", "scheduler.py", " and job.attempt == 1:", ":"),
    Mutant("a padded pass that runs is joined", "packing.py", "return not self.sequences or ", "return True or "),
    Mutant("before an idle worker siblings are held", "release.py", " or route.has_idle():", ":"),
    Mutant("to be held costs nothing", "siblings.py", "> MARGIN * hold_s * (1 + siblings)", "> 0.0"),
    Mutant("holding always pays", "siblings.py", "alone / 2 if together is None else alone - together", "alone / 2"),
    Mutant("holding is believed for good", "siblings.py", "if not habit.holds % LOOKS_AGAIN:", "if False:"),
    Mutant("all families go with the first", "scheduler.py", "if watch is None or ticket.watch is watch:", "if True:"),
    Mutant("what left the express stays ahead", "express.py", "    line.leaves(ticket)\n", "    line.depth -= 1\n"),
)

MUTANTS += tuple(
    Mutant(name, file, old, new, "admission")
    for name, file, old, new in (
        (
            "a refusal has taken already",
            "gate.py",
            "            self.refused[refusal.limit] = self.refused.get(refusal.limit, 0) + 1\n",
            "            self.refused[refusal.limit] = self.refused.get(refusal.limit, 0) + 1\n"
            "            self._enter(permit, now, takes=True)\n",
        ),
        (
            "a prompt needs no lease",
            "gate.py",
            "permit.leased_tokens = prompt.high + granted",
            "permit.leased_tokens = granted",
        ),
        ("money is not leased again", "gate.py", "        permit.leased_nanos += nanos\n", ""),
        (
            "leases are renewed without a look",
            "gate.py",
            "            if left <= 0:\n                return may_write\n",
            "",
        ),
        (
            "who never ran is charged",
            "gate.py",
            "            tokens = 0\n        else:",
            "            tokens = permit.leased_tokens\n        else:",
        ),
        ("the rest of a lease is kept", "gate.py", "                account.taken_tokens -= rest_tokens\n", ""),
        ("a permit can be settled twice", "gate.py", "        permit.is_settled = True\n", ""),
        ("only the run itself is charged", "gate.py", "permit.charged = permit.runs[:-1]", "permit.charged = []"),
        (
            "the run's own account is its root",
            "gate.py",
            "permit.root = permit.runs[-1]",
            "permit.root = permit.runs[0]",
        ),
        ("keys have no ceilings for runs", "gate.py", "        if key.run_tokens < tokens:\n", "        if False:\n"),
        (
            "what is left is not shared by choices",
            "gate.py",
            "                cap = left // choices\n",
            "                cap = left\n",
        ),
        ("the output is not cut", "gate.py", "            if left < cap * choices:\n", "            if False:\n"),
        ("shadow refuses", "gate.py", "        if tenant.shadow:\n", "        if False:\n"),
        ("what is reserved is not given back", "gate.py", "bucket.settle(permit.reserved - tokens, now)", "pass"),
        ("calls never end", "gate.py", "        tenant.quotas.leave(now)\n", ""),
        (
            "the ceiling bends for what is written",
            "budgets.py",
            "charged = tokens if tokens < room else room",
            "charged = tokens",
        ),
        ("only tokens bind", "budgets.py", "(affordable := tariff.affordable(nanos)) < tokens", "False"),
        (
            "one job may have all that is left",
            "budgets.py",
            "        share = left // SHARERS\n",
            "        share = left\n",
        ),
        (
            "a lease is rounded down",
            "budgets.py",
            "return int(tokens * self.output_nanos) + 1",
            "return int(tokens * self.output_nanos)",
        ),
        (
            "days never end",
            "books.py",
            "if account is not None and account.period == calendar.day:",
            "if account is not None:",
        ),
        ("limits are read once", "gate.py", "if books.limits is not tenant.limits:", "if books.limits is None:"),
        (
            "ceilings stay what they were",
            "books.py",
            "            self.day.token_ceiling, self.day.nano_ceiling = self.day_tokens, self.day_nanos\n",
            "            pass\n",
        ),
        (
            "runs in flight are forgotten",
            "books.py",
            "            if not account.holders:\n                found",
            "            if True:\n                found",
        ),
        (
            "a bucket has no brim",
            "quotas.py",
            "            self.level = level if level < self.burst else float(self.burst)\n            self.at",
            "            self.level = level\n            self.at",
        ),
        (
            "a debt is forgiven",
            "quotas.py",
            "        level = self.level + amount\n",
            "        level = self.level + max(0, amount)\n",
        ),
        (
            "what is too large never enters",
            "quotas.py",
            "(amount if amount < self.burst else self.burst) - self.level",
            "amount - self.level",
        ),
    )
)


def apply(mutant: Mutant, source: Path) -> None:
    path = source / mutant.path
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
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no_shrinking"]
        command += TESTS[mutant.room]
        path = os.pathsep.join((str(source), str(Path(__file__).parent)))
        environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
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
            for room in TESTS:
                shutil.copytree(ROOT / "src" / PACKAGE / room, source / PACKAGE / room, dirs_exist_ok=True)
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
