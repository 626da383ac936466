"""The embedded engine and vLLM on one GPU: `python -m benchmarks.engine_gpu --beside-vllm`.

Each arm runs in a process of its own and has the GPU alone. Arms alternate, so that a change of the machine affects
both. Both have random weights of the shape of Llama 3.1 8B in bfloat16, the same prompts, and no prefix cache.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.engine_gpu_vllm import write_model

ORDER = ("inferry", "vllm", "vllm", "inferry")
RESULTS = Path(__file__).parent / "results" / "engine-gpu.json"
TIMEOUT_S = 900
Figures = dict[str, dict[str, float]]


def compare(sizes: list[int], chunk_tokens: int, vllm_python: str, out: Path | None) -> int:
    """Run all arms and write their medians after each. An arm that fails is noted, and the others still run."""
    runs: dict[str, list[Figures]] = {name: [] for name in ORDER}
    failures: list[str] = []
    versions = _versions(vllm_python)
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch))
        for number, name in enumerate(ORDER):
            found = _run_arm(name, Path(scratch), number, sizes, chunk_tokens, vllm_python)
            if found is None:
                failures.append(f"{name}, run {number}")
            else:
                runs[name].append(found)
            result = {"versions": versions, "failures": failures, **summary(runs, sizes, chunk_tokens)}
            (out or RESULTS).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures else 0


def summary(runs: dict[str, list[Figures]], sizes: list[int], chunk_tokens: int) -> dict[str, object]:
    """Medians of each arm and their ratios; also printed."""
    arms = {name: _medians(of_arm, sizes) for name, of_arm in runs.items() if of_arm}
    ratios: dict[str, float] = {}
    for size in map(str, sizes) if len(arms) == 2 else ():
        ours, theirs = (arms[name][size]["tokens_per_s"] for name in ("inferry", "vllm"))
        ratios[size] = ours / theirs
        print(
            f"n={size:>4s} output tokens/s, inferry / vLLM: {ours:,.0f} / {theirs:,.0f} = {ratios[size]:.3f}",
            flush=True,
        )
    return {
        "command": "python -m benchmarks.engine_gpu --beside-vllm",
        "order": ORDER,
        "prompt_tokens": 512,
        "output_tokens": 128,
        "chunk_tokens": chunk_tokens,
        "arms": arms,
        "runs": runs,
        "inferry_by_vllm": ratios,
    }


def _run_arm(
    name: str, scratch: Path, number: int, sizes: list[int], chunk_tokens: int, vllm_python: str
) -> Figures | None:
    out = scratch / f"{number}.json"
    shared = ["--sizes", ",".join(map(str, sizes)), "--chunk-tokens", str(chunk_tokens), "--out", str(out)]
    if name == "inferry":
        command = [sys.executable, "-m", "benchmarks.engine_gpu", *shared]
    else:
        command = [vllm_python, "-m", "benchmarks.engine_gpu_vllm", "--model", str(scratch), *shared]
    print(f"== {name}, run {number}", flush=True)
    started = time.perf_counter()
    try:
        ended = subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        ended = -1
    print(f"== {name}, run {number}: status {ended}, {time.perf_counter() - started:.0f} s", flush=True)
    if ended != 0 or not out.is_file():
        return None
    found: Figures = json.loads(out.read_text())
    return found


def _medians(runs: list[Figures], sizes: list[int]) -> Figures:
    return {
        str(size): {figure: statistics.median(run[str(size)][figure] for run in runs) for figure in runs[0][str(size)]}
        for size in sizes
    }


def _versions(vllm_python: str) -> dict[str, str]:
    """Versions of what both arms use, from the interpreter that has vLLM, and the GPU."""
    code = "import torch, triton, vllm; print(vllm.__version__, torch.__version__, triton.__version__)"
    found = subprocess.run([vllm_python, "-c", code], capture_output=True, text=True, check=False)
    names = found.stdout.split()[-3:]
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=False)
    versions = dict(zip(("vllm", "torch", "triton"), names, strict=False))
    return {**versions, "gpu": gpu.stdout.strip(), "python": sys.version.split()[0], "cores": str(os.cpu_count())}
