"""Clients from npm, installed by `make clients`, as processes that can reach nothing but the gateway."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from inferry.ingress.http.connection import Connection
from inferry.ingress.http.server import Server
from support import loopback_launcher
from support.children import TESTS
from support.serving import Serving

FOLDER = TESTS / "clients"
LIMIT_S = 600.0
"""For a client that hangs, not for one that is slow."""


def installed(pattern: str) -> str:
    """The path of the only file below `node_modules` that matches. A client that is not installed fails the test."""
    found = sorted((FOLDER / "node_modules").glob(pattern))
    if len(found) != 1:
        pytest.fail(f"{pattern} is not installed in tests/clients: run `make clients`")
    return str(found[0])


@cache
def has_namespaces() -> bool:
    """Whether this machine permits a network namespace of its own to a process."""
    try:
        return subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


class ClientProcess:
    """A client with a home of its own, which is also its working directory. A context manager that ends it.

    Where namespaces are permitted, the client has a loopback interface only, and the gateway listens there on its own
    port. Elsewhere it runs in the network of the tests.
    """

    def __init__(
        self, gateway: Serving, command: Sequence[str], home: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self._gateway = gateway
        self._command = list(command)
        self._directory = home
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        self._environment = {**kept, "HOME": str(home), "NO_COLOR": "1", **(variables or {})}
        self._popen: subprocess.Popen[str]
        self._server: Server | None = None
        self._listener: asyncio.Server

    def __enter__(self) -> Self:
        if not has_namespaces():
            self._start(self._command)
            return self
        ours, theirs = socket.socketpair()
        with ours, theirs:
            inside = [sys.executable, loopback_launcher.__file__, str(theirs.fileno()), str(self._gateway.port)]
            self._start(["unshare", "-rn", *inside, *self._command], theirs.fileno())
            theirs.close()
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
            self._gateway.run(self._listen(socket.socket(fileno=descriptors[0])))
            ours.send(b"g")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            os.killpg(self._popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._popen.communicate()
        if self._server is not None:
            self._gateway.run(self._close(self._server))

    def interrupt(self) -> None:
        """What Ctrl-C in a terminal does: every process of the group gets the signal."""
        os.killpg(self._popen.pid, signal.SIGINT)

    def output(self) -> str:
        """All of the standard output, once the client has ended without an error."""
        out, problems = self._popen.communicate(timeout=LIMIT_S)
        assert self._popen.returncode == 0, f"exit {self._popen.returncode}\n{out}\n{problems}"
        return out

    def wait(self) -> int:
        """The exit status."""
        self._popen.communicate(timeout=LIMIT_S)
        return self._popen.returncode

    def _start(self, command: list[str], *descriptors: int) -> None:
        self._popen = subprocess.Popen(
            command,
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=descriptors,
            start_new_session=True,
        )

    async def _listen(self, sock: socket.socket) -> None:
        loop, app = asyncio.get_running_loop(), self._gateway.service.app
        server = Server(
            app.serve,
            max_body_bytes=app.limits.max_body_bytes,
            body_timeout_s=app.limits.body_timeout_s,
            idle_timeout_s=self._gateway.config.server.idle_timeout_s,
            accepts_body=app.accepts_body,
        )
        self._server = server
        self._listener = await loop.create_server(lambda: Connection(server, loop), sock=sock)

    async def _close(self, server: Server) -> None:
        self._listener.close()
        server.abort()
