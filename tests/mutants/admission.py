"""The gate, broken in one place at a time."""

from mutants.mutant import Mutant, Room

ROOM = Room(
    tests=(
        "tests/admission/test_quotas.py",
        "tests/admission/test_leases.py",
        "tests/admission/test_gate.py",
        "tests/properties/test_gate_machine.py",
        "tests/simulation/test_sub_agents_in_budget.py",
    ),
    mutants=(
        Mutant(
            "a refusal has taken already",
            "admission/gate.py",
            "            self.refused[refusal.limit] = self.refused.get(refusal.limit, 0) + 1\n",
            "            self.refused[refusal.limit] = self.refused.get(refusal.limit, 0) + 1\n"
            "            self._enter(permit, now, takes=True)\n",
        ),
        Mutant(
            "a prompt needs no lease",
            "admission/gate.py",
            "permit.leased_tokens = prompt.high + granted",
            "permit.leased_tokens = granted",
        ),
        Mutant("money is not leased again", "admission/gate.py", "        permit.leased_nanos += nanos\n", ""),
        Mutant(
            "leases are renewed without a look",
            "admission/gate.py",
            "            if left <= 0:\n                return may_write\n",
            "",
        ),
        Mutant(
            "who never ran is charged",
            "admission/gate.py",
            "            tokens = 0\n        else:",
            "            tokens = permit.leased_tokens\n        else:",
        ),
        Mutant(
            "the rest of a lease is kept",
            "admission/gate.py",
            "                account.taken_tokens -= rest_tokens\n",
            "",
        ),
        Mutant("a permit can be settled twice", "admission/gate.py", "        permit.is_settled = True\n", ""),
        Mutant(
            "only the run itself is charged",
            "admission/gate.py",
            "permit.charged = permit.runs[:-1]",
            "permit.charged = []",
        ),
        Mutant(
            "the run's own account is its root",
            "admission/gate.py",
            "permit.root = permit.runs[-1]",
            "permit.root = permit.runs[0]",
        ),
        Mutant(
            "keys have no ceilings for runs",
            "admission/gate.py",
            "        if key.run_tokens < tokens:\n",
            "        if False:\n",
        ),
        Mutant(
            "what is left is not shared by choices",
            "admission/gate.py",
            "                cap = left // choices\n",
            "                cap = left\n",
        ),
        Mutant(
            "the output is not cut",
            "admission/gate.py",
            "            if left < cap * choices:\n",
            "            if False:\n",
        ),
        Mutant("shadow refuses", "admission/gate.py", "        if tenant.shadow:\n", "        if False:\n"),
        Mutant(
            "what is reserved is not given back",
            "admission/gate.py",
            "bucket.settle(permit.reserved - tokens, now)",
            "pass",
        ),
        Mutant("calls never end", "admission/gate.py", "        tenant.quotas.leave(now)\n", ""),
        Mutant(
            "the ceiling bends for what is written",
            "admission/budgets.py",
            "charged = tokens if tokens < room else room",
            "charged = tokens",
        ),
        Mutant(
            "only tokens bind", "admission/budgets.py", "(affordable := tariff.affordable(nanos)) < tokens", "False"
        ),
        Mutant(
            "one job may have all that is left",
            "admission/budgets.py",
            "        share = left // SHARERS\n",
            "        share = left\n",
        ),
        Mutant(
            "a lease is rounded down",
            "admission/budgets.py",
            "return int(tokens * self.output_nanos) + 1",
            "return int(tokens * self.output_nanos)",
        ),
        Mutant(
            "days never end",
            "admission/books.py",
            "if account is not None and account.period == calendar.day:",
            "if account is not None:",
        ),
        Mutant(
            "limits are read once",
            "admission/gate.py",
            "if books.limits is not tenant.limits:",
            "if books.limits is None:",
        ),
        Mutant(
            "ceilings stay what they were",
            "admission/books.py",
            "            self.day.token_ceiling, self.day.nano_ceiling = self.day_tokens, self.day_nanos\n",
            "            pass\n",
        ),
        Mutant(
            "runs in flight are forgotten",
            "admission/books.py",
            "            if not account.holders:\n                found",
            "            if True:\n                found",
        ),
        Mutant(
            "a bucket has no brim",
            "admission/quotas.py",
            "            self.level = level if level < self.burst else float(self.burst)\n            self.at",
            "            self.level = level\n            self.at",
        ),
        Mutant(
            "a debt is forgiven",
            "admission/quotas.py",
            "        level = self.level + amount\n",
            "        level = self.level + max(0, amount)\n",
        ),
        Mutant(
            "what is too large never enters",
            "admission/quotas.py",
            "(amount if amount < self.burst else self.burst) - self.level",
            "amount - self.level",
        ),
    ),
)
