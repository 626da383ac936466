"""The scheduler, broken in one place at a time."""

from mutants.mutant import Mutant, Room

ROOM = Room(
    tests=("tests/scheduling", "tests/properties"),
    mutants=(
        Mutant(
            "idle tenants hoard credit",
            "scheduling/fairness.py",
            "            tenant.at = lane.clock\n            tenant.refund = 0.0\n\n    def left",
            "            pass\n\n    def left",
        ),
        Mutant(
            "a weight changes nothing",
            "scheduling/fairness.py",
            "member.at += tokens / member.weight",
            "member.at += tokens",
        ),
        Mutant("refunds are lost", "scheduling/fairness.py", "        member.refund -= tokens\n", "        pass\n"),
        Mutant(
            "the clock stands still", "scheduling/fairness.py", "family.clock += tokens / family.ready_weight", "pass"
        ),
        Mutant(
            "past service is a penalty",
            "scheduling/fairness.py",
            "elif not family.ready and member.at > family.clock:",
            "elif False:",
        ),
        Mutant(
            "accounts are never forgotten",
            "scheduling/fairness.py",
            "            del self.members[member.name]\n",
            "            pass\n",
        ),
        Mutant(
            "whoever has a rival is served free",
            "scheduling/fairness.py",
            "if lane.active > 1 or lane.clock < lane.ahead_until:",
            "if lane.active > 2:",
        ),
        Mutant("stale keys are believed", "scheduling/flows.py", "elif at == account.at:", "elif True:"),
        Mutant(
            "a head stays whatever it is charged",
            "scheduling/flows.py",
            "if run.at == self._run_at and run.tenant.at == self._tenant_at:",
            "if True:",
        ),
        Mutant(
            "warmth does not decide between equals",
            "scheduling/flows.py",
            "(account.at, -warmth, account.rank, self._came, member)",
            "(account.at, 0, account.rank, self._came, member)",
        ),
        Mutant(
            "whoever comes is never the head",
            "scheduling/flows.py",
            "        return flow.add(ticket)\n",
            "        flow.add(ticket)\n        return False\n",
        ),
        Mutant(
            "a run forgets its order", "scheduling/flows.py", "insort(row, ticket, key=_arrival)", "row.append(ticket)"
        ),
        Mutant(
            "whoever is late never gives way",
            "scheduling/hopes.py",
            "if head.job.arrived_at >= late_since and head not in given_up:",
            "if head not in given_up:",
        ),
        Mutant(
            "whoever is late gives way for ever",
            "scheduling/hopes.py",
            "if not row or now - head.job.arrived_at > YIELDS * ttft_s:",
            "if not row:",
        ),
        Mutant(
            "the late give way to the late",
            "scheduling/hopes.py",
            "row, late_since = self._row, now - LOST * ttft_s",
            "row, late_since = self._row, now - YIELDS * ttft_s",
        ),
        Mutant(
            "the shortest is given up",
            "scheduling/hopes.py",
            "heappush(longest, (-needs_s,",
            "heappush(longest, (needs_s,",
        ),
        Mutant(
            "slack is spent to nothing",
            "scheduling/controller.py",
            "max(KEEP_AT_LEAST, KEEP_FROM_LIVE * urgency)",
            "KEEP_FROM_LIVE * urgency",
        ),
        Mutant(
            "counts are as old as when they are looked at",
            "scheduling/controller.py",
            "        if since_s <= 0:\n            return 0.0, 0.0\n        busy",
            "        if since_s >= 0:\n            return 0.0, 0.0\n        busy",
        ),
        Mutant(
            "nobody is given up",
            "scheduling/hopes.py",
            "if head.job.arrived_at >= late_since and head not in given_up:",
            "if head.job.arrived_at >= late_since:",
        ),
        Mutant(
            "somebody is given up before there is distress",
            "scheduling/hopes.py",
            "if now - row[0].job.arrived_at < DISTRESS * ttft_s:",
            "if False:",
        ),
        Mutant(
            "what is cached is deducted twice",
            "scheduling/placing/place.py",
            "    if job.footprint.cached.high > 0:\n        return ticket.prefill_tokens\n",
            "",
        ),
        Mutant("one run is all there is", "scheduling/lanes.py", "if only.account is run:", "if True:"),
        Mutant(
            "prompts are not charged",
            "scheduling/boarding.py",
            "ticket.run.goes(tokens, in_turn)",
            "ticket.run.goes(0, in_turn)",
        ),
        Mutant(
            "output is charged twice",
            "scheduling/billing.py",
            "end.output_tokens - ticket.produced)",
            "end.output_tokens)",
        ),
        Mutant(
            "siblings ignore the quantum", "scheduling/placing/place.py", "ticket.prefill_tokens <= at_most and ", ""
        ),
        Mutant("strangers are siblings", "scheduling/kin.py", "job.template_id or job.run_id", '""'),
        Mutant(
            "affinity ignores room",
            "scheduling/placing/place.py",
            "            and (fleet.touched_in != walk or fleet.is_open(worker, ticket, walk))\n"
            "            and worker.takes(ticket, fill)\n",
            "",
        ),
        Mutant("affinity ignores load", "scheduling/placing/place.py", "worker.sequences < fair_load", "True"),
        Mutant(
            "no discount for what is warm",
            "scheduling/placing/place.py",
            "tokens = prompt - prompt * depth",
            "tokens = prompt - 0",
        ),
        Mutant(
            "any precision will do",
            "scheduling/placing/routes.py",
            "(route.precision is None or route.precision == view.precision)",
            "True",
        ),
        Mutant(
            "groups have no order",
            "scheduling/placing/routes.py",
            "for group in self._groups]",
            "for group in sorted(self._groups, reverse=True)]",
        ),
        Mutant(
            "the rate binds whoever decodes",
            "scheduling/packing.py",
            "if lane < self.best_live and lane in LIVE:",
            "if lane < self.best_live:",
        ),
        Mutant(
            "the rate binds its own lane",
            "scheduling/packing.py",
            "pace is None or ticket.lane <= self.best_live or",
            "pace is None or ticket.lane < self.best_live or",
        ),
        Mutant(
            "the rate binds nobody once P0 has ended",
            "scheduling/packing.py",
            "                self.best_live = lane\n",
            "                pass\n",
        ),
        Mutant("prompts spend nothing", "scheduling/pacing.py", "        self._level -= tokens\n", "        pass\n"),
        Mutant(
            "who need not wait spends nothing",
            "scheduling/packing.py",
            "self.pace.spend_unasked(ticket.prefill_tokens)",
            "pass",
        ),
        Mutant(
            "live prompts put lower lanes in debt for good",
            "scheduling/pacing.py",
            "max(self._level - tokens, min(self._level, -DEBT_S * self._rate))",
            "self._level - tokens",
        ),
        Mutant(
            "the bucket has no brim",
            "scheduling/pacing.py",
            "min(beat.burst_tokens, self._level",
            "max(0.0, self._level",
        ),
        Mutant("lower lanes drain the bucket", "scheduling/pacing.py", " + burst * (1.0 - fill)\n", "\n"),
        Mutant("nobody wakes for a refill", "scheduling/pacing.py", "self.retry_at = at", "pass"),
        Mutant(
            "a turn that waits for pace keeps everybody out",
            "scheduling/keeping.py",
            "worker.best_live + 1 if worker.lacks_only_pace(ticket, 1.0) else 0",
            "0",
        ),
        Mutant(
            "a turn keeps every worker",
            "scheduling/boarding.py",
            "                keep_for_turn(ticket, ticket.wait, self._walk)\n",
            "                queue.route.close(self._walk)\n",
        ),
        Mutant("a turn keeps no worker", "scheduling/keeping.py", "    worker.closed_in = walk\n", ""),
        Mutant(
            "turns have no bound",
            "scheduling/shares.py",
            "other.overtaken and other.overtaken + head",
            "False and head",
        ),
        Mutant("anybody may be stopped", "scheduling/preemption.py", "job.resume is Resume.NEVER or ", ""),
        Mutant("no minimum of progress", "scheduling/preemption.py", "ticket.produced >= MIN_PROGRESS_TOKENS", "True"),
        Mutant("no maximum of preemptions", "scheduling/preemption.py", " or job.preemptions >= MAX_PREEMPTIONS", ""),
        Mutant(
            "the dearest job is stopped",
            "scheduling/preemption.py",
            "key=lambda ticket: (_loss(ticket), -ticket.number)",
            "key=lambda ticket: -_loss(ticket)",
        ),
        Mutant(
            "more are stopped than needed",
            "scheduling/preemption.py",
            "            victims.remove(ticket)\n",
            "            pass\n",
        ),
        Mutant("a promise is not counted", "scheduling/preemption.py", "        worker.take(head)\n", ""),
        Mutant(
            "a victim may be stopped twice",
            "scheduling/preemption.py",
            "                del worker.stoppable[victim]\n",
            "",
        ),
        Mutant(
            "prefill is reason enough to stop",
            "scheduling/preemption.py",
            "if not worker.is_full_for(head, fill):",
            "if False:",
        ),
        Mutant(
            "a promised job loses its queue",
            "scheduling/scheduler.py",
            "            if not self._preemption.promising:\n",
            "            if True:\n",
        ),
        Mutant(
            "nobody is smaller than the first",
            "scheduling/lanes.py",
            "if ticket.kv_tokens < self.least_kv_tokens:",
            "if False:",
        ),
        Mutant(
            "whoever was idle stays so",
            "scheduling/placing/fleets.py",
            "                    self._idle -= 1\n",
            "                    pass\n",
        ),
        Mutant(
            "room is where it was not",
            "scheduling/placing/fleets.py",
            "        return least > 0 and least + kv_tokens > limit * fill\n",
            "        return least > 0\n",
        ),
        Mutant("nobody is kept a worker", "scheduling/passing.py", "if worker is not kept\n", "if True\n"),
        Mutant("passing has no end", "scheduling/passing.py", "wait.passed += ticket.kv_tokens", "pass"),
        Mutant(
            "late messages count",
            "scheduling/scheduler.py",
            "if attempt is not None and attempt != ticket.job.attempt:",
            "if False:",
        ),
        Mutant(
            "a blocked head keeps nothing",
            "scheduling/placing/fleets.py",
            "        self.closed_in = walk\n",
            "        pass\n",
        ),
        Mutant(
            "a blocked head keeps nothing from other routes",
            "scheduling/placing/fleets.py",
            "                worker.closed_in = walk\n",
            "                pass\n",
        ),
        Mutant(
            "lower lanes are owed nothing",
            "scheduling/shares.py",
            "lower.credit = credit if credit < QUANTUM_TOKENS else QUANTUM_TOKENS",
            "pass",
        ),
        Mutant(
            "a load is never found out again",
            "scheduling/packing.py",
            "                fleet.stale.append(self)\n",
            "                pass\n",
        ),
        Mutant(
            "a freed worker goes unnoticed",
            "scheduling/scheduler.py",
            "        self._changed[worker] = None\n        if type",
            "        if type",
        ),
        Mutant(
            "a look at part of the room will do", "scheduling/boarding.py", "            and wait.fill >= fill\n", ""
        ),
        Mutant(
            "a look past closed workers will do",
            "scheduling/boarding.py",
            "self._round if route.is_untouched(self._walk) else -1",
            "self._round",
        ),
        Mutant(
            "the express waits for nobody",
            "scheduling/scheduler.py",
            "if not self._hall.waiting and self._alone is None",
            "if self._alone is None",
        ),
        Mutant(
            "the express breaks promises",
            "scheduling/scheduler.py",
            "None if self._preemption.promising else send_alone(",
            "send_alone(",
        ),
        Mutant(
            "the express is free", "scheduling/express.py", "ticket.run.goes_alone(tokens)", "ticket.run.goes_alone(0)"
        ),
        Mutant(
            "the express keeps no deadline", "scheduling/express.py", "        agenda.drop(ticket)\n", "        pass\n"
        ),
        Mutant(
            "the express is not stoppable",
            "scheduling/express.py",
            "        worker.stoppable[ticket] = None\n",
            "        pass\n",
        ),
        Mutant("what is warm is worth nothing", "scheduling/placing/place.py", "fair_load + worth", "fair_load"),
        Mutant(
            "a worker that lost a job gets it again", "scheduling/placing/routes.py", "if self.key.avoid:", "if False:"
        ),
        Mutant("who was let in is turned away", "scheduling/scheduler.py", " and job.attempt == 1:", ":"),
        Mutant(
            "a padded pass that runs is joined",
            "scheduling/packing.py",
            "return not self.sequences or ",
            "return True or ",
        ),
        Mutant("before an idle worker siblings are held", "scheduling/release.py", " or route.has_idle():", ":"),
        Mutant("to be held costs nothing", "scheduling/siblings.py", "> MARGIN * hold_s * (1 + siblings)", "> 0.0"),
        Mutant(
            "holding always pays",
            "scheduling/siblings.py",
            "alone / 2 if together is None else alone - together",
            "alone / 2",
        ),
        Mutant(
            "holding is believed for good", "scheduling/siblings.py", "if not habit.holds % LOOKS_AGAIN:", "if False:"
        ),
        Mutant(
            "all families go with the first",
            "scheduling/scheduler.py",
            "if watch is None or ticket.watch is watch:",
            "if True:",
        ),
        Mutant(
            "what left the express stays ahead",
            "scheduling/express.py",
            "    line.leaves(ticket)\n",
            "    line.depth -= 1\n",
        ),
    ),
)
