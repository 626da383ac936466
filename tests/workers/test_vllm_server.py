"""Aborts of in-process vLLM, with an engine that behaves like vLLM's `AsyncLLM`."""

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from inferry.domain.sampling import Sampling
from inferry.engine.messages import Abort, Aborted, Add, Frames, Request, decode_from_engine
from inferry.workers.in_process.vllm_limits import VllmLimits
from inferry.workers.in_process.vllm_metering import StepMeter
from inferry.workers.in_process.vllm_server import VllmServer


class EngineDeadError(Exception):
    pass


class FakeAsyncLLM:
    """Adds a request once `admit` is set, ignores aborts of requests that it has not added, and counts aborts."""

    def __init__(self) -> None:
        self.admit = asyncio.Event()
        self.adding = asyncio.Event()
        self.outputs: dict[str, asyncio.Queue[Any]] = {}
        self.aborts: list[list[str]] = []

    async def add_request(self, request_id: str, prompt: Any, params: Any, *, priority: int) -> asyncio.Queue[Any]:
        self.adding.set()
        await self.admit.wait()
        return self.outputs.setdefault(request_id, asyncio.Queue())

    async def abort(self, request_ids: list[str]) -> None:
        self.aborts.append(request_ids)
        end = SimpleNamespace(token_ids=[], finish_reason="abort")
        for request_id in request_ids:
            if request_id in self.outputs:
                self.outputs[request_id].put_nowait(SimpleNamespace(outputs=[end], finished=True))

    async def is_paused(self) -> bool:
        return False


class FakeTransport:
    def __init__(self) -> None:
        self.frames = Frames()
        self.messages: list[object] = []
        self.aborted = asyncio.Event()

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        for body in self.frames.feed(data):
            message = decode_from_engine(body)
            self.messages.append(message)
            if isinstance(message, Aborted):
                self.aborted.set()


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one module of vLLM that the server imports."""
    exceptions = ModuleType("vllm.v1.engine.exceptions")
    exceptions.EngineDeadError = EngineDeadError  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", exceptions)


def a_server(engine: FakeAsyncLLM, transport: FakeTransport) -> VllmServer:
    limits = SimpleNamespace(blocks=8, block_tokens=16, rejection=lambda _: None, sampling=lambda _: None)
    return VllmServer(
        engine,
        cast(asyncio.WriteTransport, transport),
        StepMeter(),
        cast(VllmLimits, limits),
        asyncio.get_running_loop().time,
    )


@pytest.mark.anyio
async def test_an_abort_of_a_request_that_is_still_being_added_is_sent_once_after_it() -> None:
    engine, transport = FakeAsyncLLM(), FakeTransport()
    server = a_server(engine, transport)
    server.handle(Add([Request(7, [1, 2, 3], Sampling(max_tokens=4), lane=0)]))
    server.handle(Abort(1, [7]))
    await asyncio.wait_for(engine.adding.wait(), 10)
    assert not engine.aborts
    engine.admit.set()
    await asyncio.wait_for(transport.aborted.wait(), 10)
    assert engine.aborts == [["7"]]
    (aborted,) = [message for message in transport.messages if isinstance(message, Aborted)]
    assert [account.key for account in aborted.freed] == [7]


@pytest.mark.anyio
async def test_an_abort_of_an_unknown_request_is_answered_without_an_abort_at_the_engine() -> None:
    engine, transport = FakeAsyncLLM(), FakeTransport()
    a_server(engine, transport).handle(Abort(1, [7]))
    await asyncio.wait_for(transport.aborted.wait(), 10)
    assert not engine.aborts
