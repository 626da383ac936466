"""Requests that the gateway makes to its own endpoints."""

import asyncio

import pytest

from inferry.domain.callers import ANONYMOUS
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.internal_call import Answer, call

HEADERS = b"content-type: application/json\r\n"


async def _call(serve: "Server") -> Answer:
    return await call(serve, b"/v1/chat/completions", b"{}", {b"x-inferry-lane": b"P2"}, ANONYMOUS)


class Server:
    """Keeps the reply, which a test writes."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.requests: list[Request] = []
        self.cancelled = 0

    def __call__(self, request: Request, reply: Reply) -> None:
        self.requests.append(request)
        self.replies.append(reply)
        reply.on_disconnect = self._cancel

    def _cancel(self) -> None:
        self.cancelled += 1


def test_the_answer_is_what_a_client_would_receive() -> None:
    async def scenario() -> Answer:
        server = Server()
        task = asyncio.create_task(_call(server))
        await asyncio.sleep(0)
        request = server.requests[0]
        assert (request.caller, request.is_internal, request.body) == (ANONYMOUS, True, b"{}")
        server.replies[0].respond(429, HEADERS, b"no")
        return await task

    assert asyncio.run(scenario()) == Answer(429, HEADERS, b"no")


def test_a_streamed_answer_is_joined() -> None:
    async def scenario() -> Answer:
        server = Server()
        task = asyncio.create_task(_call(server))
        await asyncio.sleep(0)
        reply = server.replies[0]
        reply.begin(HEADERS)
        reply.write(b"one ")
        reply.end(b"two")
        return await task

    assert asyncio.run(scenario()) == Answer(200, HEADERS, b"one two")


def test_cancelling_the_task_cancels_the_call_once() -> None:
    async def scenario() -> int:
        server = Server()
        task = asyncio.create_task(_call(server))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.replies[0].respond(200, HEADERS, b"late")
        return server.cancelled

    assert asyncio.run(scenario()) == 1


def test_a_reset_is_an_error_and_no_cancellation() -> None:
    async def scenario() -> None:
        server = Server()
        task = asyncio.create_task(_call(server))
        await asyncio.sleep(0)
        server.replies[0].abort()
        with pytest.raises(ConnectionAbortedError):
            await task

    asyncio.run(scenario())
