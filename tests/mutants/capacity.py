"""Capacity control and the overload rule, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

_RELEASE = ("tests/scheduling/test_release.py",)

GROUP = MutantGroup(
    tests=("tests/scheduling", "tests/properties"),
    mutants=(
        Mutant(
            "a job is held back without bound",
            "scheduling/hold_bound.py",
            "            if at <= tick_context.now:\n",
            "            if at < 0:\n",
        ),
        Mutant(
            "an overdue job goes before higher lanes at once",
            "scheduling/hold_bound.py",
            "if turn_at is not None and now < turn_at:",
            "if turn_at is not None and now < 0:",
        ),
        Mutant(
            "an overdue job never goes before higher lanes",
            "scheduling/hold_bound.py",
            "if turn_at is not None and now < turn_at:",
            "if turn_at is not None:",
        ),
        Mutant(
            "overdue jobs go all at once",
            "scheduling/worker_state.py",
            "self.direct is None or self.pads or self.prefill_tokens >= self.direct.chunk_tokens",
            "self.direct is None or self.pads",
        ),
        Mutant(
            "a job is held for more than twice as long as in the engine alone",
            "scheduling/hold_bound.py",
            "HOLD_FACTOR: Final = 1.25",
            "HOLD_FACTOR: Final = 2.5",
            _RELEASE,
        ),
        Mutant(
            "higher lanes go first for more than twice as long as in the engine alone",
            "scheduling/hold_bound.py",
            "TURN_FACTOR: Final = 1.75",
            "TURN_FACTOR: Final = 3.5",
            _RELEASE,
        ),
        Mutant(
            "the time of its own prompt is no part of a job's wait",
            "scheduling/hold_bound.py",
            "factor * (direct.waits_s[entry.lane] + alone_s) - alone_s",
            "factor * direct.waits_s[entry.lane] + alone_s",
            _RELEASE,
        ),
        Mutant(
            "the engine alone has no lanes",
            "scheduling/capacity/direct_engine.py",
            "for lane, queue in enumerate(self._waiting):",
            "for lane, queue in reversed(list(enumerate(self._waiting))):",
        ),
        Mutant(
            "the engine alone is never full",
            "scheduling/capacity/direct_engine.py",
            "return not running or (running",
            "return True or (running",
        ),
        Mutant(
            "jobs in the model's queue do not count",
            "scheduling/capacity/direct_engine.py",
            "        queue = self._waiting[lane]\n        if queue:\n            ahead_s",
            "        queue = self._waiting[lane]\n        if not queue and queue:\n            ahead_s",
        ),
        Mutant(
            "whoever is late never gives way",
            "scheduling/overload.py",
            "if head.slo_start_at >= late_cutoff and head not in passed_over:",
            "if head not in passed_over:",
        ),
        Mutant(
            "whoever is late gives way for ever",
            "scheduling/overload.py",
            "if not pending or now - head.slo_start_at > MAX_PASSED_OVER_TTFTS * ttft_s:",
            "if not pending:",
        ),
        Mutant(
            "the late give way to the late",
            "scheduling/overload.py",
            "pending, late_cutoff = self._pending, now - LATE_FRACTION * ttft_s",
            "pending, late_cutoff = self._pending, now - MAX_PASSED_OVER_TTFTS * ttft_s",
        ),
        Mutant(
            "the shortest is given up",
            "scheduling/overload.py",
            "heappush(longest, (-prefill_s, -",
            "heappush(longest, (prefill_s, -",
        ),
        Mutant(
            "slack is spent to nothing",
            "scheduling/capacity/controller.py",
            "max(MIN_SLACK_ITLS, SLACK_ITLS * activity.ttft_left_fraction(now))",
            "SLACK_ITLS * activity.ttft_left_fraction(now)",
        ),
        Mutant(
            "counts are as old as when they are looked at",
            "scheduling/capacity/controller.py",
            "        if since_s <= 0:\n            return 0.0, 0.0\n        busy",
            "        if since_s >= 0:\n            return 0.0, 0.0\n        busy",
        ),
        Mutant(
            "nobody is given up",
            "scheduling/overload.py",
            "if head.slo_start_at >= late_cutoff and head not in passed_over:",
            "if head.slo_start_at >= late_cutoff:",
        ),
        Mutant(
            "a rate is used as soon as it is observed",
            "scheduling/overload.py",
            "if self._rate_s < min_rate_s or self._rate_tokens <= 0:",
            "if self._rate_tokens <= 0:",
        ),
        Mutant(
            "the earliest of equally long jobs is passed over",
            "scheduling/overload.py",
            "(-prefill_s, -entry.number, entry)",
            "(-prefill_s, entry.number, entry)",
        ),
        Mutant(
            "step costs have no prior",
            "scheduling/capacity/step_costs.py",
            "PRIOR_WEIGHT: Final = 0.05",
            "PRIOR_WEIGHT: Final = 0.0",
            ("tests/scheduling/test_step_costs.py",),
        ),
        Mutant(
            "step costs stay at their prior",
            "scheduling/capacity/step_costs.py",
            "PRIOR_WEIGHT: Final = 0.05",
            "PRIOR_WEIGHT: Final = 5.0",
            ("tests/scheduling/test_step_costs.py",),
        ),
        Mutant(
            "a cost may be negative",
            "scheduling/capacity/step_costs.py",
            "return best if best > _MIN_COST_S else _MIN_COST_S",
            "return best",
            ("tests/scheduling/test_step_costs.py",),
        ),
        Mutant(
            "a few prompts decide the ratio of token counts",
            "scheduling/capacity/controller.py",
            "RATIO_PRIOR_TOKENS = 5000",
            "RATIO_PRIOR_TOKENS = 1",
        ),
        Mutant(
            "live prompts put lower lanes in debt for good",
            "scheduling/capacity/prefill_bucket.py",
            "max(self._level - tokens, min(self._level, -max_debt_s * self._rate))",
            "self._level - tokens",
        ),
        Mutant(
            "the bucket has no brim",
            "scheduling/capacity/prefill_bucket.py",
            "min(tick_context.burst_tokens, self._level",
            "max(0.0, self._level",
        ),
        Mutant(
            "lower lanes drain the bucket", "scheduling/capacity/prefill_bucket.py", " + burst * (1.0 - fill)\n", "\n"
        ),
    ),
)
