"""The four modes of the embedded engine on one workload: throughput, first tokens, inter-token latencies, padding.

`python -m benchmarks.modes` prints a table; `measure()` returns the same figures. `--gpu` measures random weights of
the shape of Llama 3.1 8B in bfloat16 on a GPU. The core of the engine runs without process and gateway. Another runner
is measured with another `make_runner` and `Workload`, on the same requests. Compared modes alternate, so that a busy
machine slows all of them. Prompts have log-uniform lengths and outputs exponential ones. Clients are a closed loop with
more calls than a batch has rows, so that calls wait in every mode: a gateway sends an engine as many with `capacity:
fixed`. `hybrid` is measured without waiting calls as well.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from math import exp, log
from pathlib import Path

import torch
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from inferry.domain.lanes import Lane
from inferry.domain.sampling import Sampling
from inferry.domain.workers import EngineMode
from inferry.engine.bundled import BUNDLED_DIRECTORY
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.model import ModelConfig
from inferry.engine.runner import TorchRunner, set_threads
from inferry.engine.runners import Runner

MakeRunner = Callable[[EngineConfig], Runner]
Figures = dict[str, float]


class Arm(Struct, frozen=True):
    """One measured way to batch. `is_queued`: more calls are open than the batch has rows."""

    name: str
    mode: EngineMode
    has_buckets: bool = False
    is_queued: bool = True


ARMS = (
    Arm("static", "static"),
    Arm("static, prompts in buckets", "static", has_buckets=True),
    Arm("dynamic", "dynamic"),
    Arm("continuous", "continuous"),
    Arm("hybrid", "hybrid"),
    Arm("continuous, no call waits", "continuous", is_queued=False),
    Arm("hybrid, no call waits", "hybrid", is_queued=False),
)
EXPECTED = {
    "source": "texts on batching that the project started from; an A100 with Llama-2-7B, batch 32",
    "requests_per_s": {"static": "30 to 40", "dynamic": "60 to 80", "continuous": "150 to 200"},
    "p99_latency_ms": {"static": "6,000 to 10,000", "dynamic": "1,500 to 3,000", "continuous": "300 to 500"},
    "dynamic_by_static": "2",
    "continuous_by_static": "5",
    "continuous_by_dynamic": "3 to 5 (their figures: 2.5)",
    "hybrid_by_continuous": "1.3 to 1.4",
    "padding_of_prompts": "0.67 (the lengths they list give 0.61); with buckets 0.25 to 0.35",
}
"""What the texts expect of each mode. Latency is that of whole requests there."""


class Workload(Struct, frozen=True, kw_only=True):
    """`concurrency` calls are open at any time, and `jobs` in all. Buckets are bounds of prompt lengths in tokens."""

    batch: int = 32
    concurrency: int = 96
    jobs: int = 480
    prompt_tokens: tuple[int, int] = (16, 512)
    mean_output_tokens: int = 128
    max_output_tokens: int = 1_024
    buckets: tuple[int, ...] = (64, 160)
    chunk_tokens: int = 2_048
    kv_tokens: int = 131_072
    block_tokens: int = 32
    decode_wait_ms: int = 500
    vocabulary: int = 3_072


class Latencies(Struct):
    """Seconds of one run."""

    first_token: list[float]
    inter_token: list[float]
    whole: list[float]


def measure(
    repetitions: int = 3, workload: Workload | None = None, make_runner: MakeRunner | None = None
) -> dict[str, object]:
    """All figures of one run: medians over the repetitions, each with its own lengths."""
    workload = workload or Workload()
    threads = None
    if make_runner is None:
        threads = set_threads(None)
        make_runner = _cpu_runner(BUNDLED_DIRECTORY)
    runs: dict[str, list[Figures]] = {arm.name: [] for arm in ARMS}
    for seed in range(repetitions):
        for arm in ARMS:
            runs[arm.name].append(_run(arm, seed, workload, make_runner))
            print(f"seed {seed}, {arm.name}: {json.dumps(runs[arm.name][-1])}", file=sys.stderr, flush=True)
    modes = {
        name: {figure: statistics.median(run[figure] for run in of_mode) for figure in of_mode[0]}
        for name, of_mode in runs.items()
    }
    return {
        "threads": threads,
        "repetitions": repetitions,
        "load_average": os.getloadavg()[0],
        "workload": {name: getattr(workload, name) for name in workload.__struct_fields__},
        "modes": modes,
        "ratios": _ratios(modes),
        "expected": EXPECTED,
    }


def _cpu_runner(model_dir: Path) -> MakeRunner:
    def make(config: EngineConfig) -> Runner:
        runner = TorchRunner.load(model_dir, config)
        runner.warm_up()
        return runner

    return make


def gpu_runner(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> MakeRunner:
    """Runners with the same random weights. Those of padded and of other modes differ in their memory."""
    # Imported here: the CPU's benchmark works without triton.
    from inferry.engine.gpu.loading import build_runner
    from inferry.engine.gpu.weights import random_weights

    weights = random_weights(model, dtype, device)
    built: dict[EngineMode, Runner] = {}

    def make(config: EngineConfig) -> Runner:
        if config.mode not in built:
            built[config.mode] = build_runner(model, weights, config, device)
        return built[config.mode]

    return make


def _run(arm: Arm, seed: int, workload: Workload, make_runner: MakeRunner) -> Figures:
    config = EngineConfig(
        mode=arm.mode,
        max_sequences=workload.batch,
        kv_tokens=workload.kv_tokens,
        chunk_tokens=workload.chunk_tokens,
        block_tokens=workload.block_tokens,
        decode_wait_ms=workload.decode_wait_ms,
        prefix_cache=False,
    )
    core = EngineCore(make_runner(config), config)
    requests = _requests(seed, workload, workload.buckets if arm.has_buckets else ())
    started = time.perf_counter()
    latencies = _serve(core, requests, workload.concurrency if arm.is_queued else workload.batch)
    elapsed_s = time.perf_counter() - started
    stats = core.stats()
    output_tokens = sum(request.sampling.max_tokens for request in requests)
    return {
        "output_tokens_per_s": output_tokens / elapsed_s,
        "requests_per_s": len(requests) / elapsed_s,
        "latency_p50_ms": _percentile_ms(latencies.whole, 0.5),
        "latency_p99_ms": _percentile_ms(latencies.whole, 0.99),
        "ttft_p50_ms": _percentile_ms(latencies.first_token, 0.5),
        "ttft_p99_ms": _percentile_ms(latencies.first_token, 0.99),
        "itl_p50_ms": _percentile_ms(latencies.inter_token, 0.5),
        "itl_p99_ms": _percentile_ms(latencies.inter_token, 0.99),
        "itl_max_ms": max(latencies.inter_token) * 1000,
        "padding_of_prompts": stats.padding_tokens / (stats.padding_tokens + stats.prompt_tokens),
        "padding_of_decodes": stats.padding_rows / (stats.padding_rows + stats.decode_rows),
        "steps": float(stats.steps),
        "preemptions": float(stats.preemptions),
    }


def _requests(seed: int, workload: Workload, buckets: tuple[int, ...]) -> list[Request]:
    rng = random.Random(seed)
    low, high = workload.prompt_tokens
    requests: list[Request] = []
    for key in range(workload.jobs):
        prompt = round(exp(rng.uniform(log(low), log(high))))
        output = max(1, min(workload.max_output_tokens, round(rng.expovariate(1 / workload.mean_output_tokens))))
        ids = [rng.randrange(7, workload.vocabulary) for _ in range(prompt)]
        sampling = Sampling(temperature=0.0, max_tokens=output, ignore_eos=True)
        requests.append(Request(key, ids, sampling, Lane.P1, batch=bisect_left(buckets, prompt)))
    return requests


def _serve(core: EngineCore, requests: list[Request], concurrency: int) -> Latencies:
    """Send a request for each that ends, until all have ended."""
    waiting = iter(requests)
    sent_at: dict[int, float] = {}
    last_at: dict[int, float] = {}
    latencies = Latencies([], [], [])

    def send(now: float) -> None:
        request = next(waiting, None)
        if request is not None:
            sent_at[request.key] = now
            assert core.add(request) is None

    now = time.perf_counter()
    for _ in range(concurrency):
        send(now)
    while core.has_work:
        done = core.step()
        now = time.perf_counter()
        for key, _ in done.tokens:
            if key in last_at:
                latencies.inter_token.append(now - last_at[key])
            else:
                latencies.first_token.append(now - sent_at[key])
            last_at[key] = now
        for end in done.ends:
            latencies.whole.append(now - sent_at[end.account.key])
            send(now)
    return latencies


def _percentile_ms(seconds: list[float], part: float) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1000


def _ratios(modes: dict[str, Figures]) -> dict[str, float]:
    """Throughput of one mode by another's, and latencies of `hybrid` by those of `continuous`."""

    def ratio(figure: str, one: str, other: str) -> float:
        return modes[one][figure] / modes[other][figure]

    throughput = "output_tokens_per_s"
    return {
        "dynamic_by_static": ratio(throughput, "dynamic", "static"),
        "continuous_by_static": ratio(throughput, "continuous", "static"),
        "continuous_by_dynamic": ratio(throughput, "continuous", "dynamic"),
        "hybrid_by_continuous": ratio(throughput, "hybrid", "continuous"),
        "hybrid_itl_p99_by_continuous": ratio("itl_p99_ms", "hybrid", "continuous"),
        "hybrid_itl_p99_by_continuous, no call waits": ratio("itl_p99_ms", ARMS[-1].name, ARMS[-2].name),
    }


def report(measured: dict[str, object]) -> Table:
    """The figures as a table: a row for each mode."""
    modes = measured["modes"]
    assert isinstance(modes, dict)
    figures = list(next(iter(modes.values())))
    table = Table("mode", *(figure.replace("_", " ") for figure in figures), title="modes of the embedded engine")
    for name, values in modes.items():
        table.add_row(name, *(f"{values[figure]:,.2f}" for figure in figures))
    return table


def measure_gpu(repetitions: int, workload: Workload) -> dict[str, object]:
    """The same on a GPU, in one process: one set of weights, and each mode's graphs captured before it is measured."""
    from benchmarks.engine_gpu import llama_8b

    model = llama_8b()
    make_runner = gpu_runner(model, torch.device("cuda"), torch.bfloat16)
    for arm in ARMS:  # the first run of a mode compiles and captures
        _run(arm, 99, replace(workload, jobs=workload.batch, max_output_tokens=4), make_runner)
    return {"gpu": torch.cuda.get_device_name(), **measure(repetitions, workload, make_runner)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--jobs", type=int, default=Workload().jobs)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    if arguments.gpu:
        workload = Workload(jobs=arguments.jobs, prompt_tokens=(32, 1_024), buckets=(128, 384), vocabulary=128_000)
        measured = measure_gpu(arguments.repetitions or 1, workload)
    else:
        measured = measure(arguments.repetitions or 3, Workload(jobs=arguments.jobs))
    Console(width=250).print(report(measured))
    print(json.dumps(measured["ratios"], indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
