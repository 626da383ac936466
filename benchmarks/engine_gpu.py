"""The embedded engine on a GPU: `python -m benchmarks.engine_gpu` on a host with CUDA.

Random weights of the shape of Llama 3.1 8B, made on the device; prompts of 512 tokens, 128 tokens of output. For each
number of sequences: output tokens/s, time of a decode step, and the host's part of it. `--profile` adds the time of
each kernel and the time between kernels. `--check` compares kernels with their references and small models with
transformers; `--kernels` measures matrix products and attention by size. `--beside-vllm` alternates with vLLM on the
same machine and writes a results file.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from inferry.domain.sampling import Sampling
from inferry.engine.checkpoint import read_config
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.gpu.loading import build_runner
from inferry.engine.gpu.runner import GpuRunner
from inferry.engine.gpu.weights import random_weights
from inferry.engine.messages import Request
from inferry.engine.model import ModelConfig

SIZES = (1, 8, 32, 128, 256)
VLLM = {1: 195, 8: 1_363, 32: 3_636, 128: 6_240, 256: 6_805}
"""Output tokens/s of vLLM 0.26.0 on one H200, same shape and lengths."""
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
PROFILED_STEPS = 12
KV_TOKENS = 400_000
Figures = dict[str, dict[str, float]]


def llama_8b() -> ModelConfig:
    theta, dim = 500_000.0, 128
    return ModelConfig(
        vocab_size=128_256,
        hidden=4_096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=dim,
        intermediate=14_336,
        norm_eps=1e-5,
        context_tokens=8_192,
        rope_inverse_frequencies=1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim),
        eos_ids=frozenset({128_001}),
    )


class Timed:
    """A runner that notes the host's time in each launch and each wait."""

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner
        self.context_tokens, self.vocab_size, self.eos_ids = runner.context_tokens, runner.vocab_size, runner.eos_ids
        self.launch_s: list[float] = []
        self.wait_s: list[float] = []
        self.execute = runner.execute

    def launch(self, work) -> None:  # type: ignore[no-untyped-def]
        started = time.perf_counter()
        self._runner.launch(work)
        self.launch_s.append(time.perf_counter() - started)

    def collect(self) -> list[int]:
        started = time.perf_counter()
        tokens = self._runner.collect()
        self.wait_s.append(time.perf_counter() - started)
        return tokens


def requests_of(count: int, vocabulary: int, output_tokens: int, seed: int) -> list[Request]:
    generator = random.Random(seed)
    sampling = Sampling(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    return [
        Request(key, [generator.randrange(1, vocabulary) for _ in range(PROMPT_TOKENS)], sampling, lane=0)
        for key in range(count)
    ]


def measure_size(runner: GpuRunner, config: EngineConfig, count: int, seed: int) -> dict[str, float]:
    """One run: all requests at once, until the last one ends."""
    timed = Timed(runner)
    core = EngineCore(timed, config)
    requests = requests_of(count, runner.vocab_size, OUTPUT_TOKENS, seed)
    steps: list[tuple[float, int]] = []
    torch.cuda.synchronize()
    started = last = time.perf_counter()
    for request in requests:
        assert core.add(request) is None
    first_token = 0.0
    while core.has_work:
        done = core.step()
        now = time.perf_counter()
        if done.tokens and not first_token:
            first_token = now - started
        steps.append((now - last, done.stats.step_tokens))
        last = now
    seconds = last - started
    decodes = [spent for spent, tokens in steps if tokens <= count]
    prefills = [spent for spent, tokens in steps if tokens > count]
    waits = timed.wait_s[-len(decodes) // 2 :]
    return {
        "tokens_per_s": count * OUTPUT_TOKENS / seconds,
        "first_token_ms": 1_000 * first_token,
        "decode_step_ms": 1_000 * statistics.median(decodes),
        "prefill_s": sum(prefills),
        "prefill_steps": len(prefills),
        "launch_ms": 1_000 * statistics.median(timed.launch_s),
        "wait_ms": 1_000 * statistics.median(waits),
        "seconds": seconds,
    }


def print_profile(runner: GpuRunner, config: EngineConfig, count: int) -> None:
    """Kernels of the first steps (prompts), then of decode steps."""
    core = EngineCore(runner, config)
    for request in requests_of(count, runner.vocab_size, OUTPUT_TOKENS, 99):
        assert core.add(request) is None
    prompt_steps = -(-count * PROMPT_TOKENS // config.chunk_tokens)
    print_kernels(f"n={count}, {prompt_steps} steps with prompts", lambda: [core.step() for _ in range(prompt_steps)])
    for _ in range(4):
        core.step()
    print_kernels(f"n={count}, {PROFILED_STEPS} decode steps", lambda: [core.step() for _ in range(PROFILED_STEPS)])
    core.abort([*range(count)])
    while core._in_flight:
        core.step()


def print_kernels(title: str, work: Callable[[], object]) -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    busy, gaps, end = 0.0, 0.0, kernels[0][0]
    by_name: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for start, stop, name in kernels:
        gaps += max(0.0, start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        by_name[name[:90]] += stop - start
        counts[name[:90]] += 1
    print(
        f"-- {title}: {seconds * 1e3:.2f} ms, kernels busy {busy / 1e3:.2f} ms, between kernels {gaps / 1e3:.2f} ms, "
        f"{len(kernels)} kernels"
    )
    for name, spent in by_name.most_common(14):
        print(f"   {spent / 1e3:8.3f} ms {counts[name]:6d} x {spent / counts[name]:8.2f} us  {name}")


def run_throughput(model: ModelConfig, sizes: list[int], chunk_tokens: int, has_profile: bool) -> Figures:
    device = torch.device("cuda")
    started = time.perf_counter()
    weights = random_weights(model, torch.bfloat16, device)
    torch.cuda.synchronize()
    print(f"weights: {time.perf_counter() - started:.1f} s, {torch.cuda.memory_allocated() / 1e9:.2f} GB")
    config = EngineConfig(max_sequences=max(sizes), chunk_tokens=chunk_tokens, kv_tokens=KV_TOKENS)
    started = time.perf_counter()
    runner = build_runner(model, weights, config, device)
    print(
        f"cache, compilation and graphs: {time.perf_counter() - started:.1f} s; "
        f"graphs {runner.graph_bytes / 1e6:.0f} MB; allocated {torch.cuda.memory_allocated() / 1e9:.2f} GB"
    )
    measure_size(runner, config, 2, seed=1)  # compiles what the graphs do not cover
    measure_size(runner, config, max(sizes), seed=2)
    results: Figures = {}
    for count in sizes:
        runs = [measure_size(runner, config, count, seed) for seed in (11, 12, 13)[: 3 if count < 128 else 2]]
        best = sorted(runs, key=lambda one: one["tokens_per_s"])[len(runs) // 2]
        results[str(count)] = best
        beside = f"{best['tokens_per_s'] / VLLM[count]:.2f}x vLLM" if count in VLLM else ""
        print(f"n={count:4d} " + " ".join(f"{k}={v:.2f}" for k, v in best.items()) + f"  {beside}", flush=True)
    if has_profile:
        for count in sizes:
            _attempt(f"profile of {count} sequences", lambda count=count: print_profile(runner, config, count))  # type: ignore[misc]
    return results


def _attempt(title: str, work: Callable[[], object]) -> bool:
    """Run a part; a failure is printed and the next part still runs."""
    print(f"== {title}", flush=True)
    started = time.perf_counter()
    try:
        work()
    except Exception:
        traceback.print_exc()
        print(f"== {title}: FAILED", flush=True)
        return False
    finally:
        torch.cuda.empty_cache()
    print(f"== {title}: {time.perf_counter() - started:.1f} s", flush=True)
    return True


def _all(parts: dict[str, Callable[[], None]], only: str) -> int:
    outcomes = [_attempt(name, part) for name, part in parts.items() if only in name]
    return 0 if all(outcomes) else 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="", help="run only checks or kernels whose name contains this text")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--chunk-tokens", type=int, default=8_192)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--model", type=Path, help="a directory with config.json; weights stay random")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--beside-vllm", action="store_true")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    if arguments.beside_vllm:
        # Before this process uses the GPU: each arm has it alone.
        from benchmarks.engine_gpu_beside import compare

        return compare(sizes, arguments.chunk_tokens, arguments.vllm_python, arguments.out)
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    if arguments.check:
        from benchmarks.engine_gpu_check import CHECKS

        return _all(CHECKS, arguments.only)
    if arguments.kernels:
        from benchmarks.engine_gpu_kernels import MEASUREMENTS

        return _all(MEASUREMENTS, arguments.only)
    model = read_config(arguments.model) if arguments.model else llama_8b()
    model = dataclasses.replace(model, layers=min(model.layers, arguments.layers))
    results = run_throughput(model, sizes, arguments.chunk_tokens, arguments.profile)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
