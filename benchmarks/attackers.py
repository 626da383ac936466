"""Clients without a key that send expensive input. `python -m benchmarks.attackers PORT KIND CONNECTIONS SECONDS`
prints the answers as JSON.
"""

import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

CONNECTION_TIMEOUT_S = 30.0
CHUNK_BYTES = 65_536
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
_CHUNKED = _HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"

Attack = Callable[[], AsyncIterator[bytes]]


def trailers(size: int) -> Attack:
    """A short chunked body, then trailers until the server stops reading."""

    async def pieces() -> AsyncIterator[bytes]:
        yield _CHUNKED
        piece = b"".join(b"%x:b\r\n" % number for number in range(CHUNK_BYTES // 8))
        for _ in range(size // len(piece)):
            yield piece
        yield b"\r\n"

    return pieces


def chunk_extensions(size: int) -> Attack:
    async def pieces() -> AsyncIterator[bytes]:
        yield _HEAD + b"transfer-encoding: chunked\r\n\r\n"
        for _ in range(size // CHUNK_BYTES):
            yield b"1;a=b\r\nx\r\n" * (CHUNK_BYTES // 10)

    return pieces


async def heads() -> AsyncIterator[bytes]:
    """A head of the maximum size, with as many fields as fit."""
    yield _HEAD + b"a:b\r\n" * 13_000 + b"\r\n"


async def large_fields() -> AsyncIterator[bytes]:
    """Pipelined heads of the maximum size and number of fields."""
    field = b"x" * 480
    one = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"a: %b\r\n" % field * 126 + b"\r\n"
    for _ in range(20):
        yield one
    yield b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def half_open_bodies() -> AsyncIterator[bytes]:
    """A body that never ends."""
    yield _HEAD + b"content-length: 60000\r\n\r\n" + b"x" * 30_000
    await asyncio.sleep(0.5)
    yield b"x" * 20_000
    await asyncio.sleep(0.5)


async def large_bodies() -> AsyncIterator[bytes]:
    yield _HEAD + b"content-length: 5000000\r\n\r\n"
    for _ in range(5_000_000 // CHUNK_BYTES):
        yield b"x" * CHUNK_BYTES


async def pipelines() -> AsyncIterator[bytes]:
    """Pipelined calls; answers are read only after all are sent."""
    one = _HEAD + b"content-length: 2\r\n\r\n{}"
    for _ in range(20):
        yield one * 50
    yield _HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\n{}"


ATTACKS: dict[str, Attack] = {
    "trailers_1MB": trailers(1_000_000),
    "trailers_10MB": trailers(10_000_000),
    "trailers_100MB": trailers(100_000_000),
    "chunk_extensions": chunk_extensions(10_000_000),
    "heads": heads,
    "large_fields": large_fields,
    "half_open_bodies": half_open_bodies,
    "large_bodies": large_bodies,
    "pipelines": pipelines,
}


async def attack_once(port: int, attack: Attack) -> tuple[Counter[str], int]:
    """One connection: its answer, and the bytes that were sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.get_running_loop().create_task(reader.read(-1))
    sent = 0
    try:
        async for piece in attack():
            if reading.done():
                break
            writer.write(piece)
            sent += len(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        pass  # closed by the server
    try:
        answer = await asyncio.wait_for(reading, CONNECTION_TIMEOUT_S)
    except TimeoutError:
        return Counter({"nothing": 1}), sent
    except OSError:
        return Counter({"reset": 1}), sent
    finally:
        writer.close()
    found = re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)
    return Counter(status.decode() for status in found) or Counter({"closed": 1}), sent


async def attack(port: int, kind: str, connections: int, seconds: float) -> dict[str, object]:
    """Attack repeatedly with this many concurrent connections."""
    end = time.monotonic() + seconds
    answers: Counter[str] = Counter()
    strikes = sent = 0

    async def attacker() -> None:
        nonlocal strikes, sent
        while True:
            found, size = await attack_once(port, ATTACKS[kind])
            answers.update(found)
            strikes += 1
            sent += size
            if time.monotonic() >= end:
                return

    await asyncio.gather(*(attacker() for _ in range(connections)))
    return {"kind": kind, "strikes": strikes, "sent_MB": round(sent / 1e6, 1), "answers": dict(answers)}


if __name__ == "__main__":
    report = attack(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    print(json.dumps(asyncio.run(report)))
