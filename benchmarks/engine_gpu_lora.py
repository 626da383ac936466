"""LoRA adapters of the embedded engine on a GPU: `python -m benchmarks.engine_gpu_lora` on a host with CUDA.

Random weights of the shape of Llama 3.1 8B in bfloat16, random adapters of rank 16 for all seven modules. The calls of
a batch use 0, 1, 8 or 32 adapters in turn. The arms alternate in one process; beside them runs an engine without
slots for adapters. `--check` compares the kernels with their reference and writes nothing.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from msgspec.structs import replace

from benchmarks import engine_gpu
from benchmarks.engine_gpu_check import DEVICE, DTYPES, a_step, assert_near, rows_of
from benchmarks.result_files import commit_of
from inferry.cli.checkout import ROOT
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.gpu.adapter_tiles import tile_rows
from inferry.engine.gpu.kernels.lora import StackedAdapters, add_adapters, add_adapters_reference, splits_of
from inferry.engine.gpu.loading import build_runner
from inferry.engine.gpu.runner import GpuRunner
from inferry.engine.gpu.weights import random_weights
from inferry.engine.messages import Request

ADAPTERS = (0, 1, 8, 32)
SIZES = (32, 128)
RANK = 16
ROUNDS = 3
GOAL = 1.5
"""A batch with 32 adapters may cost this much of one without."""
Runs = dict[str, dict[str, list[dict[str, float]]]]
"""Figures of each round, by size and arm."""
RESULTS = Path(__file__).parent / "results" / "engine-gpu-lora.json"


def check() -> None:
    """The kernels against their reference, for the matrices of the 8B shape: decodes of many adapters, and chunks."""
    slots = {adapter: adapter - 1 for adapter in range(1, 9)}
    steps = {"decodes": [(100 + key, 1) for key in range(40)], "chunks": [(5, 1), (40, 1), (0, 700), (64, 31), (0, 90)]}
    matrices = {"qkv": (4_096, (4_096, 1_024, 1_024)), "gate_up": (4_096, (14_336, 14_336)), "down": (14_336, (4_096,))}
    for dtype in DTYPES:
        for kind, lengths in steps.items():
            packed, step = a_step(lengths, 4, dtype, [(key * 5) % 9 for key in range(len(lengths))], slots)
            for name, (inputs, widths) in matrices.items():
                stack = StackedAdapters(
                    torch.randn(8, len(widths), RANK, inputs, device=DEVICE).to(dtype) / inputs**0.5,
                    torch.randn(8, sum(widths), RANK, device=DEVICE).to(dtype),
                    widths,
                )
                rows = packed.rows + 5
                given = rows_of(rows, inputs, dtype)
                pair = [torch.zeros(rows, sum(widths), dtype=dtype, device=DEVICE) for _ in range(2)]
                narrow = torch.empty(rows * len(widths) * splits_of(inputs) * RANK, device=DEVICE)
                tile = tile_rows(has_chunks=kind == "chunks")
                add_adapters(step, given, stack, narrow, pair[0], packed.adapter_tiles + 3, tile)
                add_adapters_reference(step, given, stack, pair[1])
                assert_near(f"adapters of {name}, {kind}", pair[0], pair[1])


def load_random_adapters(runner: GpuRunner, count: int) -> None:
    """Adapters 1 to `count`, written on the device."""
    adapters = runner.adapters
    assert adapters is not None
    for stacks in adapters._layers:
        for stack in stacks.values():
            stack.a.normal_(0.0, 0.02)
            stack.b.normal_(0.0, 0.02)
    adapters.slots = {slot + 1: slot for slot in range(count)}


def measure(runner: GpuRunner, config: EngineConfig, count: int, adapters: int, seed: int) -> dict[str, float]:
    """One run: all requests at once, until the last one ends. Request i has adapter i modulo `adapters`."""
    core = EngineCore(runner, config)
    requests = engine_gpu.requests_of(count, runner.vocab_size, engine_gpu.OUTPUT_TOKENS, seed)
    torch.cuda.synchronize()
    started = last = time.perf_counter()
    for request in requests:
        assert core.add(_with_adapter(request, adapters)) is None
    decodes: list[float] = []
    first_token = 0.0
    while core.has_work:
        done = core.step()
        now = time.perf_counter()
        if done.tokens and not first_token:
            first_token = now - started
        if done.stats.step_tokens <= count:
            decodes.append(now - last)
        last = now
    seconds = last - started
    return {
        "tokens_per_s": count * engine_gpu.OUTPUT_TOKENS / seconds,
        "first_token_ms": 1_000 * first_token,
        "decode_step_ms": 1_000 * statistics.median(decodes),
        "seconds": seconds,
    }


def _with_adapter(request: Request, adapters: int) -> Request:
    return replace(request, adapter=1 + request.key % adapters) if adapters else request


def print_profile(runner: GpuRunner, config: EngineConfig, count: int, adapters: int) -> None:
    """Kernels of decode steps."""
    core = EngineCore(runner, config)
    for request in engine_gpu.requests_of(count, runner.vocab_size, engine_gpu.OUTPUT_TOKENS, 99):
        assert core.add(_with_adapter(request, adapters)) is None
    for _ in range(-(-count * engine_gpu.PROMPT_TOKENS // config.chunk_tokens) + 4):
        core.step()
    steps = engine_gpu.PROFILED_STEPS
    engine_gpu.print_kernels(
        f"n={count}, {adapters} adapters, {steps} decode steps", lambda: [core.step() for _ in range(steps)]
    )
    core.abort([*range(count)])
    while core._in_flight:
        core.step()


def run(layers: int, chunk_tokens: int, out: Path, has_profile: bool) -> int:
    device = torch.device("cuda")
    model = dataclasses.replace(engine_gpu.llama_8b(), layers=layers)
    weights = random_weights(model, torch.bfloat16, device)
    plain = EngineConfig(max_sequences=max(SIZES), chunk_tokens=chunk_tokens, kv_tokens=100_000, prefix_cache=False)
    config = replace(plain, max_adapters=max(ADAPTERS), max_adapter_rank=RANK)
    started = time.perf_counter()
    runners = {"no slots": (build_runner(model, weights, plain, device), plain)}
    runner = build_runner(model, weights, config, device)
    load_random_adapters(runner, max(ADAPTERS))
    runners |= {str(count): (runner, config) for count in ADAPTERS}
    print(
        f"caches, compilation and graphs: {time.perf_counter() - started:.1f} s; graphs {runner.graph_bytes / 1e6:.0f} "
        f"MB with adapters, {runners['no slots'][0].graph_bytes / 1e6:.0f} MB without; allocated "
        f"{torch.cuda.memory_allocated() / 1e9:.2f} GB",
        flush=True,
    )
    runs: Runs = {str(size): {arm: [] for arm in runners} for size in SIZES}
    for seed in range(ROUNDS + 1):  # the first round compiles what the graphs do not cover
        for size in SIZES:
            for arm, (used, used_config) in runners.items():
                figures = measure(used, used_config, size, 0 if arm == "no slots" else int(arm), seed)
                if seed:
                    runs[str(size)][arm].append(figures)
    for size in SIZES if has_profile else ():
        for count in (0, max(ADAPTERS)):
            print_profile(runner, config, size, count)
    setting = {"layers": layers, "chunk_tokens": chunk_tokens}
    return summarise(runs, setting, out)


def summarise(runs: Runs, setting: dict[str, int], out: Path) -> int:
    """Write and print the medians of all arms, and their ratio to the arm without adapters."""
    arms = {
        size: {
            arm: {name: statistics.median(one[name] for one in found) for name in found[0]} for arm, found in by.items()
        }
        for size, by in runs.items()
    }
    ratios = {
        size: {
            name: {arm: round(by[arm][name] / by["0"][name], 4) for arm in by}
            for name in ("seconds", "decode_step_ms", "first_token_ms")
        }
        for size, by in arms.items()
    }
    worst = max(of_size["seconds"][str(max(ADAPTERS))] for of_size in ratios.values())
    result = {
        "command": "python -m benchmarks.engine_gpu_lora",
        "commit": commit_of(ROOT) or "unknown",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **setting,
        "rank": RANK,
        "prompt_tokens": engine_gpu.PROMPT_TOKENS,
        "output_tokens": engine_gpu.OUTPUT_TOKENS,
        "goal": GOAL,
        "worst_ratio": worst,
        "by_none": ratios,
        "arms": arms,
        "runs": runs,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    for size, by in arms.items():
        for arm, figures in by.items():
            text = " ".join(f"{name}={value:.2f}" for name, value in figures.items())
            print(f"n={size:>4s} adapters {arm:>8s}: {text}  {ratios[size]['seconds'][arm]:.3f}x of none")
    print(f"worst: {worst:.3f}x, goal {GOAL}x")
    return 0 if worst <= GOAL else 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel with 32 adapters")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--chunk-tokens", type=int, default=8_192)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.check:
        check()
        return 0
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    return run(arguments.layers, arguments.chunk_tokens, arguments.out, arguments.profile)


if __name__ == "__main__":
    sys.exit(main())
