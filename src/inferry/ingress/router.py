"""A group of endpoints below one prefix of `/v1/`, with what they share: answering later, and the shape of errors."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError
from inferry.ingress.http.body_sink import BodySink
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.wire_format import OPENAI, WireFormat

Refuse = Callable[[GatewayError, Request, Reply], None]
Fail = Callable[[Request, Reply], None]

JSON = b"content-type: application/json\r\n"


class Router:
    """Serves the requests of one prefix. Belongs to one event loop. `paths` is what `GET /` lists."""

    prefix: str
    paths: tuple[str, ...]
    format: WireFormat = OPENAI

    def __init__(self, refuse: Refuse, fail: Fail) -> None:
        self._refuse = refuse
        self._fail = fail
        self._tasks: set[asyncio.Task[None]] = set()

    def owns(self, path: str) -> bool:
        return path == self.prefix or path.startswith(f"{self.prefix}/")

    def serve(self, path: str, query: str, request: Request, reply: Reply, caller: Caller) -> None:
        """Answer the request, at once or later, or raise a GatewayError. `path` is percent-encoded."""
        raise NotImplementedError

    def format_of(self, request: Request) -> WireFormat:
        """The format of errors."""
        return self.format

    def body_sink(self, request: Request, caller: Caller) -> BodySink | None:
        """Where the request's body goes while it arrives; None: it is kept. Raises GatewayError."""
        return None

    def respond_later(self, work: Coroutine[None, None, Any], request: Request, reply: Reply) -> None:
        """Answer with the JSON value that the work returns; None: the work has answered itself."""
        task = asyncio.get_running_loop().create_task(self._answer(work, request, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what is left and wait for it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, work: Coroutine[None, None, Any], request: Request, reply: Reply) -> None:
        try:
            value = await work
            if value is not None:
                reply.respond(200, JSON, msgspec.json.encode(value))
        except GatewayError as error:
            self._refuse(error, request, reply)
        except Exception:
            self._fail(request, reply)
