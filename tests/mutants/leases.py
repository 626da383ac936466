"""Shared limits and ownership, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

_SIMULATION = ("tests/simulation/test_shared_leases.py",)
_QUOTAS = ("tests/admission/test_shared_quotas.py",)
_CONTRACT = ("tests/contracts/test_authority_contract.py",)
_CANCELLED = ("tests/cluster/test_cancelled_everywhere.py",)

GROUP = MutantGroup(
    tests=(*_QUOTAS, *_SIMULATION, *_CONTRACT),
    mutants=(
        Mutant(
            "a grant is spent before the database has it",
            "admission/grant_protocol.py",
            "        if self.tracker.holdings(result.answers):",
            "        if not result.answers and self.tracker.holdings(result.answers):",
            _SIMULATION,
        ),
        Mutant(
            "a grant of an earlier generation is spent",
            "admission/grant_protocol.py",
            "        if database_generation != self.generation:",
            "        if database_generation < 0:",
            _SIMULATION,
        ),
        Mutant(
            "spending is settled twice",
            "admission/grants.py",
            "        self.marked -= ask.spent\n",
            "",
            _SIMULATION,
        ),
        Mutant(
            "what is being returned is leased",
            "admission/grants.py",
            "self.ceiling(account), self.held - self.returning",
            "self.ceiling(account), self.held",
            _SIMULATION,
        ),
        Mutant(
            "what was returned before a loss of state is leased after it",
            "admission/grants.py",
            "        self.returning = min(self.returning, max(0, held - (self.held - self.returning)))",
            "        self.returning = 0",
            _SIMULATION,
        ),
        Mutant(
            "spending is settled before its rows are in the ledger",
            "admission/grants.py",
            "            if 0 <= grants.rows <= settled:",
            "            if 0 <= grants.rows:",
            _SIMULATION,
        ),
        Mutant(
            "more is granted than is left",
            "cluster/limit_authority.py",
            "    return min(left, max(ask.need, min(ask.want, left // EXTRA_DIVISOR)))",
            "    return max(ask.need, min(ask.want, left // EXTRA_DIVISOR))",
            _SIMULATION,
        ),
        Mutant(
            "a repeated exchange is applied again",
            "cluster/limit_authority.py",
            "        if last is not None and last.number == number:",
            "        if last is not None and last.number == -1:",
            _CONTRACT,
        ),
        Mutant(
            "the owner sends until the TTL ends",
            "cluster/ownership.py",
            "sent_at + self._ttl_s - self._margin_s)",
            "sent_at + self._ttl_s)",
            _SIMULATION,
        ),
        Mutant(
            "a restarted authority grants ownership at once",
            "cluster/ownership.py",
            "            if now_ms - self._started_ms < self._ttl_ms:",
            "            if now_ms < self._started_ms:",
            _CONTRACT,
        ),
        Mutant(
            "an epoch is used again after a loss of state",
            "cluster/ownership.py",
            "claim.seen_epoch + 1, now_ms)",
            "claim.seen_epoch + 1)",
            _SIMULATION,
        ),
        Mutant(
            "slots that are returned are used",
            "admission/shared_quotas.py",
            "            self.held = granted  # nothing more is begun with what is being returned\n",
            "",
            _QUOTAS,
        ),
        Mutant(
            "a gateway without contact takes from its buckets",
            "admission/shared_quotas.py",
            "                bucket.level = min(bucket.level, 0.0)",
            "                bucket.level = max(bucket.level, 0.0)",
            _QUOTAS,
        ),
        Mutant(
            "tokens of an ended call are not returned to the bucket",
            "admission/shared_quotas.py",
            "        self.level += amount",
            "        self.level += 0 * amount",
            _QUOTAS,
        ),
        Mutant(
            "Redis grants under the run id of an earlier process",
            "cluster/redis_scripts.py",
            "if state[1] ~= run_id then",
            "if not state[1] then",
            _CONTRACT,
        ),
        Mutant(
            "parents that another gateway names are read too late to cancel in time",
            "cluster/run_links.py",
            "POLL_S = 0.25",
            "POLL_S = 1.0",
            _CANCELLED,
        ),
        Mutant(
            "a run that another gateway cancels runs on",
            "dispatch/gateway.py",
            "        if not self.has_run(tenant, run_id):\n            self._admission",
            "        if run_id:\n            self._admission",
            _CANCELLED,
        ),
    ),
)
