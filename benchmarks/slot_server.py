"""A server with an exactly known capacity: SLOTS slots, and every call takes one for SERVICE_MS.

Calls beyond the slots are queued here; a gateway that stays within its capacity never sends them.

    python -m benchmarks.slot_server PORT SLOTS SERVICE_MS
"""

import asyncio
import re
import sys
from collections import deque

import uvloop

TOKENS = 4

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_EVENT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[%b]%b}\n\n'
_CHOICE = b'{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":%b}'
_USAGE = b',"usage":{"prompt_tokens":20,"completion_tokens":%d,"total_tokens":%d}' % (TOKENS, 20 + TOKENS)
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":1}]}'


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


_TOKEN = _chunk(_EVENT % (_CHOICE % (b"lamp ", b"null"), b""))
_END = _chunk(_EVENT % (_CHOICE % (b"", b'"stop"'), b"") + _EVENT % (b"", _USAGE) + b"data: [DONE]\n\n") + b"0\r\n\r\n"


class SlotPool:
    """Calls being served, and calls that wait for a slot."""

    def __init__(self, slots: int, service_s: float) -> None:
        self.token_s = service_s / TOKENS
        self._free = slots
        self._waiting: deque[Call] = deque()

    def acquire(self, call: "Call") -> None:
        self._waiting.append(call)
        self._serve()

    def release(self) -> None:
        self._free += 1
        self._serve()

    def _serve(self) -> None:
        while self._free and self._waiting:
            call = self._waiting.popleft()
            if not call.is_disconnected:
                self._free -= 1
                call.begin()


class Call(asyncio.Protocol):
    """One connection and its latest call."""

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        self._transport: asyncio.WriteTransport
        self._read = b""
        self._remaining = 0
        self._next: asyncio.TimerHandle | None = None
        self.is_disconnected = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_disconnected = True
        if self._next is not None:
            self._next.cancel()
            self._next = None
            self._slots.release()

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, found, body = self._read.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not found or (length is not None and len(body) < int(length[1])):
            return
        self._read = b""
        if head.startswith(b"POST"):
            self._slots.acquire(self)
            return
        knows = head.startswith(b"GET /v1/models")
        status, answer = (b"200 OK", _MODELS) if knows else (b"404 Not Found", b"{}")
        self._transport.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(answer), answer))

    def begin(self) -> None:
        self._remaining = TOKENS
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(0, self._write_token, loop.time())

    def _write_token(self, due: float) -> None:
        """Relative to the due time, so that a late timer does not delay later ones."""
        self._transport.write(_TOKEN if self._remaining < TOKENS else _HEAD + _TOKEN)
        self._remaining -= 1
        due += self._slots.token_s
        self._next = asyncio.get_running_loop().call_at(due, self._write_token if self._remaining else self._end, due)

    def _end(self, due: float) -> None:
        self._next = None
        self._transport.write(_END)
        self._slots.release()


async def main(port: int, slots: int, service_s: float) -> None:
    pool = SlotPool(slots, service_s)
    server = await asyncio.get_running_loop().create_server(lambda: Call(pool), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) / 1000))
