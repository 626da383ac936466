"""Malformed HTTP/1.1 is refused and the connection closed, over a real socket; valid requests are served."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.ingress.http.request_head import _STRAY, find_stray
from support.scripted_gateway import ScriptedGateway
from support.serving import Serving

HOST = b"host: x\r\n"
BODY = b"content-length: 5\r\n"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedGateway]:
    with ScriptedGateway(tmp_path_factory.mktemp("strict")) as running:
        yield running


@contextmanager
def connected(gateway: Serving) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as sock:
        yield sock


def ask(gateway: Serving, data: bytes) -> bytes:
    """All that is said to these bytes until the server has nothing more to say. The client never stops listening."""
    with connected(gateway) as sock:
        sock.sendall(data)
        parts = []
        while part := sock.recv(65_536):
            parts.append(part)
        return b"".join(parts)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


REFUSED = [
    (400, b"GET /health HTTP/1.1\r\n\r\n", "no host"),
    (400, b"GET /health HTTP/1.1\r\n" + HOST * 2 + b"\r\n", "two hosts"),
    (400, b"GET /health HTTP/1.0\r\n" + HOST * 2 + b"\r\n", "two hosts in HTTP/1.0"),
    (400, b"GET /health HTTP/1.1\r\nhost: a b\r\n\r\n", "a space in the host"),
    (400, b"GET /health HTTP/1.1\r\nhost: user@x\r\n\r\n", "more than a host"),
    (400, b"GET /health HTTP/1.1\r\nhost: x/y\r\n\r\n", "a path in the host"),
    (400, b"GET /health HTTP/1.1\r\nhost: x:port\r\n\r\n", "a port that is none"),
    (505, b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n", "HTTP/2.0"),
    (505, b"GET /health HTTP/1.2\r\n" + HOST + b"\r\n", "HTTP/1.2"),
    (505, b"GET /health HTTP/0.9\r\n" + HOST + b"\r\n", "HTTP/0.9"),
    (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2 without asking"),
    (400, b"GET /health\r\n\r\n", "no version"),
    (400, b"GET /health http/1.1\r\n" + HOST + b"\r\n", "a version in small letters"),
    (400, b"SOURCE /health ICE/1.0\r\n" + HOST + b"\r\n", "another protocol"),
    (400, b"GET  /health HTTP/1.1\r\n" + HOST + b"\r\n", "two spaces"),
    (400, b"GET /health HTTP/1.1 \r\n" + HOST + b"\r\n", "a space at the end"),
    (400, b" GET /health HTTP/1.1\r\n" + HOST + b"\r\n", "a space at the start"),
    (400, b"\r\n\r\nGET /health HTTP/1.1\r\n" + HOST + b"\r\n", "two empty lines first"),
    (501, b"BREW /health HTTP/1.1\r\n" + HOST + b"\r\n", "an unknown method"),
    (400, b"GET health HTTP/1.1\r\n" + HOST + b"\r\n", "no path"),
    (400, b"GET * HTTP/1.1\r\n" + HOST + b"\r\n", "an asterisk without OPTIONS"),
    (400, b"GET x:80 HTTP/1.1\r\n" + HOST + b"\r\n", "an authority without CONNECT"),
    (400, b"CONNECT /health HTTP/1.1\r\n" + HOST + b"\r\n", "a path with CONNECT"),
    (400, b"\nGET /health HTTP/1.1\r\n" + HOST + b"\r\n", "a bare LF first"),
    (400, b"GET ftp://x/health HTTP/1.1\r\n" + HOST + b"\r\n", "another scheme"),
    (400, b"GET http://a@x/health HTTP/1.1\r\n" + HOST + b"\r\n", "a user in the target"),
    (400, b"GET http:///health HTTP/1.1\r\n" + HOST + b"\r\n", "no host in the target"),
    (400, b"GET /he\xc3\xa4lth HTTP/1.1\r\n" + HOST + b"\r\n", "a target that is not ASCII"),
    (501, b"POST /health HTTP/1.1\r\n" + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "gzip"),
    (400, b"POST /health HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n", "gzip last"),
    (400, b"POST /health HTTP/1.0\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", "chunks in HTTP/1.0"),
    (400, b"POST /health HTTP/1.1\r\n" + HOST + BODY + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", "two framings"),
    (400, b"POST /health HTTP/1.1\r\n" + HOST + BODY + b"content-length: 6\r\n\r\nhello", "two lengths"),
    (400, b"POST /health HTTP/1.1\r\n" + HOST + b"content-length: 5, 5\r\n\r\nhello", "a list of lengths"),
    (400, b"POST /health HTTP/1.1\r\n" + HOST + b"content-length: +5\r\n\r\nhello", "a sign in the length"),
    (400, b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\r\n c\r\n\r\n", "a folded field"),
    (400, b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\rc\r\n\r\n", "a bare CR"),
    (400, b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\nc: d\r\n\r\n", "a bare LF"),
    (400, b"GET /health HTTP/1.1\nhost: x\n\n", "bare LFs alone"),
    (400, b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\x00c\r\n\r\n", "a NUL"),
    (400, b"GET /health HTTP/1.1\r\n" + HOST + b"a : b\r\n\r\n", "a space before the colon"),
    (400, b"GET /health HTTP/1.1\r\n" + HOST + b": b\r\n\r\n", "a field without a name"),
    (
        400,
        b"POST /v1/models HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
        "LF: chunk",
    ),
    (
        400,
        b"POST /v1/models HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n5 \r\nhello\r\n0\r\n\r\n",
        "5 and SP",
    ),
    (
        400,
        b"POST /v1/models HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n0\r\nno colon\r\n\r\n",
        "a trailer",
    ),
    (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "TLS"),
]


@pytest.mark.parametrize(("status", "data"), [(one[0], one[1]) for one in REFUSED], ids=[one[2] for one in REFUSED])
def test_malformed_http_is_refused_and_the_connection_closed(
    gateway: ScriptedGateway, status: int, data: bytes
) -> None:
    answer = ask(gateway, data + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert statuses(answer) == [status]
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
    assert b"connection: close" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


CLOSE = HOST + b"connection: close\r\n"
SERVED = [
    (b"GET /health HTTP/1.1\r\n" + CLOSE + b"\r\n", "plain"),
    (b"\r\nGET /health HTTP/1.1\r\n" + CLOSE + b"\r\n", "one empty line first"),
    (b"GET /health HTTP/1.0\r\n\r\n", "HTTP/1.0 without a host"),
    (b"GET http://y/health HTTP/1.1\r\n" + CLOSE + b"\r\n", "the absolute form"),
    (b"GET HTTP://y:80/health?x HTTP/1.1\r\n" + CLOSE + b"\r\n", "the absolute form with a port and a query"),
    (b"GET /health HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n", "an empty host"),
    (b"GET /health HTTP/1.1\r\nHost: [::1]:8000\r\nConnection: close\r\n\r\n", "an address as host"),
    (b"GET /health HTTP/1.1\r\n" + CLOSE + b"a: \xff\t b \r\n\r\n", "text that is not ASCII in a value"),
    (
        b"GET /health HTTP/1.1\r\n"
        + CLOSE
        + b'transfer-encoding: Chunked\r\n\r\n5;a="b"\r\nhello\r\n0\r\na: b\r\n\r\n',
        "all",
    ),
]


@pytest.mark.parametrize("data", [one[0] for one in SERVED], ids=[one[1] for one in SERVED])
def test_valid_http_is_served(gateway: ScriptedGateway, data: bytes) -> None:
    assert statuses(ask(gateway, data)) == [200]


def test_the_host_of_an_absolute_target_counts_and_not_the_header(tmp_path: Path) -> None:
    """What is for this machine alone is not for a page that gave it another name."""
    with ScriptedGateway(tmp_path) as gateway:
        local = b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        assert statuses(ask(gateway, local % b"/admin/workers")) == [200]
        assert statuses(ask(gateway, local % b"http://localhost/admin/workers")) == [200]
        assert statuses(ask(gateway, local % b"http://evil.example/admin/workers")) == [403]


@pytest.mark.parametrize("count", [1, 300_000])
def test_trailers_are_never_obeyed(gateway: ScriptedGateway, count: int) -> None:
    trailers = b"x-request-id: mine\r\n" + b"a:b\r\n" * count
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + CLOSE + b"transfer-encoding: chunked\r\n\r\n"
    answer = ask(gateway, head + b"2\r\n{}\r\n0\r\n" + trailers + b"\r\n")
    assert statuses(answer) == [400 if count == 1 else 431]
    assert b"mine" not in answer


def test_an_upgrade_with_a_huge_body_is_refused_at_once(gateway: ScriptedGateway) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"connection: upgrade\r\nupgrade: h2c\r\n"
    assert statuses(ask(gateway, head + b"content-length: 99999999999\r\n\r\n")) == [413]


def test_a_head_that_arrives_at_once_may_still_be_too_large(gateway: ScriptedGateway) -> None:
    assert statuses(ask(gateway, b"GET /health HTTP/1.1\r\n" + CLOSE + b"a: " + b"a" * 65_536 + b"\r\n\r\n")) == [431]


def test_many_fields_are_refused(gateway: ScriptedGateway) -> None:
    assert statuses(ask(gateway, b"GET /health HTTP/1.1\r\n" + CLOSE + b"a:b\r\n" * 12_000 + b"\r\n")) == [431]


def test_heads_that_are_pipelined_are_not_added_up(gateway: ScriptedGateway) -> None:
    one = b"GET /health HTTP/1.1\r\n" + HOST + b"a: " + b"a" * 16_000 + b"\r\n\r\n"
    with connected(gateway) as sock:
        sock.sendall(one * 5 + one[:8_000])
        got = b""
        while b"200 OK" not in got:
            got += sock.recv(65_536)
        sock.sendall(one[8_000:] + b"GET /health HTTP/1.1\r\n" + CLOSE + b"\r\n")
        while part := sock.recv(65_536):
            got += part
    assert statuses(got) == [200] * 7


@given(st.lists(st.sampled_from([b"\r", b"\n", b"\r\n", b"\0", b"a"]), min_size=1, max_size=12), st.integers(0, 23))
def test_stray_line_breaks_are_counted_as_they_are_searched(pieces: list[bytes], start: int) -> None:
    text = bytearray(b"".join(pieces))
    start = min(start, len(text) - 1)
    found, searched = find_stray(text, start), _STRAY.search(text, start)
    assert (found and found.span()) == (searched and searched.span())
