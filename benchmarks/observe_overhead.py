"""What `inferry observe` adds to a call: latency through the proxy less latency without it.

A backend that answers at once, the proxy and the client run in three processes. Blocks of sequential calls go directly
and through the proxy in turn, so that the machine affects both alike. Calls are chat completions of 4 kB with a key,
answered whole or streamed; for a stream the time to its first byte counts too. Target: at most 0.2 ms at the median.

`copied` goes through a process that copies bytes from one connection to another and does nothing else: what any proxy
in Python on this machine adds. `over_copy` is the part of the added latency that is Inferry's own.

    python -m benchmarks.observe_overhead backend PORT
    python -m benchmarks.observe_overhead copy PORT UPSTREAM_PORT
"""

import asyncio
import http.client
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import uvloop

from benchmarks.serving import free_port, run_process

BLOCKS, CALLS = 40, 100
_WHOLE = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "lamp"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 900, "completion_tokens": 8, "total_tokens": 908},
    }
).encode()
_EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
)
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":900,"completion_tokens":8}}\n\ndata: [DONE]\n\n'


def measure(blocks: int = BLOCKS, calls: int = CALLS) -> dict[str, Any]:
    backend, proxy, copy = free_port(), free_port(), free_port()
    with (
        tempfile.TemporaryDirectory() as directory,
        run_process([sys.executable, "-m", "benchmarks.observe_overhead", "backend", str(backend)]),
        run_process([sys.executable, "-m", "benchmarks.observe_overhead", "copy", str(copy), str(backend)]),
        run_process(
            [
                *(sys.executable, "-m", "inferry", "observe", "--upstream", f"http://127.0.0.1:{backend}"),
                *("--port", str(proxy), "--database", f"sqlite:///{Path(directory) / 'observed.db'}"),
            ]
        ),
    ):
        arms = {"direct": backend, "copied": copy, "observed": proxy}
        for port in arms.values():
            _wait_for(port)
        result: dict[str, Any] = {"calls_per_arm": blocks * calls}
        for kind in ("whole", "streamed"):
            found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
            for block in range(blocks):
                for arm in list(arms) if block % 2 else reversed(arms):
                    found[arm] += _calls(arms[arm], calls, is_stream=kind == "streamed")
            result[kind] = {
                f"{name}_ms": {
                    arm: round(statistics.median(row[column] for row in rows) * 1000, 4) for arm, rows in found.items()
                }
                for column, name in ((0, "first_byte"), (1, "total"))
            }
            for figures in result[kind].values():
                figures["added"] = round(figures["observed"] - figures["direct"], 4)
                figures["over_copy"] = round(figures["observed"] - figures["copied"], 4)
    added = max(result[kind][name]["added"] for kind in ("whole", "streamed") for name in ("first_byte_ms", "total_ms"))
    result["targets"] = {"added_ms_p50": {"is": added, "wanted": "<= 0.2"}}
    print(json.dumps(result, indent=2), flush=True)
    return result


def _calls(port: int, calls: int, *, is_stream: bool) -> list[tuple[float, float]]:
    """Seconds to the first byte of the body and to its end, of calls on one connection."""
    content = "word " * 800
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], "stream": is_stream}).encode()
    headers = {"authorization": "Bearer sk-1", "content-type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found = []
    for number in range(calls + 5):
        begin = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        response.read(1)
        first = time.perf_counter()
        response.read()
        if number >= 5:
            found.append((first - begin, time.perf_counter() - begin))
    connection.close()
    return found


def _wait_for(port: int) -> None:
    until = time.monotonic() + 60.0
    while True:
        try:
            _calls(port, 1, is_stream=False)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


class Backend(asyncio.Protocol):
    """Answers every request at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        lines = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if not end or not lines or len(body) < int(lines[0].split(b":")[1]):
            return
        self._data = b""
        if b'"stream": true' not in body:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_WHOLE)
            self._write(head + _WHOLE)
            return
        pieces = [*[_EVENT] * 8, _USAGE]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._write(head + chunks + b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        self._transport.write(data)


class Copy(asyncio.Protocol):
    """One end of a connection. What arrives is written to the other end."""

    def __init__(self, other: "Copy | None" = None, upstream_port: int = 0) -> None:
        self._other = other
        self._upstream_port = upstream_port
        self._early: list[bytes] = []
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._other is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        transport, other = await loop.create_connection(lambda: Copy(self), "127.0.0.1", self._upstream_port)
        self._other = other
        transport.writelines(self._early)

    def data_received(self, data: bytes) -> None:
        if self._other is None or self._other.transport is None:
            self._early.append(data)
        else:
            self._other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._other is not None and self._other.transport is not None:
            self._other.transport.close()


async def _serve(make: Callable[[], asyncio.Protocol], port: int) -> None:
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "copy":
        uvloop.run(_serve(lambda: Copy(upstream_port=int(sys.argv[3])), int(sys.argv[2])))
    else:
        uvloop.run(_serve(Backend, int(sys.argv[2])))
