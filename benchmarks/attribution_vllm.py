"""GPU-seconds of jobs of a real vLLM on the CPU: estimated from outside, against what its engine spent.

`VLLM_VENV=.venv-vllm PYTHONPATH=src:tests python -m benchmarks.attribution_vllm [ROUNDS]` writes
benchmarks/results/attribution-vllm.json. It needs a quiet machine: `late` is the part of a round for which the
gateway's event loop was not run although it was due.

- `in process`, against the measurement of every step: `runs` the largest relative difference between shares of a run,
  `jobs` the 95th percentile over jobs, `total` that of the sums.
- `over http`, against the time for which the engine had requests, by its own clock: `cost` the difference of what a
  price per GPU-hour charges.
- `unattributed`: part of wall time times GPUs in which the engine had work that no job was charged for.

Every round fails if the ledger's tokens are not those that clients received.
"""

import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.result_files import save
from support.contract_model import ensure_contract_model
from support.vllm_gpu_seconds import (
    TimedServer,
    play_in_process,
    play_over_http,
    served,
    worker_in_process,
    worker_over_http,
)
from support.vllm_server import ENVIRONMENT

ROUNDS = 5
COMMAND = "VLLM_VENV=.venv-vllm PYTHONPATH=src:tests python -m benchmarks.attribution_vllm"


async def in_process(model: Path, rounds: int) -> dict[str, Any]:
    worker = worker_in_process(model)
    async with served(worker) as serving:
        found = [await _shown(play_in_process(serving, worker, number)) for number in range(rounds)]
    return _summary(found, serving.unattributed)


async def over_http(model: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    with TimedServer(model, scratch / "vllm.log") as server:
        async with served(worker_over_http(server)) as serving:
            found = [await _shown(play_over_http(serving, server, number)) for number in range(rounds)]
    return _summary(found, serving.unattributed)


async def _shown(playing: Any) -> Any:
    found = await playing
    print(found, flush=True)
    return found


def _summary(rounds: Sequence[NamedTuple], unattributed: float) -> dict[str, Any]:
    values = [one._asdict() for one in rounds]
    medians = {key: round(statistics.median(one[key] for one in values), 4) for key in values[0]}
    listed = [{key: round(value, 4) for key, value in one.items()} for one in values]
    return {"median": medians, "unattributed": round(unattributed, 4), "rounds": listed}


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        model = ensure_contract_model(scratch / "model")
        return {
            "in process": asyncio.run(in_process(model, rounds)),
            "over http": asyncio.run(over_http(model, scratch, rounds)),
        }


if __name__ == "__main__":
    result = measure(*map(int, sys.argv[1:2]))
    print(f"written to {save('attribution_vllm', result, command=COMMAND)}")
