"""Connections over time: idle connections, heartbeats, slow readers and drain."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ingress.http.raw_client import CHAT, HELLO, Gated, connected, read_all, read_until, request, texts_of
from support.scripted_gateway import ScriptedGateway
from support.scripted_worker import ScriptedWorker
from support.serving import Serving, get, post
from support.waiting import until

# -- time ------------------------------------------------------------------------------------------------------------


def test_a_trickle_does_not_keep_an_idle_connection_open(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, {"server": {"idle_timeout_s": 2.0}}) as gateway, connected(gateway) as sock:
        sock.settimeout(0.05)
        closed = False
        for letter in b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: " + b"a" * 1000:
            try:
                sock.sendall(bytes([letter]))
                closed = sock.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True
            if closed:
                break
        assert closed
        assert post(gateway.url, CHAT, HELLO)[0] == 200


def test_a_connection_may_be_idle_between_requests_but_not_for_ever(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, {"server": {"idle_timeout_s": 2.0}}) as gateway, connected(gateway) as sock:
        sock.sendall(request())
        read_until(sock, b"one two three")
        assert sock.recv(65536) == b""


def test_an_idle_stream_gets_headers_and_heartbeats(tmp_path: Path) -> None:
    with Gated(tmp_path, {"server": {"heartbeat_interval_s": 0.1}}) as gateway, connected(gateway) as sock:
        sock.sendall(request({**HELLO, "stream": True}, "connection: close"))
        got = read_until(sock, b": waiting\n\n")
        assert got.startswith(b"HTTP/1.1 200 OK")
        assert b"\r\nx-inferry-worker: scripted\r\n" in got
        gateway.open_gate()
        assert texts_of(read_all(sock)) == "one two three"


# -- slow readers ----------------------------------------------------------------------------------------------------


LONG = ["x" * 20_000] * 500


@contextmanager
def a_slow_reader(gateway: Serving) -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(120)
        sock.connect(("127.0.0.1", gateway.port))
        sock.sendall(request({**HELLO, "stream": True, "max_tokens": len(LONG)}, "connection: close"))
        yield sock


def test_a_slow_reader_gets_everything_and_delays_no_other_stream(tmp_path: Path) -> None:
    with Gated(tmp_path, {"server": {"max_unread_bytes": 1 << 30}}, words=LONG) as gateway:
        with a_slow_reader(gateway) as sock:
            gateway.open_gate()
            until(lambda: gateway.worker.running == 0)  # its job is over although nothing was read
            assert post(gateway.url, CHAT, {**HELLO, "max_tokens": 1})[0] == 200
            answer = read_all(sock)
        assert len(texts_of(answer)) == sum(map(len, LONG))
        merged = re.search(r"inferry_merged_deltas_total (\d+)", get(gateway.url, "/metrics")[2])
        assert merged is not None
        assert int(merged[1]) > 0


def test_a_reader_that_stalls_is_cut_off_before_it_fills_the_memory(tmp_path: Path) -> None:
    config = {"server": {"max_unread_bytes": 1_000_000}}
    with Gated(tmp_path, config, words=LONG) as gateway, a_slow_reader(gateway) as sock:
        gateway.open_gate()
        until(lambda: len(gateway.worker.cancelled) == 1)
        with pytest.raises(ConnectionResetError):
            read_all(sock)
        assert post(gateway.url, CHAT, {**HELLO, "max_tokens": 1})[0] == 200


def test_a_slow_reader_is_waited_for_while_the_gateway_drains(tmp_path: Path) -> None:
    config = {"server": {"max_unread_bytes": 1 << 30, "drain_timeout_s": 600}}
    with Gated(tmp_path, config, words=LONG) as gateway:
        with a_slow_reader(gateway) as sock:
            until(lambda: gateway.worker.running == 1)
            gateway.open_gate()
            until(lambda: gateway.worker.running == 0)
            gateway.stop()
            until(lambda: get(gateway.url, "/ready")[0] == 503)
            answer = read_all(sock)
        assert len(texts_of(answer)) == sum(map(len, LONG))
        assert b"data: [DONE]\n\n" in answer
        gateway.join()


def test_a_client_that_never_reads_does_not_block_shutdown(tmp_path: Path) -> None:
    config = {"server": {"max_unread_bytes": 1 << 30, "drain_timeout_s": 0.2}}
    with Gated(tmp_path, config, words=LONG) as gateway, a_slow_reader(gateway):
        until(lambda: gateway.worker.running == 1)
        gateway.open_gate()
        until(lambda: gateway.worker.running == 0)
        gateway.stop()
        gateway.join()


# -- before everything is up -----------------------------------------------------------------------------------------


class _Silent(ScriptedWorker):
    """A server that has not said yet what it serves."""

    async def start(self) -> None:
        raise ConnectionError("nobody is there")


def test_a_model_that_may_still_be_listed_is_503_and_not_404(tmp_path: Path) -> None:
    def make() -> tuple[list[ScriptedWorker], dict[str, Any]]:
        return [ScriptedWorker(), _Silent("late", models=())], {}

    with Serving(tmp_path, make) as gateway:
        status, headers, answer = post(gateway.url, CHAT, {**HELLO, "model": "later"})
        assert (status, answer["error"]["code"]) == (503, "no_worker")
        assert int(headers["retry-after"]) >= 1
        assert post(gateway.url, CHAT, HELLO)[0] == 200
