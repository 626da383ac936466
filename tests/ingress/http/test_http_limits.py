"""What a client can make the server do before it is authenticated is bounded, and refused with an error."""

import json
import re
from collections.abc import Callable
from time import process_time

import pytest

from inferry.domain.callers import ANONYMOUS
from inferry.domain.errors import InvalidApiKey
from inferry.ingress.http.chunked_body import MAX_EXTRA_BYTES
from inferry.ingress.http.connection import Connection
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.http.request_body import MAX_DISCARD_BYTES
from inferry.ingress.http.request_head import MAX_HEADER_BYTES, MAX_HEADER_FIELDS
from inferry.ingress.http.request_reader import LARGE_HEAD, MAX_PIPELINED_REQUESTS
from support.fake_transport import FakeTransport, a_server, connect, converse, feed, say_ok

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
HELLO = b"5\r\nhello\r\n0\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def statuses(transport: FakeTransport) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", transport.answers)]


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def is_refused(transport: FakeTransport, status: int) -> bool:
    """Whether the last answer is a complete refusal, after which nothing but the end comes."""
    head, _, body = transport.answers[transport.answers.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), transport.answers
    assert b"content-length: %d\r\n" % len(body) in head
    assert head.endswith(b"connection: close")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    return transport.is_ended or transport.is_closed


class Served:
    """Keeps what it is asked."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, request: Request, reply: Reply) -> None:
        self.requests.append(request)
        say_ok(request, reply)


def served(*pieces: bytes) -> list[Request]:
    """What a server is asked by these pieces."""
    serve = Served()
    converse(pieces, serve)
    return serve.requests


# -- trailers and what else stands around chunks ---------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_a_trailer_is_never_a_header(piece: int) -> None:
    trailers = b"authorization: Bearer admin\r\nx-inferry-tenant: other\r\nx-inferry-lane: P0\r\n\r\n"
    asked = served(*in_pieces(CHUNKED + HELLO + trailers + GET, piece))
    assert [one.body for one in asked] == [b"hello", b""]
    assert asked[0].headers == {b"host": b"x", b"transfer-encoding": b"chunked"}
    assert asked[1].headers == {b"host": b"x"}


@pytest.mark.parametrize("piece", [1000, 65_536, 10_000_000])
@pytest.mark.parametrize("names", [1, 100_000])
def test_a_flood_of_trailers_is_refused(piece: int, names: int) -> None:
    flood = b"".join(b"a%d:b\r\n" % (number % names) for number in range(100_000))
    serve = Served()
    transport = converse(in_pieces(CHUNKED + HELLO + flood + b"\r\n", piece), serve)
    assert statuses(transport) == [431]
    assert is_refused(transport, 431)
    assert serve.requests == []


def test_trailers_count_together_with_chunk_extensions() -> None:
    extension = b"1;" + b"e" * (MAX_EXTRA_BYTES // 2 - 4) + b"\r\nx\r\n"
    trailer = b"t:%b\r\n\r\n"
    fits = MAX_EXTRA_BYTES // 2 - 6
    assert len(served(CHUNKED + extension + b"0\r\n" + trailer % (b"v" * fits))) == 1
    assert served(CHUNKED + extension + b"0\r\n" + trailer % (b"v" * (fits + 1))) == []
    assert is_refused(converse([CHUNKED + extension * 3]), 431)


def test_plain_chunks_may_be_as_many_as_the_body_has_bytes() -> None:
    assert served(CHUNKED + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")[0].body == b"x" * 20_000


# -- heads -----------------------------------------------------------------------------------------------------------


def a_head(size: int) -> bytes:
    start = b"GET / HTTP/1.1\r\nhost: x\r\nx-pad: "
    return start + b"p" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("piece", [1, 1000, 65_536, 10_000_000])
def test_a_head_has_a_largest_size_however_it_comes(piece: int) -> None:
    assert statuses(converse(in_pieces(a_head(MAX_HEADER_BYTES), piece))) == [200]
    too_large = converse(in_pieces(a_head(MAX_HEADER_BYTES + 1), piece))
    assert statuses(too_large) == [431]
    assert is_refused(too_large, 431)


@pytest.mark.parametrize("piece", [997, 65_536, 10_000_000])
def test_a_head_is_not_charged_for_those_before_it(piece: int) -> None:
    head = a_head(LARGE_HEAD)
    assert statuses(converse(in_pieces(head * 6, piece))) == [200] * 6


@pytest.mark.parametrize("piece", [997, 65_536, 10_000_000])
def test_a_connection_ends_with_a_large_head(piece: int) -> None:
    got = converse(in_pieces(a_head(LARGE_HEAD + 1) + a_head(100), piece))
    assert statuses(got) == [200]
    assert b"connection: close" in b"".join(got.written)


@pytest.mark.parametrize("piece", [1, 10_000_000])
def test_the_number_of_header_fields_is_limited_exactly(piece: int) -> None:
    fields = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * (MAX_HEADER_FIELDS - 1)
    assert statuses(converse(in_pieces(fields + b"\r\n", piece))) == [200]
    flood = converse(in_pieces(fields + b"a:\r\n\r\n", piece))
    assert statuses(flood) == [431]
    assert is_refused(flood, 431)


def test_a_repeated_field_is_one_list() -> None:
    asked = served(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"A: %d \t\r\n" % at for at in range(100)) + b"\r\n")
    assert asked[0].headers[b"a"] == b", ".join(b"%d" % at for at in range(100))


# -- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n"])
def test_a_huge_content_length_is_refused_at_once(more: bytes) -> None:
    transport = converse([b"POST / HTTP/1.1\r\nhost: x\r\n" + more + b"content-length: 999999999999\r\n\r\n"])
    assert statuses(transport) == [413]
    assert transport.is_ended


@pytest.mark.parametrize("piece", [1, 10_000_000])
def test_an_upgrade_is_a_request_with_a_body_like_any_other(piece: int) -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    data = (
        head + b"content-length: 5\r\n\r\nhello" + head + b"transfer-encoding: chunked\r\n\r\n" + HELLO + b"\r\n" + GET
    )
    assert [one.body for one in served(*in_pieces(data, piece))] == [b"hello", b"hello", b""]


class Strangers:
    """Refuses every caller, and counts the calls."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, request: Request, peer: str) -> bool:
        self.asked += 1
        request.problem = InvalidApiKey("who are you?")
        return False


def test_a_long_body_of_an_unauthenticated_client_is_refused_on_its_head() -> None:
    accepts_body = Strangers()
    server, loop = a_server(accepts_body=accepts_body)
    connection, transport = connect(server, loop)
    feed(
        connection,
        transport,
        loop,
        [b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (MAX_DISCARD_BYTES + 1)],
    )
    assert statuses(transport) == [401]
    assert transport.is_ended
    assert accepts_body.asked == 1


def test_a_chunked_body_of_an_unauthenticated_client_is_not_read() -> None:
    """Chunks cost more than they weigh, so none is looked at."""
    server, loop = a_server(accepts_body=Strangers())
    connection, transport = connect(server, loop)
    feed(connection, transport, loop, [CHUNKED + b"1\r\nx\r\n" * 10, b"not even chunks"])
    assert statuses(transport) == [401]
    assert transport.is_ended
    assert kept_bytes(connection) == 0


def test_a_short_body_of_an_unauthenticated_client_is_discarded_and_the_connection_stays_open() -> None:
    serve = Served()
    server, loop = a_server(serve, accepts_body=Strangers())
    connection, transport = connect(server, loop)
    feed(connection, transport, loop, [b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello", GET])
    assert statuses(transport) == [401, 200]
    assert serve.requests[0].body == b""


@pytest.mark.parametrize("framing", [b"content-length: 5", b"transfer-encoding: chunked"])
def test_an_unauthenticated_client_gets_no_100_continue(framing: bytes) -> None:
    server, loop = a_server(accepts_body=Strangers())
    connection, transport = connect(server, loop)
    head = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n" + framing + b"\r\n\r\n"
    feed(connection, transport, loop, [head])
    assert statuses(transport) == [401]


def test_a_caller_is_authenticated_once_and_again_after_a_pipelined_wait() -> None:
    def accepts_body(request: Request, peer: str) -> bool:
        request.caller = ANONYMOUS
        return True

    serve = Served()
    server, loop = a_server(serve, accepts_body=accepts_body)
    connection, transport = connect(server, loop)
    call = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    feed(connection, transport, loop, [call + call, call])
    assert [one.caller for one in serve.requests] == [ANONYMOUS, None, ANONYMOUS]


def test_a_caller_is_authenticated_again_after_a_wait_for_a_slow_reader() -> None:
    def accepts_body(request: Request, peer: str) -> bool:
        request.caller = ANONYMOUS
        return True

    serve = Served()
    server, loop = a_server(serve, accepts_body=accepts_body)
    connection, transport = connect(server, loop)
    connection.pause_writing()
    feed(connection, transport, loop, [b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"])
    assert serve.requests == []
    connection.resume_writing()
    assert [one.caller for one in serve.requests] == [None]


# -- pipelines -------------------------------------------------------------------------------------------------------


class Slow:
    """Answers when told."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def __call__(self, request: Request, reply: Reply) -> None:
        self.replies.append(reply)


def test_a_long_pipeline_is_read_as_it_is_answered() -> None:
    serve = Slow()
    server, loop = a_server(serve)
    connection, transport = connect(server, loop)
    connection.data_received(GET * 1000)
    answered = 0
    while serve.replies:
        assert len(connection._reader.requests) <= MAX_PIPELINED_REQUESTS
        assert transport.is_reading or len(connection._pending_data) > connection._pending_offset
        serve.replies.pop().respond(200, b"", b"")
        answered += 1
        loop.run_ready()
    assert answered == 1000
    assert statuses(transport) == [200] * 1000
    assert transport.is_reading
    assert server.held == set()


def test_large_heads_that_wait_are_not_many() -> None:
    serve = Slow()
    server, loop = a_server(serve)
    connection, transport = connect(server, loop)
    connection.data_received(a_head(MAX_HEADER_BYTES) * 4)
    assert len(connection._reader.requests) <= 2
    assert not transport.is_reading


def test_a_client_that_never_reads_is_disconnected() -> None:
    serve = Served()
    server, loop = a_server(serve)
    connection, transport = connect(server, loop)
    connection.pause_writing()  # the transport's buffer is full
    connection.data_received(GET * 1000)
    loop.run_ready()
    assert serve.requests == []
    assert not transport.is_reading
    loop.advance(10.0)
    connection.resume_writing()
    loop.run_ready()
    assert len(serve.requests) == 1000
    connection.pause_writing()
    connection.data_received(GET)
    loop.advance(200.0)
    assert transport.is_aborted


def test_requests_after_connection_close_are_not_served() -> None:
    asked = served(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" + GET)
    assert len(asked) == 1


def test_a_refusal_is_sent_after_earlier_responses() -> None:
    transport = converse([GET + GET + b"GET / HTTP/2.0\r\n\r\n" + GET])
    assert statuses(transport) == [200, 200, 505]
    assert is_refused(transport, 505)


def test_an_incomplete_head_is_answered_with_a_timeout() -> None:
    server, loop = a_server()
    connection, transport = connect(server, loop)
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n")
    loop.advance(100.0)
    assert is_refused(transport, 408)


# -- memory -----------------------------------------------------------------------------------------------------------

READ = 262_144
"""What one read of a socket brings at most."""


def kept_bytes(connection: Connection) -> int:
    """What a connection keeps of what has come."""
    size = len(connection._pending_data) + sum(one.head_bytes + len(one.body) for one in connection._reader.requests)
    if connection._reader._buffer is not None:
        size += len(connection._reader._buffer.text)
    body = connection._reader._body
    if body is not None:
        size += sum(len(part) for part in body._parts)
        if body._chunked is not None and body._chunked._buffer is not None:
            size += len(body._chunked._buffer.text)
    return size


STRANGE = {
    "heads": a_head(MAX_HEADER_BYTES) * 40,
    "a head without an end": b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"a" * 1_000_000,
    "trailers": CHUNKED + HELLO + b"a:b\r\n" * 200_000,
    "chunk extensions": CHUNKED + b"1;a=b\r\nx\r\n" * 100_000,
    "chunks": CHUNKED + b"ff\r\n%b\r\n" % (b"x" * 255) * 4000,
    "a body": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n" + b"x" * 900_000,
    "bodies": (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n" + b"x" * 60_000) * 20,
    "requests": GET * 12_000,
}


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("size", [4096, READ])
@pytest.mark.parametrize("kind", STRANGE)
def test_memory_per_unauthenticated_client_is_bounded(kind: str, size: int, reads: bool) -> None:
    server, loop = a_server(accepts_body=Strangers())
    connection, transport = connect(server, loop)
    if not reads:
        connection.pause_writing()
    most = 0
    for piece in in_pieces(STRANGE[kind], size):
        if transport.is_closed or not transport.is_reading:
            break
        connection.data_received(piece)
        most = max(most, kept_bytes(connection))
        loop.run_ready()
    assert most <= 3 * MAX_HEADER_BYTES + size


# -- work is in proportion to what comes -----------------------------------------------------------------------------


def floods() -> dict[str, Callable[[int], list[bytes]]]:
    return {
        "requests": lambda size: in_pieces(GET * (size // len(GET) // 10), 65_536),
        "chunks": lambda size: in_pieces(CHUNKED + b"1\r\nx\r\n" * (size // 60), 65_536),
        "heads": lambda size: [a_head(60_000)] * (size // 60_000),
        "a trickled line": lambda size: [b"GET /", *in_pieces(b"a" * (size // 64), 1)],
        "a trickled head": lambda size: [b"GET / HTTP/1.1\r\n", *in_pieces(b"a: b\r\n" * (size // 400), 1)],
        "trickled trailers": lambda size: [CHUNKED + HELLO, *in_pieces(b"a:b\r\n" * (size // 2000), 1)],
    }


@pytest.mark.parametrize("flood", floods())
def test_work_grows_no_faster_than_what_is_sent(flood: str) -> None:
    """Eight times the bytes take far less than the 64 times that would be quadratic."""

    def cost(size: int) -> float:
        pieces = floods()[flood](size)
        best = 1e9
        for _ in range(2):
            began = process_time()
            converse(pieces)
            best = min(best, process_time() - began)
        return best

    assert cost(1_600_000) < 30 * cost(200_000) + 0.05
