"""Many stream readers on one event loop, one of which requests a flood of events and hardly reads it.

Times are taken where bytes arrive. Prints one JSON object: the intervals between events of all other streams, block by
block, and the memory of the server process. A block has a window of every kind: no flood, a flood that is read, and a
flood that is hardly read. The last two differ only in the reader. Their order changes from block to block, so that
effects of the machine and of earlier windows are spread evenly. Every window also has the time that the server ran, and
the time that it waited for a core.

    python -m benchmarks.stream_readers PORT STREAMS SERVER_PID BLOCKS
"""

import asyncio
import gc
import itertools
import json
import socket
import sys
import time
from typing import Any

import uvloop

from benchmarks.serving import cpu_and_run_queue_seconds, cpu_seconds, resident_bytes
from benchmarks.stream_source import FLOOD_BYTES, FLOOD_PROMPT, ITL_S, SLOTS

AT_ONCE = 100
SHARING_KINDS = ("alone", "reads_all", "slow_reader")
WINDOW_S = 2.0
"""Many short windows: the machine itself sometimes stops for tens of milliseconds."""
FILL_S = 2.0
"""Time until the flood has filled the socket buffers; after it the server has to buffer."""
SETTLE_S = 2 * ITL_S + 0.5
SLOW_BYTES_PER_S = 4096
CATCH_UP_S = 20.0
NEARLY_S = 0.2
FLOOD_BYTES_PER_S = FLOOD_BYTES * SLOTS / ITL_S


class ItlSamples:
    """The window that is measured now."""

    def __init__(self) -> None:
        self.samples_s: list[float] | None = None


class Reader(asyncio.Protocol):
    """Reads one stream without delay."""

    __slots__ = ("_request", "_samples", "began", "ended", "last", "transport")

    def __init__(self, samples: ItlSamples, request: bytes) -> None:
        self._samples = samples
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
        samples_s = self._samples.samples_s
        if samples_s is not None:
            samples_s.append(now - self.last)
        self.last = now
        if not self.began.done():
            self.began.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        if not self.began.done():
            self.began.set_exception(ConnectionError("the stream did not begin"))


class FloodReader:
    """Requests a flood, and reads all of it or a few kilobytes per second."""

    def __init__(self, port: int, *, is_slow: bool) -> None:
        self._socket = socket.socket()
        if is_slow:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", port))
        self._socket.setblocking(False)
        self._socket.sendall(_request(port, FLOOD_PROMPT.decode()))
        self._is_slow = is_slow
        self._began = time.monotonic()
        self.read_bytes = 0
        self.is_cut_off = False

    async def read(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            size = SLOW_BYTES_PER_S // 10 if self._is_slow else 1 << 20
            self._read(size)
            await asyncio.sleep(0.1 if self._is_slow else 0.01)

    async def catch_up(self) -> bool:
        """Read until nearly all bytes have arrived. False: the stream was closed or did not get there."""
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
            if self.read_bytes >= (time.monotonic() - self._began - NEARLY_S) * FLOOD_BYTES_PER_S:
                return True
        return False

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> None:
        try:
            read = len(self._socket.recv(size))
            self.is_cut_off = self.is_cut_off or not read
        except BlockingIOError:
            return
        except ConnectionError:
            self.is_cut_off = True
            return
        self.read_bytes += read


def _request(port: int, prompt: str) -> bytes:
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4096, "stream": True}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body)


async def _opened(port: int, streams: int, samples: ItlSamples) -> list[Reader]:
    loop = asyncio.get_running_loop()
    readers: list[Reader] = []
    for first in range(0, streams, AT_ONCE):
        several = [
            loop.create_connection(lambda: Reader(samples, _request(port, "Count the lamps.")), "127.0.0.1", port)
            for _ in range(min(AT_ONCE, streams - first))
        ]
        opened = [reader for _, reader in await asyncio.gather(*several)]
        await asyncio.gather(*[reader.began for reader in opened])
        readers += opened
    return readers


async def _window(samples: ItlSamples, port: int, kind: str, pid: int) -> dict[str, Any]:
    """Event intervals of the other streams during a flood of this kind."""
    flood = None if kind == "alone" else FloodReader(port, is_slow=kind == "slow_reader")
    reading = None if flood is None else asyncio.create_task(flood.read(FILL_S + WINDOW_S))
    await asyncio.sleep(FILL_S)
    ran, waited = cpu_and_run_queue_seconds(pid)
    samples.samples_s = []
    await asyncio.sleep(WINDOW_S)
    samples_s, samples.samples_s = samples.samples_s, None
    ran, waited = (1000 * (now - then) for now, then in zip(cpu_and_run_queue_seconds(pid), (ran, waited), strict=True))
    report = {"server_ran": round(ran, 1), "server_had_no_core": round(waited, 1)} | _spread(samples_s)
    if flood is not None and reading is not None:
        await reading
        report |= {"rss": resident_bytes(pid), "flood_bytes": flood.read_bytes, "caught_up": await flood.catch_up()}
        flood.close()
    await asyncio.sleep(0.5)
    return report


async def main(port: int, streams: int, pid: int, blocks: int) -> dict[str, Any]:
    samples = ItlSamples()
    report: dict[str, Any] = {"rss_before": resident_bytes(pid)}
    began = time.perf_counter()
    readers = await _opened(port, streams, samples)
    report["opened_in_s"] = round(time.perf_counter() - began, 2)
    gc.collect()
    gc.freeze()
    await asyncio.sleep(SETTLE_S)
    report["rss_open"] = resident_bytes(pid)
    orders = itertools.cycle(itertools.permutations(SHARING_KINDS))
    cpu, began = cpu_seconds(pid), time.perf_counter()
    report["blocks"] = []
    for order in itertools.islice(orders, blocks):
        windows = {kind: await _window(samples, port, kind, pid) for kind in order}
        report["blocks"].append({kind: windows[kind] for kind in SHARING_KINDS})
    report["server_cpu_share"] = round((cpu_seconds(pid) - cpu) / (time.perf_counter() - began), 3)
    report["rss_end"] = resident_bytes(pid)
    report["streams_lost"] = sum(reader.ended for reader in readers)
    for reader in readers:
        reader.transport.abort()
    return report


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {"events": 0}
    late_ms = 1000 * sum(max(0.0, interval - ITL_S) for interval in ordered) / len(ordered)
    return {"events": len(ordered), "mean_late": round(late_ms, 3)} | {
        name: round(1000 * ordered[int(share * (len(ordered) - 1))], 2)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("most", 1.0))
    }


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(main(*map(int, sys.argv[1:5])))))
