"""Requests that the gateway makes to its own endpoints: items of batches, async jobs, background responses."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from inferry.domain.callers import Caller
from inferry.ingress.http.reply import Reply, ReplyChannel
from inferry.ingress.http.request import Request


class Answer(NamedTuple):
    """What a client would have received."""

    status: int
    headers: bytes
    body: bytes


class InternalReply(Reply):
    """Collects a response instead of writing it to a connection."""

    __slots__ = ("_on_piece", "_pieces", "_stream_headers", "answer")

    def __init__(
        self, request: Request, answer: "asyncio.Future[Answer]", on_piece: Callable[[bytes], None] | None = None
    ) -> None:
        super().__init__(ReplyChannel(), request)
        self._on_piece = on_piece
        self.answer = answer
        self._stream_headers = b""
        self._pieces: list[bytes] = []

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result(Answer(status, headers, body))
        self.release()

    def begin(self, headers: bytes) -> None:
        self._stream_headers = headers

    def write(self, piece: bytes) -> None:
        self._pieces.append(piece)
        if self._on_piece is not None:
            self._on_piece(piece)

    def end(self, piece: bytes) -> None:
        if self._on_piece is not None:
            self._on_piece(piece)
        self.respond(200, self._stream_headers, b"".join(self._pieces) + piece)

    def abort(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectionAbortedError("the gateway reset the call"))
        self.release()

    def probe(self) -> bool:
        return True

    def disconnect(self) -> None:
        """End the call as if its client had disconnected."""
        self.is_disconnected = True
        on_disconnect = self.on_disconnect
        self.release()
        if on_disconnect is not None:
            on_disconnect()


async def call(
    serve: Callable[[Request, Reply], None],
    target: bytes,
    body: bytes,
    headers: dict[bytes, bytes],
    caller: Caller,
    on_piece: Callable[[bytes], None] | None = None,
) -> Answer:
    """POST the body to one of the gateway's endpoints as this caller. Cancelling the task cancels the call.

    `on_piece` is called with the pieces of a streamed response as they are written.
    """
    request = Request(b"POST", target, headers)
    request.body = body
    request.caller = caller
    request.is_internal = True
    reply = InternalReply(request, asyncio.get_running_loop().create_future(), on_piece)
    serve(request, reply)
    try:
        return await reply.answer
    except asyncio.CancelledError:
        reply.disconnect()
        raise
