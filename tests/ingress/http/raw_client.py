"""Requests as bytes on a socket, and a gateway whose answers wait for the test."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.scripted_gateway import ScriptedGateway
from support.serving import Serving
from support.waiting import until

CHAT = "/v1/chat/completions"


HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def request(body: Any = HELLO, *lines: str, method: str = "POST", path: str = CHAT, version: str = "1.1") -> bytes:
    raw = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/{version}", "host: x", f"content-length: {len(raw)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + raw


@contextmanager
def connected(gateway: Serving) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    got = b""
    while mark not in got:
        part = sock.recv(65536)
        assert part, f"closed after {got!r}"
        got += part
    return got


def ask(gateway: Serving, *requests: bytes) -> bytes:
    """Everything the server says to these requests on one connection that is theirs to close."""
    with connected(gateway) as sock:
        sock.sendall(b"".join(requests))
        return read_all(sock)


def texts_of(stream: bytes) -> str:
    events = re.findall(rb"data: (\{.*\})\n\n", stream)
    return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)


class Gated(ScriptedGateway):
    """Its worker says nothing until `open_gate`."""

    def __enter__(self) -> "Gated":
        super().__enter__()
        self._loop.call_soon_threadsafe(self.worker.gate.clear)
        until(lambda: not self.worker.gate.is_set())
        return self

    def open_gate(self) -> None:
        self._loop.call_soon_threadsafe(self.worker.gate.set)
