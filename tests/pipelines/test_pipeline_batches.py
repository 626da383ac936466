"""How the calls of stages meet at the scheduler: equal stages of several runs, and queues of other models."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inferry.domain.lanes import Lane
from inferry.domain.workers import Capacity
from support.pooling_worker import PoolingWorker
from support.scripted_worker import ScriptedWorker
from support.serving import Serving, post
from support.waiting import until

PIPELINE = {
    "inputs": {"texts": {"type": "list[text]"}},
    "stages": {"vectors": {"kind": "embed", "model": "m", "input": "{{ input.texts }}"}},
}
# No job leaves the queue because it has waited too long.
LANES = {"P1": {"window": "adaptive", "coalesce_ms": 600_000, "max_wait_ms": 900_000}}


@contextmanager
def a_gateway(directory: Path, *workers: ScriptedWorker) -> Iterator[Serving]:
    with Serving(directory, lambda: (workers, {}), {"lanes": LANES, "pipelines": {"vectors": PIPELINE}}) as gateway:
        yield gateway


def run(gateway: Serving, texts: list[str], run_id: str) -> Any:
    answer = post(gateway.url, "/v1/pipelines/vectors", {"input": {"texts": texts}}, {"x-inferry-run-id": run_id})
    assert answer[0] == 200, answer
    return answer[2]["output"]


def test_equal_stages_of_several_runs_are_one_plan(tmp_path: Path) -> None:
    worker = PoolingWorker()
    with a_gateway(tmp_path, worker) as gateway, ThreadPoolExecutor(3) as clients:
        worker.gate.clear()
        first = clients.submit(run, gateway, ["a"], "first")
        until(lambda: worker.running == 1)
        others = [clients.submit(run, gateway, ["b", name], name) for name in ("second", "third")]
        until(lambda: gateway.service.gateway.queue_depths()[Lane.P1] == 2)
        gateway.run(open_gate(worker))
        assert first.result() == [[1.0, 0.0]]
        assert [one.result() for one in others] == [[[1.0, 0.0], [1.0, 0.0]]] * 2
    assert [sorted(job.run_id for job in plan.jobs) for plan in worker.plans] == [["first"], ["second", "third"]]


def test_a_queue_for_another_model_does_not_keep_a_stage_from_idle_workers(tmp_path: Path) -> None:
    idle = [PoolingWorker(name) for name in ("a", "b")]
    busy = ScriptedWorker("busy", models=("other",), capacity=Capacity(sequences=1))
    chat = {"model": "other", "messages": [{"role": "user", "content": "Hello?"}]}
    with a_gateway(tmp_path, *idle, busy) as gateway, ThreadPoolExecutor(2) as clients:
        busy.gate.clear()
        calls = [clients.submit(post, gateway.url, "/v1/chat/completions", chat) for _ in range(2)]
        until(lambda: gateway.service.gateway.queue_depths()[Lane.P1] == 1)
        assert run(gateway, ["x", "y"], "run") == [[1.0, 0.0], [1.0, 0.0]]
        gateway.run(open_gate(busy))
        assert [call.result()[0] for call in calls] == [200, 200]
    assert [[len(plan.jobs) for plan in worker.plans] for worker in idle] == [[1], [1]]


async def open_gate(worker: ScriptedWorker) -> None:
    worker.gate.set()
    await asyncio.sleep(0)
