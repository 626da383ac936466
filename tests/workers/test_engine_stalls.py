"""An engine process that does not respond: a frozen one is detected soon, a slow one is given time."""

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from inferry.domain.errors import WorkerLost
from inferry.domain.streams import Failed, Item
from inferry.engine.config import EngineConfig
from inferry.engine.messages import setup
from inferry.workers.in_process import engine_supervisor
from inferry.workers.in_process.engine_link import EngineLink, EngineProgram
from inferry.workers.in_process.engine_supervisor import MISSED_CHECKS
from inferry.workers.in_process.engine_worker import EngineLimits, EngineWorker
from support.children import environment
from support.engine_fixtures import a_job, a_plan

LOOK_S = 0.2
IDLER = """
import contextlib, socket, sys, time
from inferry.engine.messages import Heartbeat, Ready, frame
sock = socket.socket(fileno=int(sys.argv[1]))
with contextlib.suppress(ConnectionError):
    sock.sendall(frame(Ready(100, 1000, 16, 50, [], 1)))
    while True:
        sock.sendall(frame(Heartbeat()))
        time.sleep(0.05)
"""
"""An engine that says that it runs, takes jobs, and never computes a step."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_supervisor, "CHECK_INTERVAL_S", LOOK_S)


def a_worker(stall_timeout_s: float) -> EngineWorker:
    return EngineWorker(
        "idler",
        open_link=partial(EngineLink.open, EngineProgram((sys.executable, "-c", IDLER), environment(),
                                                         setup(Path("nowhere"), EngineConfig()))),
        limits=EngineLimits(sequences=4, kv_tokens=1000, prefill_tokens=100, chunk_tokens=100),
        models=["m"],
        make_assembler=lambda stop: Silent(),
        stall_timeout_s=stall_timeout_s,
    )  # fmt: skip


class Silent:
    """Text of an engine that writes none."""

    matched: str | None = None

    def push(self, token_ids: object) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


async def loses(worker: EngineWorker, after_looks: int, *, freeze: bool) -> str:
    """The reason why a job was lost, if it was still pending after this many checks."""
    await worker.start()
    try:
        items: list[Item] = []
        running = asyncio.create_task(worker.run(a_plan(a_job("j", [1, 2, 3])), items.append))
        await asyncio.wait([running], timeout=after_looks * LOOK_S)
        assert not items, "an engine that runs was not given the time it has"
        if freeze:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGSTOP)
        await running
        (end,) = items
        assert isinstance(end, Failed)
        assert isinstance(end.error, WorkerLost)
        return end.error.message
    finally:
        await worker.close()


def test_a_frozen_engine_is_detected_before_the_stall_timeout() -> None:
    why = asyncio.run(asyncio.wait_for(loses(a_worker(stall_timeout_s=600), 2 * MISSED_CHECKS, freeze=True), 120))
    assert "sent no heartbeat" in why


def test_an_engine_without_progress_is_restarted() -> None:
    why = asyncio.run(asyncio.wait_for(loses(a_worker(stall_timeout_s=8 * LOOK_S), 4, freeze=False), 120))
    assert "made no progress" in why
