"""A server of many slow streams: one token every 0.5 s, and far more for a flood.

One event loop, one timer for all streams: time is divided into slots, every stream belongs to one slot and gets its
event in it. So events are spread evenly, and an event costs one write.

    python -m benchmarks.stream_source PORT
"""

import asyncio
import re
import sys

import uvloop

ITL_S = 0.5
SLOTS = 100
FLOOD_BYTES = 5000
FLOOD_PROMPT = b"a long flood"
"""A prompt with these words gets a large event in every slot: 1 MB per second."""
SHORT_ANSWER_TOKENS = 16

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_tokens": *(\d+)')
_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":"%b"},"logprobs":null,"finish_reason":%b}]}\n\n'
)
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":1}]}'


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


_TOKEN = _chunk(_EVENT % (b"lamp ", b"null"))
_FLOOD = _chunk(_EVENT % (b"sand " * (FLOOD_BYTES // 5), b"null"))
_END = _chunk(_EVENT % (b"", b'"stop"') + b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Slots:
    """The streams by slot."""

    def __init__(self) -> None:
        self.flood_streams: set[Stream] = set()
        self._slots: list[set[Stream]] = [set() for _ in range(SLOTS)]
        self._last_slot = 0
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._slot_index = 0
        self._next_slot()

    def add(self, stream: "Stream") -> set["Stream"]:
        self._last_slot += 1
        slot = self._slots[self._last_slot % SLOTS]
        slot.add(stream)
        return slot

    def _next_slot(self) -> None:
        for stream in self._slots[self._slot_index % SLOTS]:
            stream.write(_TOKEN)
        for stream in self.flood_streams:
            stream.write(_FLOOD)
        self._slot_index += 1
        # Relative to the start, so that a late slot does not delay later ones.
        self._loop.call_at(self._began + self._slot_index * ITL_S / SLOTS, self._next_slot)


class Stream(asyncio.Protocol):
    """One connection and its latest stream."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._slot: set[Stream] | None = None
        self._transport: asyncio.WriteTransport
        self._read = b""

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._slot is not None:
            self._slot.discard(self)

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, found, body = self._read.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not found or (length is not None and len(body) < int(length[1])):
            return
        self._read = b""
        if not head.startswith(b"POST"):
            knows = head.startswith(b"GET /v1/models")
            status, answer = (b"200 OK", _MODELS) if knows else (b"404 Not Found", b"{}")
            self.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(answer), answer))
            return
        requested = _MAX_TOKENS.search(body)
        if requested is None or int(requested[1]) <= SHORT_ANSWER_TOKENS:
            self.write(_HEAD + _TOKEN + _END)
            return
        self.write(_HEAD + _TOKEN)
        if FLOOD_PROMPT in body:
            self._slot = self._slots.flood_streams
            self._slot.add(self)
        else:
            self._slot = self._slots.add(self)


async def main(port: int) -> None:
    slots = Slots()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stream(slots), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1])))
