"""Requests that are nearly right: valid ones, broken in every way that bytes can be. The same seed, the same bytes."""

from collections.abc import Callable, Sequence
from random import Random

from support.request_mutations import (
    Attempt,
    Sent,
    bodies,
    chunks,
    first_lines,
    header_lines,
    lengths,
    targets,
    untouched,
    valid,
)

# -- what is broken in bytes -----------------------------------------------------------------------------------------


def cut(rng: Random, data: bytes) -> bytes:
    return data[: rng.randint(0, len(data))]


def flipped(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def stuffed(rng: Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    more = rng.choice(
        [
            b"\x00",
            b"\r\n",
            b"\r",
            b"\n",
            b"\r\n\r\n",
            b" ",
            b"\xff\xfe",
            rng.randbytes(20),
            b"%0d%0a",
            b"\x16\x03\x01\x02\x00",
        ]
    )
    return data[:at] + more * rng.choice([1, 1, 5]) + data[at:]


def doubled(rng: Random, data: bytes) -> bytes:
    start = rng.randint(0, len(data))
    end = rng.randint(start, len(data))
    return data[:end] + data[start:]


def dropped(rng: Random, data: bytes) -> bytes:
    start = rng.randint(0, len(data))
    return data[:start] + data[rng.randint(start, min(len(data), start + 40)) :]


def bare_newlines(rng: Random, data: bytes) -> bytes:
    return data.replace(b"\r\n", rng.choice([b"\n", b"\r"]), rng.choice([1, 3, -1]))


def whole(rng: Random, data: bytes) -> bytes:
    return data


IN_REQUESTS: list[Callable[[Random, Sent], Sent]] = [
    lengths,
    chunks,
    header_lines,
    header_lines,
    targets,
    targets,
    bodies,
    bodies,
    first_lines,
    untouched,
]


IN_BYTES: list[Callable[[Random, bytes], bytes]] = [
    whole,
    whole,
    whole,
    whole,
    cut,
    flipped,
    stuffed,
    doubled,
    dropped,
    bare_newlines,
]


def generate(rng: Random, key: str, admin_key: str, attempts: Sequence[Attempt] = ()) -> bytes:
    """What one connection sends: mostly one broken request, sometimes several behind each other. `attempts` are
    requests that come beside those that clients really send.
    """
    count = 1 if rng.random() < 0.85 else rng.randint(2, 20)
    parts = []
    for _ in range(count):
        sent = rng.choice(IN_REQUESTS)(rng, valid(rng, key, admin_key, attempts))
        if rng.random() < 0.2:
            sent = rng.choice(IN_REQUESTS)(rng, sent)
        data = sent.wire()
        parts.append(rng.choice(IN_BYTES)(rng, data) if data else data)
    return b"".join(parts)
