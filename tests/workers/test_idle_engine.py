"""An engine process that freezes while it is idle."""

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from inferry.domain.workers import Phase
from inferry.engine.config import EngineConfig
from inferry.engine.messages import setup
from inferry.workers.in_process import engine_supervisor
from inferry.workers.in_process.engine_link import EngineLink, EngineProgram
from inferry.workers.in_process.engine_worker import EngineLimits, EngineWorker
from support.waiting import async_until

IDLER = """
import contextlib, socket, sys, time
from inferry.engine.messages import Heartbeat, Ready, frame
sock = socket.socket(fileno=int(sys.argv[1]))
with contextlib.suppress(ConnectionError):
    sock.sendall(frame(Ready(100, 1000, 16, 50, [], 1)))
    while True:
        sock.sendall(frame(Heartbeat()))
        time.sleep(0.02)
"""


class Silent:
    matched: str | None = None

    def push(self, token_ids: object) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


def test_an_idle_engine_that_freezes_is_down_then_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_supervisor, "CHECK_INTERVAL_S", 0.2)
    source = str(Path(engine_supervisor.__file__).parents[3])
    worker_environment = {**os.environ, "PYTHONPATH": source}
    command = (sys.executable, "-c", IDLER)

    async def scenario() -> None:
        worker = EngineWorker(
            "idler",
            open_link=partial(
                EngineLink.open, EngineProgram(command, worker_environment, setup(Path("nowhere"), EngineConfig()))
            ),
            limits=EngineLimits(sequences=4, kv_tokens=1000, prefill_tokens=100, chunk_tokens=100),
            models=["m"],
            make_assembler=lambda stop: Silent(),
            restart_backoff_s=0.01,
        )
        await worker.start()
        try:
            ready_at = worker.view().last_activity_at
            assert ready_at is not None
            await async_until(lambda: (worker.view().last_activity_at or 0.0) > ready_at)  # it beats
            first = worker.pid
            assert first is not None
            assert worker.view().phase is Phase.READY
            os.kill(first, signal.SIGSTOP)
            await async_until(lambda: worker.view().phase is Phase.DOWN)
            assert worker.pid == first, "it may be heard again"
            await async_until(lambda: worker.pid not in (None, first) and worker.view().phase is Phase.READY)
        finally:
            await worker.close()

    asyncio.run(asyncio.wait_for(scenario(), 100))
