"""Many readers of streams on one event loop, and one among them that hardly reads.

Times are taken where bytes arrive. Prints one JSON object: the gaps between the events of everybody else, while nobody
is slow and while one is, in turns; and what the server's process had in memory meanwhile.

    python -m inferry.bench.stream_readers PORT STREAMS SERVER_PID TURNS
"""

import asyncio
import gc
import json
import socket
import sys
import time
from typing import Any

import uvloop

from inferry.bench.serving import cpu_seconds, resident_bytes
from inferry.bench.stream_source import FAT, FAT_BYTES, GAP_S, SLOTS

AT_ONCE = 100
WINDOW_S = 3.0
"""Short, and many of them: the machine itself stops for tens of milliseconds now and then."""
FILL_S = 3.0
"""How long the flood takes to fill what the sockets hold, so that from then on the server has to keep it."""
SETTLE_S = 2 * GAP_S + 0.5
SLOW_BYTES_PER_S = 4096
CATCH_UP_S = 20.0
NEARLY_S = 0.2
FAT_BYTES_PER_S = FAT_BYTES * SLOTS / GAP_S


class Gaps:
    """What is measured now, by whoever reads."""

    def __init__(self) -> None:
        self.seen: list[float] | None = None


class Reader(asyncio.Protocol):
    """Reads one stream as fast as it comes."""

    __slots__ = ("_gaps", "_request", "began", "ended", "last", "transport")

    def __init__(self, gaps: Gaps, request: bytes) -> None:
        self._gaps = gaps
        self._request = request
        self.last = 0.0
        self.ended = False
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if b"data: " not in data:
            return
        now = time.perf_counter()
        seen = self._gaps.seen
        if seen is not None:
            seen.append(now - self.last)
        self.last = now
        if not self.began.done():
            self.began.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        if not self.began.done():
            self.began.set_exception(ConnectionError("the stream did not begin"))


class SlowReader:
    """Asks for a flood and reads a few kilobytes a second of it."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", port))
        self._socket.setblocking(False)
        self._socket.sendall(_request(port, FAT.decode()))
        self._began = time.monotonic()
        self.read_bytes = 0
        self.is_cut_off = False

    async def read_slowly(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._read(SLOW_BYTES_PER_S // 10)
            await asyncio.sleep(0.1)

    async def catch_up(self) -> bool:
        """Read until nearly all that was sent has come. False: it was cut off, or never got there."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        loop, end = asyncio.get_running_loop(), time.monotonic() + CATCH_UP_S
        while not self.is_cut_off and time.monotonic() < end:
            try:
                async with asyncio.timeout(1.0):
                    read = len(await loop.sock_recv(self._socket, 1 << 20))
            except (ConnectionError, TimeoutError):
                read = 0
            self.read_bytes += read
            self.is_cut_off = not read
            if self.read_bytes >= (time.monotonic() - self._began - NEARLY_S) * FAT_BYTES_PER_S:
                return True
        return False

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> int:
        try:
            read = len(self._socket.recv(size))
            self.is_cut_off = self.is_cut_off or not read
        except BlockingIOError:
            return 0
        except ConnectionError:
            self.is_cut_off = True
            return 0
        self.read_bytes += read
        return read


def _request(port: int, prompt: str) -> bytes:
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4096, "stream": True}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body)


async def _opened(port: int, streams: int, gaps: Gaps) -> list[Reader]:
    loop = asyncio.get_running_loop()
    readers: list[Reader] = []
    for first in range(0, streams, AT_ONCE):
        several = [
            loop.create_connection(lambda: Reader(gaps, _request(port, "Count the lamps.")), "127.0.0.1", port)
            for _ in range(min(AT_ONCE, streams - first))
        ]
        made = [reader for _, reader in await asyncio.gather(*several)]
        await asyncio.gather(*[reader.began for reader in made])
        readers += made
    return readers


async def _window(gaps: Gaps, seconds: float) -> list[float]:
    seen: list[float] = []
    gaps.seen = seen
    await asyncio.sleep(seconds)
    gaps.seen = None
    return seen


async def main(port: int, streams: int, pid: int, turns: int) -> dict[str, Any]:
    gaps = Gaps()
    said: dict[str, Any] = {"rss_before": resident_bytes(pid)}
    began = time.perf_counter()
    readers = await _opened(port, streams, gaps)
    said["opened_in_s"] = round(time.perf_counter() - began, 2)
    gc.collect()
    gc.freeze()
    await asyncio.sleep(SETTLE_S)
    said["rss_open"] = resident_bytes(pid)
    without: list[list[float]] = []
    beside: list[list[float]] = []
    slow_ones = []
    cpu, began = cpu_seconds(pid), time.perf_counter()
    for _ in range(turns):
        without.append(await _window(gaps, WINDOW_S))
        slow = SlowReader(port)
        reading = asyncio.create_task(slow.read_slowly(FILL_S + WINDOW_S))
        await asyncio.sleep(FILL_S)
        beside.append(await _window(gaps, WINDOW_S))
        await reading
        rss = resident_bytes(pid)
        read_bytes = slow.read_bytes
        caught_up = await slow.catch_up()
        slow_ones.append(
            {"read_bytes": read_bytes, "rss": rss, "caught_up": caught_up, "then_read_bytes": slow.read_bytes}
        )
        slow.close()
        await asyncio.sleep(0.5)
    said["server_cpu_share"] = round((cpu_seconds(pid) - cpu) / (time.perf_counter() - began), 3)
    said["rss_end"] = resident_bytes(pid)
    said["streams_lost"] = sum(reader.ended for reader in readers)
    for reader in readers:
        reader.transport.abort()
    return said | {
        "gaps_ms": {"nobody_slow": [_spread(one) for one in without], "one_slow": [_spread(one) for one in beside]},
        "slow_readers": slow_ones,
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {"events": 0}
    return {"events": len(ordered)} | {
        name: round(1000 * ordered[int(share * (len(ordered) - 1))], 2)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("most", 1.0))
    }


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(main(*map(int, sys.argv[1:5])))))
