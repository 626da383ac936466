"""Scaling advice and workers on Ray, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

GROUP = MutantGroup(
    tests=(
        "tests/prediction/test_scaling.py",
        "tests/workers/test_ray_session.py",
        "tests/dispatch/test_scale_to_zero.py",
        "tests/cli/test_ray_config.py",
    ),
    mutants=(
        Mutant(
            "waiting work is not counted",
            "prediction/scaling.py",
            "needed = demand.in_use / policy.utilization + demand.waiting_s / policy.target_wait_s",
            "needed = demand.in_use / policy.utilization",
        ),
        Mutant(
            "a waiting job does not start the first worker",
            "prediction/scaling.py",
            "has_work = demand.in_use > 0 or demand.waiting_jobs > 0",
            "has_work = demand.in_use > 0",
        ),
        Mutant(
            "the advice falls at once",
            "prediction/scaling.py",
            "while len(needs) > 1 and needs[0][0] <= now - self._policy.scale_down_after_s:",
            "while len(needs) > 1:",
        ),
        Mutant(
            "the advice never falls",
            "prediction/scaling.py",
            "while len(needs) > 1 and needs[0][0] <= now - self._policy.scale_down_after_s:",
            "while False:",
        ),
        Mutant(
            "workers found at the start are stopped",
            "prediction/scaling.py",
            "        self._add(workers, now)\n\n    def advise(",
            "        self._add(0, now)\n\n    def advise(",
        ),
        Mutant(
            "an idle interval makes work cheap",
            "prediction/scaling.py",
            "if busy_s > 0 and units > 0:",
            "if True:",
        ),
        Mutant(
            "a standby counts as a worker",
            "dispatch/scale_monitor.py",
            "if view.scale_up_wait_s is None and view.phase is not Phase.DRAINING]",
            "if True]",
        ),
        Mutant(
            "a model without replicas is not waited for",
            "dispatch/pool.py",
            "(supervisor.was_up or supervisor.view.scale_up_wait_s is not None)",
            "supervisor.was_up",
        ),
        Mutant(
            "the wait for a replica is that for a worker",
            "dispatch/pool.py",
            "return max(self.policy.no_worker_timeout_s, *waits, 0.0)",
            "return self.policy.no_worker_timeout_s",
        ),
        Mutant(
            "a gateway without replicas is not ready",
            "dispatch/pool.py",
            ' and view.role != "prefill") or view.scale_up_wait_s is not None for view in views',
            ' and view.role != "prefill") for view in views',
        ),
        Mutant(
            "a draining worker is probed",
            "dispatch/supervisor.py",
            "            Phase.DOWN,\n            Phase.DRAINING,\n        ):",
            "            Phase.DOWN,\n        ):",
        ),
        Mutant(
            "batches are taken as they come",
            "workers/ray/session.py",
            "self._early[number] = data",
            "self._early[self._next_number] = data",
        ),
        Mutant(
            "aborted keys are held for ever",
            "workers/ray/session.py",
            "self.keys.difference_update(account.key for account in freed)",
            "pass",
        ),
        Mutant(
            "two workers on Ray may share a group",
            "cli/config/checks.py",
            "if any(one.group == worker.group for one in workers if one is not worker):",
            "if False:",
        ),
    ),
)
