"""The scheduler's queues, broken in one place at a time: fair share, lane shares, queue order."""

from mutants.mutant import Mutant, MutantGroup

GROUP = MutantGroup(
    tests=("tests/scheduling", "tests/properties"),
    mutants=(
        Mutant(
            "idle tenants hoard credit",
            "scheduling/queues/fair_share.py",
            "            tenant.virtual_time = lane.virtual_clock\n            tenant.refund = 0.0\n\n    def job_left",
            "            pass\n\n    def job_left",
        ),
        Mutant(
            "a weight changes nothing",
            "scheduling/queues/fair_share.py",
            "member.virtual_time += tokens / member.weight",
            "member.virtual_time += tokens",
        ),
        Mutant(
            "refunds are lost", "scheduling/queues/fair_share.py", "        member.refund -= tokens\n", "        pass\n"
        ),
        Mutant(
            "the clock stands still",
            "scheduling/queues/fair_share.py",
            "group.virtual_clock += tokens / group.ready_weight",
            "pass",
        ),
        Mutant(
            "past service is a penalty",
            "scheduling/queues/fair_share.py",
            "elif not group.ready and member.virtual_time > group.virtual_clock:",
            "elif False:",
        ),
        Mutant(
            "accounts are never forgotten",
            "scheduling/queues/fair_share.py",
            "            del self.members[member.name]\n",
            "            pass\n",
        ),
        Mutant(
            "contended service is not charged",
            "scheduling/queues/fair_share.py",
            "if lane.active > 1 or lane.virtual_clock < lane.ahead_until:",
            "if lane.active > 2:",
        ),
        Mutant(
            "stale heap keys are used",
            "scheduling/queues/fair_queue.py",
            "elif virtual_time == account.virtual_time:",
            "elif True:",
        ),
        Mutant(
            "a head stays whatever it is charged",
            "scheduling/queues/fair_queue.py",
            "if run.virtual_time == self._run_virtual_time and run.tenant.virtual_time == self._tenant_virtual_time:",
            "if True:",
        ),
        Mutant(
            "warmth does not decide between equals",
            "scheduling/queues/fair_queue.py",
            "(account.virtual_time, -warm_slices, account.rank, self._insertions, member)",
            "(account.virtual_time, 0, account.rank, self._insertions, member)",
        ),
        Mutant(
            "an arriving job never becomes the head",
            "scheduling/queues/fair_queue.py",
            "        return run_queue.add(entry)\n",
            "        run_queue.add(entry)\n        return False\n",
        ),
        Mutant(
            "a run forgets its order",
            "scheduling/queues/fair_queue.py",
            "insort(pending, entry, key=_arrival_key)",
            "pending.append(entry)",
        ),
        Mutant(
            "one run is all there is", "scheduling/queues/lane_queue.py", "if single_run.account is run:", "if True:"
        ),
        Mutant(
            "output is charged twice",
            "scheduling/queues/service_history.py",
            "end.output_tokens - entry.produced)",
            "end.output_tokens)",
        ),
        Mutant(
            "overtaking by lower lanes has no bound",
            "scheduling/queues/lane_shares.py",
            "other.overtaken and other.overtaken + head",
            "False and head",
        ),
        Mutant(
            "no job is smaller than the head",
            "scheduling/queues/lane_queue.py",
            "if entry.kv_tokens < self.min_kv_tokens:",
            "if False:",
        ),
        Mutant(
            "lower lanes are owed nothing",
            "scheduling/queues/lane_shares.py",
            "lower.credit = credit if credit < QUANTUM_TOKENS else QUANTUM_TOKENS",
            "pass",
        ),
        Mutant(
            "jobs that cannot resume borrow",
            "scheduling/queues/queued_job.py",
            "rules.borrow_groups and not _can_be_stopped(job)",
            "False",
        ),
    ),
)
