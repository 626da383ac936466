"""vLLM's own process: `AsyncLLM` at the other end of a socket pair, run by the Python of vLLM's virtual environment.

It speaks `engine.messages` like the embedded engine. It ends when it is told to, when the socket is closed, or when
vLLM's engine core is dead. Its import path holds vLLM's environment and the modules of Inferry that need only msgspec;
nothing of the gateway's environment.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from typing import Any

import msgspec
from msgspec import Struct

from inferry.engine.messages import Fatal, Frames, Heartbeat, Ready, decode_to_engine, frame
from inferry.workers.in_process.vllm_limits import VllmLimits
from inferry.workers.in_process.vllm_metering import StepMeter
from inferry.workers.in_process.vllm_server import VllmServer

logger = logging.getLogger(__name__)

BOOTSTRAP = """
import sys, types
package = types.ModuleType("inferry")
package.__path__ = [sys.argv[1]]
sys.modules["inferry"] = package
from inferry.workers.in_process.vllm_process import main
main(int(sys.argv[2]))
"""
"""For `python -c`, with the package's directory and the socket's descriptor. Makes the modules of Inferry importable,
and nothing else that is installed beside them.
"""

_HEARTBEAT_S = 0.25


class VllmSetup(Struct, frozen=True):
    """The first message to the process. `arguments` are those of vLLM's `AsyncEngineArgs`, by name."""

    arguments: dict[str, Any]


class _Peer(asyncio.Protocol):
    """The socket. The first message is the setup; later ones go to the server."""

    def __init__(self) -> None:
        self.setup: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.disconnected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.server: VllmServer | None = None
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            if not self.setup.done():
                self.setup.set_result(msgspec.msgpack.decode(body, type=VllmSetup))
            elif self.server is not None:
                self.server.handle(decode_to_engine(body))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.disconnected.done():
            self.disconnected.set_result(None)


def _build(arguments: dict[str, Any], meter: StepMeter, observers: list[VllmServer]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepLogger(StatLoggerBase):  # type: ignore[misc]
        """Forwards vLLM's statistics to the server. vLLM constructs it."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            for server in observers:
                server.observe(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    fixed = {"disable_log_stats": True, "enable_logging_iteration_details": True}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**{**arguments, **fixed}), stat_loggers=[StepLogger])


class StepClock:
    """When the latest outputs left vLLM's engine core, on the clock of the event loop. 0 before the first."""

    def __init__(self, engine_core: Any) -> None:
        self.ended_at = 0.0
        self._receive = engine_core.get_output_async
        engine_core.get_output_async = self._receive_timed

    async def _receive_timed(self) -> Any:
        outputs = await self._receive()
        self.ended_at = outputs.timestamp
        return outputs


async def _serve(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    transport, peer = await loop.create_unix_connection(_Peer, sock=sock)
    await asyncio.wait([peer.setup, peer.disconnected], return_when=asyncio.FIRST_COMPLETED)
    if not peer.setup.done():
        return
    meter, observers = StepMeter(), list[VllmServer]()
    try:
        engine = _build(peer.setup.result().arguments, meter, observers)
    except Exception as error:
        logger.exception("vLLM failed to start")
        transport.write(frame(Fatal(f"{type(error).__name__}: {error}")))
        transport.close()
        await asyncio.wait({peer.disconnected}, timeout=1)
        return
    try:
        limits = VllmLimits(engine.vllm_config)
        clock = StepClock(engine.engine_core)
        peer.server = server = VllmServer(engine, transport, meter, limits, lambda: clock.ended_at)
        observers.append(server)
        ready = Ready(
            limits.max_request_tokens, limits.kv_tokens, limits.block_tokens, limits.vocab_size, limits.eos_ids, 0
        )
        transport.write(frame(ready))
        while not (peer.disconnected.done() or server.finished.done()):
            await asyncio.wait(
                [peer.disconnected, server.finished], timeout=_HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if engine.errored:
                server.end("vLLM's engine core is dead")
            elif not transport.is_closing():
                transport.write(frame(Heartbeat()))
        reason = server.finished.result() if server.finished.done() else None
        if reason is not None and not transport.is_closing():
            transport.write(frame(Fatal(reason)))
            transport.close()
            await asyncio.wait({peer.disconnected}, timeout=1)
    finally:
        observers.clear()
        engine.shutdown()


def main(number: int) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    sys.argv = [sys.argv[0]]
    with socket.socket(fileno=number) as sock, contextlib.suppress(ConnectionError):
        asyncio.run(_serve(sock))
    # vLLM is shut down. Its handlers at interpreter exit fail in ways that do not matter any more.
    os._exit(0)
