"""Sweeps over concurrency and profiles of the engine, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

SWEEP = ("tests/loadgen/test_sweep.py",)
PROFILE = ("tests/engine/profiling/test_roofline.py", "tests/engine/profiling/test_measure.py")

GROUP = MutantGroup(
    tests=("tests/cli/test_profile_cli.py",),
    mutants=(
        Mutant(
            "calls of a warm-up count",
            "loadgen/sweep_result.py",
            "if began <= call.due < ended and call.outcome",
            "if call.due < ended and call.outcome",
            SWEEP,
        ),
        Mutant(
            "tokens after the end of a level count",
            "loadgen/sweep_result.py",
            "sum(began <= moment < ended for moment in call.times)",
            "sum(began <= moment for moment in call.times)",
            SWEEP,
        ),
        Mutant(
            "the last level is a knee",
            "loadgen/sweep_result.py",
            "return first if highest and first != levels[-1].concurrency else None",
            "return first if highest else None",
            SWEEP,
        ),
        Mutant(
            "a level ends without enough calls",
            "loadgen/sweep.py",
            "elif now - self.began >= self._sweep.level_s and ended - self._ended_before >= self.least_calls:",
            "elif now - self.began >= self._sweep.level_s:",
            SWEEP,
        ),
        Mutant(
            "a level has no warm-up",
            "loadgen/sweep.py",
            "self._sweep.test.warmup_s and ended >= self.concurrency:",
            "self._sweep.test.warmup_s:",
            SWEEP,
        ),
        Mutant(
            "levels share prompts",
            "loadgen/sweep.py",
            'name = f"sweep-{self.concurrency}"',
            'name = "sweep-0"',
            SWEEP,
        ),
        Mutant(
            "a server that refuses is flooded",
            "loadgen/load_generator.py",
            "await asyncio.sleep(FAILED_CALL_PAUSE_S)",
            "await asyncio.sleep(0.001)",
            SWEEP,
        ),
        Mutant(
            "readings from before a level count",
            "loadgen/gpu_utilisation.py",
            "for at, value in self._readings if at >= span_s]",
            "for at, value in self._readings]",
            SWEEP,
        ),
        Mutant(
            "nvidia-smi is read for servers elsewhere",
            "loadgen/gpu_utilisation.py",
            'shutil.which("nvidia-smi") if urlsplit(url).hostname in _LOCAL_HOSTS else None',
            'shutil.which("nvidia-smi")',
            SWEEP,
        ),
        Mutant(
            "keys and values of a decode are not read",
            "engine/profiling/roofline.py",
            "values += 2 * keys * (read + model.layers * rows)",
            "values += 2 * keys * model.layers * rows",
            PROFILE,
        ),
        Mutant(
            "a window limits no operations",
            "engine/profiling/roofline.py",
            "min(position + 1, window or position + 1)",
            "position + 1",
            PROFILE,
        ),
        Mutant(
            "a long context has a transition",
            "engine/profiling/roofline.py",
            "if per_sequence <= 0:",
            "if per_sequence == 0:",
            PROFILE,
        ),
        Mutant(
            "times that do not grow have a transition",
            "engine/profiling/roofline.py",
            "return None if best >= last - 0.5 else ceil(2**best)",
            "return ceil(2**best)",
            PROFILE,
        ),
        Mutant(
            "a profiled step takes longer than the step",
            "engine/profiling/kernels.py",
            "scale = min(1.0, step_s / busy_s) if busy_s else 1.0",
            "scale = 1.0",
            PROFILE,
        ),
        Mutant(
            "sequences of a profile share blocks",
            "engine/profiling/measure.py",
            "sequence.blocks = [next(blocks) for _ in range(-(-end // block_tokens))]",
            "sequence.blocks = [*range(-(-end // block_tokens))]",
            PROFILE,
        ),
        Mutant(
            "a cut prompt is sampled from",
            "engine/profiling/measure.py",
            "range(end + (not piece.is_sampled))",
            "range(end)",
            PROFILE,
        ),
    ),
)
