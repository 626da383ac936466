"""A gateway over real sockets, for tests that are about what a client sees.

It runs on a thread with its own event loop, so that the test can use blocking clients.
"""

import asyncio
import concurrent.futures
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import uvloop

from inferry.cli import wiring
from inferry.cli.config.loader import parse
from inferry.cli.config.schema import Config
from inferry.cli.listening import bind
from inferry.domain.clock import SystemClock
from inferry.domain.ports import Tokenizer, Worker
from inferry.ingress.http import lifecycle

T = TypeVar("T")
MakeWorkers = Callable[[], tuple[Sequence[Worker], dict[str, Tokenizer]]]


class Serving:
    """`with Serving(tmp_path, make_workers) as gateway:` gives a URL to call and the service behind it."""

    def __init__(
        self, directory: Path, make_workers: MakeWorkers | None = None, config: Any = None, *, port: int = 0
    ) -> None:
        raw = {"ledger": f"sqlite:///{directory / 'ledger.db'}", **(config or {})}
        self.config: Config = parse(raw)
        self._make_workers = make_workers
        self._sock = bind("127.0.0.1", port, 1).sockets[0]
        self._started: concurrent.futures.Future[wiring.Service] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._stop: lifecycle.StopSignals
        self.service: wiring.Service

    @property
    def port(self) -> int:
        port: int = self._sock.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> Self:
        self._thread.start()
        self.service = self._started.result(timeout=120)
        self.run(self._until_ready())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        self.join()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the gateway's own loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=120)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.request)

    def join(self) -> None:
        self._thread.join(timeout=120)
        assert not self._thread.is_alive(), "the gateway did not stop"

    async def _until_ready(self) -> None:
        async with asyncio.timeout(120):
            while not self.service.gateway.is_ready:
                await asyncio.sleep(0.01)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())
        self._sock.close()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = lifecycle.StopSignals()
        try:
            if self._make_workers is None:
                service = wiring.build(self.config)
            else:
                workers, tokenizers = self._make_workers()
                service = wiring.assemble(self.config, workers, tokenizers, SystemClock())
            service.start()
        except BaseException as error:
            self._started.set_exception(error)
            raise
        self._started.set_result(service)
        try:
            await lifecycle.serve(
                service.app,
                service.gateway,
                self._sock,
                self._stop,
                idle_timeout_s=self.config.server.idle_timeout_s,
                drain_timeout_s=self.config.server.drain_timeout_s,
            )
        finally:
            await service.close()


def post(url: str, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], Any]:
    """One call with the plainest of clients: status, headers, decoded body."""
    import http.client

    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=120)
    try:
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        connection.request("POST", path, raw, {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        data = response.read()
        return response.status, dict(response.getheaders()), _decoded(data)
    finally:
        connection.close()


def get(url: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], Any]:
    import http.client

    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        data = response.read()
        return response.status, dict(response.getheaders()), _decoded(data)
    finally:
        connection.close()


def free_port() -> int:
    """A port that was free a moment ago. For programs that cannot be told to choose one and say which."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def closed_port_url() -> Iterator[str]:
    """A URL that refuses connections: its port is taken, so that nobody else can begin to listen there."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data.decode(errors="replace")
