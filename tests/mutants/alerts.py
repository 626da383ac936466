"""Metrics, alerts and advice, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

GROUP = MutantGroup(
    tests=("tests/observe", "tests/durable/test_webhook_sender.py"),
    mutants=(
        Mutant(
            "streams that are late in every step are advised to use the hybrid mode",
            "observe/diagnosis/advice.py",
            "return p50_ms <= target_ms < p99_ms",
            "return target_ms < p99_ms",
        ),
        Mutant(
            "batching is advised where nothing waits",
            "observe/diagnosis/advice.py",
            "if waits >= WAITING_SHARE:",
            "if waits >= 0.0:",
        ),
        Mutant(
            "an alert fires at once",
            "observe/alert_states.py",
            'state: State = "firing" if now - began_at >= rule.for_s else "pending"',
            'state: State = "firing"',
        ),
        Mutant(
            "an alert fires at every evaluation",
            "observe/alert_states.py",
            'if state == "firing" and (old is None or old.state == "pending"):',
            'if state == "firing":',
        ),
        Mutant(
            "a pending alert is resolved",
            "observe/alert_states.py",
            'for one in before.values() if one.state == "firing"]',
            "for one in before.values()]",
        ),
        Mutant(
            "an alert lasts by the wall clock",
            "observe/alert_states.py",
            "(wall, now) if old is None else",
            "(wall, wall) if old is None else",
        ),
        Mutant(
            "both sides of a condition are one",
            "observe/alert_expressions.py",
            "if _only(labels, self.on) in right",
            "if True or right",
        ),
        Mutant(
            "an earlier window is the present one",
            "observe/history.py",
            "end = self._samples[-1].at - ago_s",
            "end = self._samples[-1].at",
        ),
        Mutant(
            "padding includes the prompts",
            "observe/metrics.py",
            "children[1].value += padded_tokens * len(plan.jobs) - tokens",
            "children[1].value += padded_tokens * len(plan.jobs)",
        ),
        Mutant(
            "service is never forgotten",
            "observe/tenant_service.py",
            "for _ in range(min(passed, SLICES)):",
            "for _ in range(0):",
        ),
        Mutant(
            "paths of clients become endpoints",
            "observe/request_counts.py",
            "        return self._other",
            "        return self._counters.setdefault(target, [FastCounter() for _ in STATUS_CLASSES])",
        ),
        Mutant(
            "the newest event is dropped",
            "durable/webhook_sender.py",
            "self._queue.popleft()\n            self.attempts",
            "self._queue.pop()\n            self.attempts",
        ),
        Mutant(
            "an event is retried for ever",
            "durable/webhook_sender.py",
            "if self._clock.now() + delay_s > event.at + self._policy.retry_for_s:",
            "if False:",
        ),
    ),
)
