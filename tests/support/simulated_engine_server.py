"""A server with a simulated engine of known costs, in the time of its event loop."""

import asyncio
import concurrent.futures
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from inferry.sim.costs import CostModel, EngineFlags
from inferry.sim.engine import Engine
from inferry.sim.sequence import EngineSequence, FirstTokenEvent
from support.upstream import DONE, begin, chunk, usage
from support.virtual_net import loops_with

CONTEXT = 1024
Script = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RealTimeEngine:
    """The script of an `EngineServer`: tokens leave when the model says. It begins anew on every loop it serves on."""

    def __init__(self, costs: CostModel, flags: EngineFlags) -> None:
        self._costs = costs
        self._flags = flags
        self._loop: asyncio.AbstractEventLoop | None = None

    def _begin(self) -> None:
        self._engine = Engine(self._costs, self._flags, fast_forward=False)
        self._began: float | None = None
        self._streams: dict[EngineSequence, asyncio.Queue[bool]] = {}
        self._waiting: dict[EngineSequence, asyncio.Queue[bool]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._begin()
        prompt, output, chat = body.get("prompt", [0]), body["max_tokens"], "messages" in body
        await asyncio.sleep(self._engine.receive(len(prompt), self._now()) - self._now())
        block = self._flags.block_tokens
        blocks = tuple(hash(tuple(prompt[: end * block])) for end in range(1, len(prompt) // block + 1))
        sequence = EngineSequence("", len(prompt), output, blocks=blocks)
        tokens = self._waiting[sequence] = asyncio.Queue()
        self._engine.submit(sequence, self._now())
        self._schedule_step()
        response = await begin(request)
        is_last = False
        while not is_last:
            is_last = await tokens.get()
            await response.write(chunk("x", "length" if is_last else None, chat=chat))
        await response.write(usage(len(prompt), output) + DONE)
        await response.write_eof()
        return response

    def _now(self) -> float:
        time = asyncio.get_running_loop().time()
        if self._began is None:
            self._began = time
        return time - self._began

    def _schedule_step(self) -> None:
        if self._timer is None and self._engine.next_at is not None:
            assert self._began is not None
            self._timer = asyncio.get_running_loop().call_at(self._began + self._engine.next_at, self._step)

    def _step(self) -> None:
        """The model's own time counts, so that a late timer delays a token and not all that follow."""
        self._timer = None
        now = self._engine.next_at
        assert now is not None
        events = self._engine.advance(now)
        ended = {one.sequence for one in events if not isinstance(one, FirstTokenEvent)}
        for one in events:
            if isinstance(one, FirstTokenEvent):
                self._streams[one.sequence] = self._waiting.pop(one.sequence)
        begin_at = now + self._engine.server.delay_s(now) + self._costs.reply_s
        for place, (sequence, tokens) in enumerate(list(self._streams.items())):
            is_last = sequence in ended
            assert self._began is not None
            at = self._began + begin_at + (place + 0.5) * self._costs.token_s
            asyncio.get_running_loop().call_at(at, tokens.put_nowait, is_last)
            if is_last:
                del self._streams[sequence]
        self._schedule_step()


class EngineServer:
    """An OpenAI-compatible server on a thread of its own: `with EngineServer(script) as server:`.

    It asks for a key if it has one, and tells its version and its metrics if it has any.
    """

    def __init__(
        self, script: Script, *, models: tuple[str, ...] = ("m",), metrics: str = "", version: str = "", key: str = ""
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.url = ""
        self._script = script
        self._models, self._metrics, self._version, self._key = models, metrics, version, key
        self._started: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def __enter__(self) -> Self:
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._started.result(timeout=120)}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        self._thread.join(timeout=120)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        runner = await self._set_up()
        try:
            sock = socket.create_server(("127.0.0.1", 0))
            await web.SockSite(runner, sock).start()
            self._started.set_result(sock.getsockname()[1])
            await self._stop.wait()
        finally:
            await runner.cleanup()

    async def _set_up(self) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._check_key])
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        if self._version:
            app.router.add_get("/version", self._send_version)
        if self._metrics:
            app.router.add_get("/metrics", self._send_metrics)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        return runner

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
            return web.json_response({"error": "who are you?"}, status=401)
        return await handler(request)

    async def _list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": model, "max_model_len": CONTEXT} for model in self._models]})

    async def _send_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._version})

    async def _send_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self._metrics)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        return await self._script(request, body)


class VirtualEngineServer(EngineServer):
    """The same server on the loop of the command under test, in virtual time; `took` is how long each loop ran for.

    For one command at a time: every command makes a loop of its own, and the server begins anew on it.
    """

    PORT = 8000

    def __init__(self, script: Script, **more: Any) -> None:
        super().__init__(script, **more)
        self._patches = ExitStack()
        self.took: list[float] = []

    def __enter__(self) -> Self:
        self.url = f"http://127.0.0.1:{self.PORT}"
        self.took = self._patches.enter_context(loops_with(self._start))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._patches.close()

    async def _start(self) -> Callable[[], Awaitable[None]]:
        runner = await self._set_up()
        await web.TCPSite(runner, "127.0.0.1", self.PORT).start()
        return runner.cleanup
