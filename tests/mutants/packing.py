"""KV packing and the separation of short and long jobs, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

GROUP = MutantGroup(
    tests=("tests/scheduling/test_kv_packing.py", "tests/scheduling/test_short_and_long_jobs.py"),
    mutants=(
        Mutant(
            "short and long jobs share their workers",
            "scheduling/placement/route_filter.py",
            "if w.output_length in (None, self.key.length)]",
            "if True]",
        ),
        Mutant(
            "a job waits for a worker of its length that is down",
            "scheduling/placement/route_filter.py",
            "(None, self.key.length)] or up",
            "(None, self.key.length)]",
        ),
        Mutant(
            "only the last end counts for the KV peak",
            "scheduling/capacity/kv_peak.py",
            "            if level > highest:\n                highest = level\n",
            "            highest = level\n",
        ),
        Mutant(
            "a job past its prediction holds no KV",
            "scheduling/capacity/kv_peak.py",
            "                overdue += own_held\n",
            "",
        ),
        Mutant(
            "KV of other clients is free",
            "scheduling/worker_state.py",
            "        untimed = self.kv_tokens - kv_peaks.own_peaks  # of other clients\n",
            "        untimed = 0\n",
        ),
        Mutant(
            "a nominee goes before the predicted peak has fallen",
            "scheduling/preemption.py",
            "if kv_peaks is not None and not worker.fits_timed(",
            "if False and not worker.fits_timed(",
        ),
    ),
)
