"""Far more sequences than the KV cache holds: `python -m benchmarks.engine_gpu_pressure` on a host with CUDA.

500 sequences at once, in a KV cache for 50 of mean length, in each mode. All must end with all their tokens, and no
block may be left. A quarter of the layers of Llama 3.1 8B, random weights.
"""

import dataclasses
import json
import random
import time
from typing import Final

import torch

from inferry.domain.lanes import Lane
from inferry.domain.sampling import Sampling
from inferry.domain.workers import EngineMode
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.model import ModelConfig

MODES: Final[tuple[EngineMode, ...]] = ("continuous", "hybrid", "dynamic", "static")
SEQUENCES: Final = 500
FITTING: Final = 50
MAX_IDLE_STEPS: Final = 1_000
"""Steps without a token after which the engine counts as stuck: the longest prompt takes fewer."""
_LAYERS: Final = 8


def some_requests(count: int, vocabulary: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Request]:
    """Requests of all lanes, with uniform lengths of prompts and outputs between these bounds."""
    rng = random.Random(5)
    return [
        Request(
            key,
            [rng.randrange(1, vocabulary) for _ in range(rng.randint(*prompt))],
            Sampling(temperature=0.0, max_tokens=rng.randint(*output), ignore_eos=True),
            rng.choice(list(Lane)),
        )
        for key in range(count)
    ]


def pressed(
    mode: EngineMode, requests: list[Request], fitting: int, chunk_tokens: int, block_tokens: int
) -> EngineConfig:
    """The engine's limits, with a KV cache for `fitting` requests of mean length and four times as many slots."""
    tokens = sum(len(request.prompt_ids) + request.sampling.max_tokens for request in requests)
    return EngineConfig(
        mode=mode,
        max_sequences=4 * fitting,
        kv_tokens=fitting * tokens // len(requests),
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        prefix_cache=False,
    )


def finish(core: EngineCore, requests: list[Request]) -> dict[int, list[int]]:
    """Add all requests and step until all have ended; their tokens. Raises if one is lost or the engine is stuck."""
    outputs: dict[int, list[int]] = {request.key: [] for request in requests}
    ended: set[int] = set()
    for request in requests:
        assert core.add(request) is None
    idle_steps = 0
    while core.has_work:
        done = core.step()
        idle_steps = 0 if done.tokens else idle_steps + 1
        assert idle_steps < MAX_IDLE_STEPS, f"no token in {idle_steps} steps; {len(ended)} sequences have ended"
        for key, token in done.tokens:
            outputs[key].append(token)
        for end in done.ends:
            assert end.account.key not in ended, "a sequence ended twice"
            ended.add(end.account.key)
    assert ended == set(outputs), f"{len(outputs) - len(ended)} sequences have no end"
    assert all(len(outputs[request.key]) == request.sampling.max_tokens for request in requests)
    assert core.pool.free == core.pool.total, "blocks are left"
    return outputs


def run(model: ModelConfig, device: torch.device, requests: list[Request], fitting: int, dtype: torch.dtype) -> None:
    from inferry.engine.gpu.loading import build_runner
    from inferry.engine.gpu.weights import random_weights

    weights = random_weights(model, dtype, device)
    for mode in MODES:
        config = pressed(mode, requests, fitting, chunk_tokens=2_048, block_tokens=32)
        core = EngineCore(build_runner(model, weights, config, device), config)
        started = time.perf_counter()
        finish(core, requests)
        stats = core.stats()
        figures = {"sequences": len(requests), "kv_tokens": config.kv_tokens, "seconds": time.perf_counter() - started}
        figures |= {"steps": stats.steps, "preemptions": stats.preemptions}
        print(json.dumps({"mode": mode, **figures}), flush=True)
        assert stats.preemptions, "the KV cache was never full"
        del core
        torch.cuda.empty_cache()


def main() -> int:
    from benchmarks.engine_gpu import llama_8b

    model = dataclasses.replace(llama_8b(), layers=_LAYERS)
    requests = some_requests(SEQUENCES, model.vocab_size, (16, 128), (64, 512))
    run(model, torch.device("cuda"), requests, FITTING, torch.bfloat16)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
