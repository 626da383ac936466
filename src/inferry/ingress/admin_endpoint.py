"""Endpoints under `/admin/` that answer GET later. `Admin` has authorized the request."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from inferry.domain.errors import GatewayError, InvalidRequest
from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request

Refuse = Callable[[GatewayError, Request, Reply], None]
Fail = Callable[[Request, Reply], None]
_JSON = b"content-type: application/json\r\ncache-control: no-store\r\n"


class Text(NamedTuple):
    """An answer that is no JSON."""

    content_type: str
    body: str
    file_name: str


class AdminEndpoint:
    """Serves the paths that `route` knows. Belongs to one event loop."""

    def __init__(self, refuse: Refuse, fail: Fail) -> None:
        self._refuse = refuse
        self._fail = fail
        self._tasks: set[asyncio.Task[None]] = set()

    def route(self, path: str, query: dict[str, str]) -> Coroutine[None, None, Any] | None:
        """The work whose result answers the request, a `Text` or a JSON value; None for other paths. Raises
        GatewayError."""
        raise NotImplementedError

    def serve(self, path: str, request: Request, reply: Reply) -> bool:
        """Answer the request later and return True; return False for other paths. Raises GatewayError."""
        if request.method not in (b"GET", b"HEAD"):
            if not self.owns(path):
                return False
            raise WrongMethod(path, "GET, HEAD")
        _, _, query = request.target.partition(b"?")
        work = self.route(path, dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True)))
        if work is None:
            return False
        self.answer_later(work, request, reply)
        return True

    def answer_later(self, work: Coroutine[None, None, Any], request: Request, reply: Reply) -> None:
        """Answer with the result of the work."""
        task = asyncio.get_running_loop().create_task(self._answer(work, request, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def owns(self, path: str) -> bool:
        """Whether the path is one of these endpoints."""
        raise NotImplementedError

    def accepts_key(self, request: Request) -> bool:
        """Whether the request is for these endpoints and has a key of their own, which opens no other."""
        return False

    async def close(self) -> None:
        """Cancel what is left and wait for it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, work: Coroutine[None, None, Any], request: Request, reply: Reply) -> None:
        try:
            value = await work
            if isinstance(value, Text):
                named = f'content-disposition: attachment; filename="{value.file_name}"\r\n'
                head = f"content-type: {value.content_type}\r\ncache-control: no-store\r\n{named}"
                reply.respond(200, head.encode(), value.body.encode())
            else:
                reply.respond(200, _JSON, msgspec.json.encode(value))
        except GatewayError as error:
            self._refuse(error, request, reply)
        except Exception:
            self._fail(request, reply)


def check_names(query: dict[str, str], *names: str) -> None:
    """Raise InvalidRequest for an unknown query parameter."""
    if not query.keys() <= set(names):
        raise InvalidRequest(f"unknown query parameter; supported are {', '.join(names)}")


def read_number(query: dict[str, str], name: str, minimum: float, maximum: float) -> float | None:
    """A number in the query; None where it is missing. Raises InvalidRequest."""
    text = query.get(name)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not minimum <= number <= maximum:
        raise InvalidRequest(f"`{name}` must be a number between {minimum:g} and {maximum:g}", param=name)
    return number
