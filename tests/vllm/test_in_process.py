"""vLLM in process, as a gateway's worker from its configuration, beside the embedded engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.gateway_process import Answer, GatewayProcess, Request, StreamReaders, children, kill
from support.vllm_server import BLOCKS_PER_CEILING, CONTEXT, ENVIRONMENT, VllmServer, engine_cores, vllm_venv

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ASKS = [Request(number, tokens=400 + number, chat=number % 2 == 0) for number in range(12)]


@pytest.fixture(scope="module")
def gateway(
    model: Path, both: tuple[VllmServer, VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    for server in both:  # three at once would be a lot of memory
        server.stop()
    vllm = {
        "kind": "vllm-inprocess",
        "name": "vllm",
        "model": str(model),
        "models": ["m"],
        "python": str(vllm_venv() / "bin" / "python"),
        "max_sequences": 16,
        "capacity": "fixed",
        "context_tokens": CONTEXT,
        "engine_args": {"dtype": "float32", "enforce_eager": True, "num_gpu_blocks_override": BLOCKS_PER_CEILING},
    }
    embedded: dict[str, Any] = {"kind": "embedded", "name": "embedded", "model": str(model), "models": ["m", "alone"]}
    embedded |= {"max_sequences": 4, "capacity": "fixed"}  # so that most have to go to vLLM
    patch = pytest.MonkeyPatch()
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    with GatewayProcess(tmp_path_factory.mktemp("in-process"), {"workers": [vllm, embedded]}) as process:
        yield process
    patch.undo()


async def read(gateway: GatewayProcess, model: str, meanwhile: Any = None) -> list[Answer]:
    async with StreamReaders(gateway.url, model) as readers:
        return await readers.read_all(ASKS, None if meanwhile is None else meanwhile(readers))


def jobs_at(gateway: GatewayProcess, worker: str) -> float:
    running = gateway.metric_by_label("inferry_worker_running_sequences")
    return next(count for labels, count in running.items() if f'worker="{worker}"' in labels)


def visible(answers: list[Answer]) -> list[tuple[str, str | None, int | None]]:
    return [answer.visible for answer in answers]


def test_two_engines_with_one_model_give_the_same_output(gateway: GatewayProcess) -> None:
    mixed = asyncio.run(asyncio.wait_for(read(gateway, "m"), 300))
    assert visible(mixed) == visible(asyncio.run(asyncio.wait_for(read(gateway, "alone"), 300)))
    assert [answer.output_tokens for answer in mixed] == [ask.tokens for ask in ASKS]


def test_jobs_of_a_killed_vllm_resume_on_the_embedded_engine(gateway: GatewayProcess) -> None:
    expected = visible(asyncio.run(asyncio.wait_for(read(gateway, "alone"), 300)))
    before = gateway.metric("inferry_attempt_retries_total")

    async def kill_vllm(readers: StreamReaders) -> None:
        while await asyncio.to_thread(jobs_at, gateway, "vllm") < 2:
            await asyncio.sleep(0.01)
        cores = [core for child in children(gateway.pid) for core in engine_cores(child)]
        assert cores
        kill(cores)

    for _ in range(3):
        answers = asyncio.run(asyncio.wait_for(read(gateway, "m", kill_vllm), 300))
        assert visible(answers) == expected
        gateway.until(lambda: gateway.metric("inferry_worker_up") == 2, 300)
        if gateway.metric("inferry_attempt_retries_total") > before:
            break  # else its jobs had ended before it was killed
    assert gateway.metric("inferry_attempt_retries_total") > before
    gateway.until(gateway.is_empty, 30)
