"""Behaviour of client connections, byte by byte: no client damages its own responses or those of others."""

import asyncio
import json
import re
import socket
import time

import pytest

from inferry.ingress.http.connection import Connection
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.http.server import Server
from ingress.http.raw_client import CHAT, HELLO, Gated, ask, connected, read_all, read_until, request, texts_of
from support.scripted_gateway import ScriptedGateway
from support.serving import post
from support.waiting import until

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
    until(lambda: len(gated.worker.cancelled) == 1)
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


def test_malformed_bytes_after_a_valid_request_do_not_affect_its_response(gated: Gated) -> None:
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


def test_expect_100_continue_is_answered(scripted: ScriptedGateway) -> None:
    with connected(scripted) as sock:
        head, _, body = request(HELLO, "expect: 100-continue", "connection: close").partition(b"\r\n\r\n")
        sock.sendall(head + b"\r\n\r\n")
        assert read_until(sock, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert b"one two three" in read_all(sock)


def test_expect_100_continue_with_too_large_a_body_is_refused(scripted: ScriptedGateway) -> None:
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


def test_bytes_after_a_long_body_must_be_http(scripted: ScriptedGateway) -> None:
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


def test_an_incomplete_long_body_times_out(short_timeout_gateway: ScriptedGateway) -> None:
    with connected(short_timeout_gateway) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n".encode() + b"x" * 100_000)
        assert read_all(sock).startswith(b"HTTP/1.1 400 ")
