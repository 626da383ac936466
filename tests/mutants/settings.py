"""Versions of the settings, broken in one place at a time: queues by version, intervals, guardrails."""

from mutants.mutant import Mutant, MutantGroup

GROUP = MutantGroup(
    tests=("tests/scheduling/test_lane_versions.py", "tests/settings"),
    mutants=(
        Mutant(
            "a trial takes no run",
            "scheduling/queues/lane_queue.py",
            "            rules = self.candidate\n",
            "            pass\n",
        ),
        Mutant(
            "jobs of a trial that has ended stay held",
            "scheduling/batching/batching_window.py",
            "    if not queue.is_in_use():\n        return False\n",
            "",
        ),
        Mutant(
            "routes keep the groups of the version before",
            "scheduling/lane_switch.py",
            "                route.use_rules(lane_queue.rules)\n",
            "                pass\n",
        ),
        Mutant(
            "an interval is for a single look",
            "settings/comparison.py",
            "(log(mixed / variance) + 2 * log(1 / error))",
            "log(1 / error) / 2",
        ),
        Mutant(
            "any drop is a breach",
            "settings/guardrails.py",
            "high < -guardrails.max_attainment_drop",
            "low < -guardrails.max_attainment_drop",
        ),
        Mutant(
            "the served gateway never pauses runs",
            "cli/wiring.py",
            "sessions=config.sessions.limits()),",
            "sessions=None),",
            ("tests/e2e/test_session_pauses_served.py",),
        ),
        Mutant(
            "settings are tried without session pauses",
            "cli/settings_try.py",
            "simulated_workers(config, model), config.sessions.limits())",
            "simulated_workers(config, model))",
            ("tests/sim/test_recorded_traffic.py",),
        ),
    ),
)
