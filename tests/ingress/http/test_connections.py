"""Behaviour of client connections, byte by byte: no client damages its own responses or those of others."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inferry.ingress.http.connection import Connection
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.http.server import Server
from support.scripted_gateway import ScriptedGateway
from support.scripted_worker import ScriptedWorker
from support.serving import Serving, get, post

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


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


class Gated(ScriptedGateway):
    """Its worker says nothing until `open_gate`."""

    def __enter__(self) -> "Gated":
        super().__enter__()
        self._loop.call_soon_threadsafe(self.worker.gate.clear)
        until(lambda: not self.worker.gate.is_set())
        return self

    def open_gate(self) -> None:
        self._loop.call_soon_threadsafe(self.worker.gate.set)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    with Gated(tmp_path) as gateway:
        yield gateway


# -- one connection, several requests --------------------------------------------------------------------------------


def test_a_connection_is_kept_until_one_request_asks_to_close_it(scripted: ScriptedGateway) -> None:
    answer = ask(scripted, request(), request(), request(HELLO, "connection: close"))
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b"connection: close") == 1


def test_pipelined_requests_are_answered_in_their_order(gated: Gated) -> None:
    with connected(gated) as sock:
        sock.sendall(
            request()
            + request(None, method="GET", path="/health")
            + request({**HELLO, "model": "nope"}, "connection: close")
        )
        until(lambda: gated.worker.running == 1)
        gated.open_gate()
        answer = read_all(sock)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200", b"404"]
    assert answer.index(b"one two three") < answer.index(b'"status":"ok"') < answer.index(b"model_not_found")


def test_a_disconnect_cancels_the_active_request_and_drops_the_pipelined_ones(
    gated: Gated,
) -> None:
    with connected(gated) as leaving, connected(gated) as staying:
        leaving.sendall(request() * 3)
        staying.sendall(request(HELLO, "connection: close"))
        until(lambda: gated.worker.running == 2)
        first = gated.worker.plans[0].jobs[0].job_id
        leaving.close()
        until(lambda: gated.worker.cancelled == [first])
        gated.open_gate()
        assert b"one two three" in read_all(staying)
    assert sum(len(plan.jobs) for plan in gated.worker.plans) == 2


def test_forty_pipelined_calls_are_all_answered(gated: Gated) -> None:
    with connected(gated) as sock:
        sock.sendall(request() * 39 + request(HELLO, "connection: close"))
        until(lambda: gated.worker.running == 1)
        gated.open_gate()
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200 OK") == 40


def test_a_disconnect_is_noticed_while_reading_is_paused(gated: Gated) -> None:
    with connected(gated) as sock:
        sock.sendall(request() * 40)
        until(lambda: gated.worker.running == 1)
    until(lambda: len(gated.worker.cancelled) == 1, seconds=30)
    gated.open_gate()
    assert post(gated.url, CHAT, HELLO)[0] == 200
    assert sum(len(plan.jobs) for plan in gated.worker.plans) == 2


def test_a_long_pipeline_is_answered_although_its_client_has_finished_writing(gated: Gated) -> None:
    with connected(gated) as sock:
        sock.sendall(request() * 40)
        sock.shutdown(socket.SHUT_WR)
        until(lambda: gated.worker.running == 1)
        time.sleep(1.5)  # the server has checked the connection
        gated.open_gate()
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200 OK") == 40


def test_what_is_no_http_behind_a_good_request_does_not_spoil_its_answer(gated: Gated) -> None:
    with connected(gated) as sock:
        sock.sendall(request() + b"\x00\x01 what is this\r\n\r\n")
        until(lambda: gated.worker.running == 1)
        gated.open_gate()
        answer = read_all(sock)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"400"]
    assert b"one two three" in answer


# -- disconnects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_finished_writing_still_gets_its_answer(gated: Gated, stream: bool) -> None:
    with connected(gated) as sock:
        sock.sendall(request({**HELLO, "stream": stream}))
        sock.shutdown(socket.SHUT_WR)
        until(lambda: gated.worker.running == 1)
        time.sleep(0.4)  # the server probes several times whether the client still reads
        gated.open_gate()
        answer = read_all(sock)
    final = answer[answer.rindex(b"HTTP/1.1 ") :]
    assert final.startswith(b"HTTP/1.1 200 OK")
    assert texts_of(final) == "one two three" if stream else b"one two three" in final
    assert gated.worker.cancelled == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_is_noticed_while_the_stream_is_idle(gated: Gated, stream: bool) -> None:
    with connected(gated) as sock:
        sock.sendall(request({**HELLO, "stream": stream}))
        until(lambda: gated.worker.running == 1)
    until(lambda: len(gated.worker.cancelled) == 1)


# -- HTTP/1.0, and what else is rare ---------------------------------------------------------------------------------


def test_http_1_0_gets_its_stream_without_chunks(scripted: ScriptedGateway) -> None:
    answer = ask(scripted, request({**HELLO, "stream": True}, version="1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    assert texts_of(body) == "one two three"


def test_http_1_0_gets_full_responses_with_a_length(scripted: ScriptedGateway) -> None:
    head, _, body = ask(scripted, request(version="1.0")).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head
    assert b"one two three" in body


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("GET", CHAT, "POST"), ("POST", "/v1/models", "GET, HEAD"), ("PUT", CHAT, "POST")]
)
def test_a_wrong_method_gets_an_allow_header(scripted: ScriptedGateway, method: str, path: str, allowed: str) -> None:
    answer = ask(scripted, request(HELLO, "connection: close", method=method, path=path))
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert f"\r\nallow: {allowed}\r\n".encode() in answer


def test_a_head_has_no_body(scripted: ScriptedGateway) -> None:
    answer = ask(scripted, request(None, "connection: close", method="HEAD", path="/health"))
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"\r\n\r\n")


def test_a_query_does_not_hide_the_path(scripted: ScriptedGateway) -> None:
    assert b"one two three" in ask(scripted, request(HELLO, "connection: close", path=CHAT + "?trace=1"))


def test_a_client_that_asks_before_it_sends_its_body_is_invited(scripted: ScriptedGateway) -> None:
    with connected(scripted) as sock:
        head, _, body = request(HELLO, "expect: 100-continue", "connection: close").partition(b"\r\n\r\n")
        sock.sendall(head + b"\r\n\r\n")
        assert read_until(sock, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert b"one two three" in read_all(sock)


def test_a_client_that_asks_with_too_large_a_body_is_not(scripted: ScriptedGateway) -> None:
    with connected(scripted) as sock:
        sock.sendall(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2000000\r\n\r\n".encode()
        )
        assert read_all(sock).startswith(b"HTTP/1.1 413 ")


def test_a_body_in_a_thousand_little_chunks_is_the_same_body(scripted: ScriptedGateway) -> None:
    body = json.dumps({**HELLO, "user": "u" * 5000}).encode()
    chunks = b"".join(b"2\r\n%b\r\n" % body[at : at + 2] for at in range(0, len(body) // 2 * 2, 2))
    odd = b"1\r\n%b\r\n" % body[-1:] if len(body) % 2 else b""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n".encode()
    assert b"one two three" in ask(scripted, head + chunks + odd + b"0\r\n\r\n")


def test_an_unsupported_upgrade_is_ignored(scripted: ScriptedGateway) -> None:
    answer = ask(scripted, request(HELLO, "connection: upgrade, http2-settings, close", "upgrade: h2c"))
    assert b"one two three" in answer


def test_an_upgrade_with_a_long_body_is_ignored(scripted: ScriptedGateway) -> None:
    long = {**HELLO, "user": "u" * 300_000}
    answer = ask(scripted, request(long, "connection: upgrade, close", "upgrade: h2c"))
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_long_body_may_come_in_long_chunks(scripted: ScriptedGateway) -> None:
    body = json.dumps({**HELLO, "user": "u" * 400_000}).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:200_000], body[200_000:])) + b"0\r\n\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    answer = ask(
        scripted, head + chunks + request({**HELLO, "user": "u" * 200_000}) + request(HELLO, "connection: close")
    )
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200", b"200"]


def test_what_follows_a_long_body_has_to_be_http(scripted: ScriptedGateway) -> None:
    answer = ask(scripted, request({**HELLO, "user": "u" * 200_000}), b"u" * 100_000)
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_conflicting_body_lengths_are_refused(scripted: ScriptedGateway) -> None:
    with connected(scripted) as sock:
        head = "content-length: 200000\r\ntransfer-encoding: chunked\r\n\r\n"
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{head}".encode() + b"x" * 200_000)
        assert read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("piece", [1_000, 65_600, 70_001, 256_000, 10_000_000])
def test_long_bodies_arrive_as_they_were_sent(piece: int) -> None:
    bodies = [
        bytes(range(256)) * 2_000,
        b"short",
        b"x" * 65_537,
        b"\r\n\r\n" * 50_000,
        b"y" * 300_000,
        b"",
        b"z" * 99_999,
    ]
    sent = b"".join(
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body) for body in bodies
    )

    async def scenario() -> list[bytes]:
        got: list[bytes] = []

        def serve(request: Request, reply: Reply) -> None:
            got.append(request.body)
            reply.respond(200, b"", b"")

        loop = asyncio.get_running_loop()
        http_server = Server(serve, max_body_bytes=1_000_000, body_timeout_s=120, idle_timeout_s=120)
        server = await loop.create_server(lambda: Connection(http_server, loop), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        for at in range(0, len(sent), piece):
            writer.write(sent[at : at + piece])
            await writer.drain()
            await asyncio.sleep(0)
        while len(got) < len(bodies):
            await asyncio.sleep(0)
        writer.close()
        server.close()
        await http_server.close()
        http_server.abort()
        return got

    assert asyncio.run(asyncio.wait_for(scenario(), 120)) == bodies


def test_a_long_body_that_stops_coming_is_given_up_on(short_timeout_gateway: ScriptedGateway) -> None:
    with connected(short_timeout_gateway) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n".encode() + b"x" * 100_000)
        assert read_all(sock).startswith(b"HTTP/1.1 400 ")


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


def test_a_reader_that_never_reads_does_not_keep_the_gateway_from_leaving(tmp_path: Path) -> None:
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
