"""What a client may make the server do before anybody knows who it is: bounded, and refused in proper words."""

import json
import re
from collections.abc import Callable
from time import process_time

import pytest

from inferry.domain.callers import ANYBODY
from inferry.domain.errors import InvalidApiKey
from inferry.ingress.bodies import MOST_UNWANTED
from inferry.ingress.chunks import MOST_EXTRA
from inferry.ingress.connection import LARGE_HEAD, MOST_PIPELINED, Connection
from inferry.ingress.heads import LARGEST_HEADERS, MOST_FIELDS
from inferry.ingress.reply import Reply, Request
from support.wires import Wire, a_house, connect, converse, feed, say_ok

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
HELLO = b"5\r\nhello\r\n0\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def statuses(wire: Wire) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", wire.answers)]


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def is_refused(wire: Wire, status: int) -> bool:
    """Whether the last answer is a complete refusal, after which nothing but the end comes."""
    head, _, body = wire.answers[wire.answers.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), wire.answers
    assert b"content-length: %d\r\n" % len(body) in head
    assert head.endswith(b"connection: close")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    return wire.is_ended or wire.is_closed


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
    wire = converse(in_pieces(CHUNKED + HELLO + flood + b"\r\n", piece), serve)
    assert statuses(wire) == [431]
    assert is_refused(wire, 431)
    assert serve.requests == []


def test_trailers_count_together_with_chunk_extensions() -> None:
    extension = b"1;" + b"e" * (MOST_EXTRA // 2 - 4) + b"\r\nx\r\n"
    trailer = b"t:%b\r\n\r\n"
    fits = MOST_EXTRA // 2 - 6
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
    assert statuses(converse(in_pieces(a_head(LARGEST_HEADERS), piece))) == [200]
    too_large = converse(in_pieces(a_head(LARGEST_HEADERS + 1), piece))
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
def test_a_head_has_so_many_fields_and_not_one_more(piece: int) -> None:
    fields = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * (MOST_FIELDS - 1)
    assert statuses(converse(in_pieces(fields + b"\r\n", piece))) == [200]
    flood = converse(in_pieces(fields + b"a:\r\n\r\n", piece))
    assert statuses(flood) == [431]
    assert is_refused(flood, 431)


def test_a_field_that_comes_often_is_one_list() -> None:
    asked = served(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"A: %d \t\r\n" % at for at in range(100)) + b"\r\n")
    assert asked[0].headers[b"a"] == b", ".join(b"%d" % at for at in range(100))


# -- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n"])
def test_a_huge_length_is_refused_at_once_whatever_else_is_asked_for(more: bytes) -> None:
    wire = converse([b"POST / HTTP/1.1\r\nhost: x\r\n" + more + b"content-length: 999999999999\r\n\r\n"])
    assert statuses(wire) == [413]
    assert wire.is_ended


@pytest.mark.parametrize("piece", [1, 10_000_000])
def test_an_upgrade_is_a_request_with_a_body_like_any_other(piece: int) -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    data = (
        head + b"content-length: 5\r\n\r\nhello" + head + b"transfer-encoding: chunked\r\n\r\n" + HELLO + b"\r\n" + GET
    )
    assert [one.body for one in served(*in_pieces(data, piece))] == [b"hello", b"hello", b""]


class Strangers:
    """Lets nobody in, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, request: Request, peer: str) -> bool:
        self.asked += 1
        request.problem = InvalidApiKey("who are you?")
        return False


def test_a_long_body_of_a_stranger_is_refused_on_its_head() -> None:
    admits = Strangers()
    house, loop = a_house(admits=admits)
    connection, wire = connect(house, loop)
    feed(connection, wire, loop, [b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (MOST_UNWANTED + 1)])
    assert statuses(wire) == [401]
    assert wire.is_ended
    assert admits.asked == 1


def test_a_body_of_a_stranger_in_chunks_is_not_read() -> None:
    """Chunks cost more than they weigh, so none is looked at."""
    house, loop = a_house(admits=Strangers())
    connection, wire = connect(house, loop)
    feed(connection, wire, loop, [CHUNKED + b"1\r\nx\r\n" * 10, b"not even chunks"])
    assert statuses(wire) == [401]
    assert wire.is_ended
    assert kept_bytes(connection) == 0


def test_a_short_body_of_a_stranger_is_dropped_and_the_connection_goes_on() -> None:
    serve = Served()
    house, loop = a_house(serve, admits=Strangers())
    connection, wire = connect(house, loop)
    feed(connection, wire, loop, [b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello", GET])
    assert statuses(wire) == [401, 200]
    assert serve.requests[0].body == b""


@pytest.mark.parametrize("framing", [b"content-length: 5", b"transfer-encoding: chunked"])
def test_a_stranger_that_asks_before_it_sends_is_not_invited(framing: bytes) -> None:
    house, loop = a_house(admits=Strangers())
    connection, wire = connect(house, loop)
    head = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n" + framing + b"\r\n\r\n"
    feed(connection, wire, loop, [head])
    assert statuses(wire) == [401]


def test_a_caller_is_asked_for_once_and_again_where_the_request_had_to_wait() -> None:
    def admits(request: Request, peer: str) -> bool:
        request.caller = ANYBODY
        return True

    serve = Served()
    house, loop = a_house(serve, admits=admits)
    connection, wire = connect(house, loop)
    call = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    feed(connection, wire, loop, [call + call, call])
    assert [one.caller for one in serve.requests] == [ANYBODY, None, ANYBODY]


# -- pipelines -------------------------------------------------------------------------------------------------------


class Slow:
    """Answers when told."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def __call__(self, request: Request, reply: Reply) -> None:
        self.replies.append(reply)


def test_a_long_pipeline_is_read_as_it_is_answered() -> None:
    serve = Slow()
    house, loop = a_house(serve)
    connection, wire = connect(house, loop)
    connection.data_received(GET * 1000)
    answered = 0
    while serve.replies:
        assert len(connection._waiting) <= MOST_PIPELINED
        assert wire.is_reading or len(connection._unread) > connection._unread_at
        serve.replies.pop().whole(200, b"", b"")
        answered += 1
        loop.turn()
    assert answered == 1000
    assert statuses(wire) == [200] * 1000
    assert wire.is_reading
    assert house.held == set()


def test_large_heads_that_wait_are_not_many() -> None:
    serve = Slow()
    house, loop = a_house(serve)
    connection, wire = connect(house, loop)
    connection.data_received(a_head(LARGEST_HEADERS) * 4)
    assert len(connection._waiting) <= 2
    assert not wire.is_reading


def test_a_client_that_does_not_read_is_not_answered_for_ever() -> None:
    serve = Served()
    house, loop = a_house(serve)
    connection, wire = connect(house, loop)
    connection.pause_writing()  # the transport's buffer is full
    connection.data_received(GET * 1000)
    loop.turn()
    assert serve.requests == []
    assert not wire.is_reading
    loop.advance(10.0)
    connection.resume_writing()
    loop.turn()
    assert len(serve.requests) == 1000
    connection.pause_writing()
    connection.data_received(GET)
    loop.advance(200.0)
    assert wire.is_aborted


def test_what_follows_a_request_to_close_is_not_served() -> None:
    asked = served(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" + GET)
    assert len(asked) == 1


def test_what_is_refused_is_answered_after_what_came_before_it() -> None:
    wire = converse([GET + GET + b"GET / HTTP/2.0\r\n\r\n" + GET])
    assert statuses(wire) == [200, 200, 505]
    assert is_refused(wire, 505)


def test_a_head_that_does_not_come_to_its_end_is_told_so() -> None:
    house, loop = a_house()
    connection, wire = connect(house, loop)
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n")
    loop.advance(100.0)
    assert is_refused(wire, 408)


# -- memory -----------------------------------------------------------------------------------------------------------

READ = 262_144
"""What one read of a socket brings at most."""


def kept_bytes(connection: Connection) -> int:
    """What a connection keeps of what has come."""
    size = len(connection._unread) + sum(one.head_bytes + len(one.body) for one in connection._waiting)
    if connection._held is not None:
        size += len(connection._held.text)
    body = connection._body
    if body is not None:
        size += sum(len(part) for part in body._parts)
        if body._chunks is not None and body._chunks._held is not None:
            size += len(body._chunks._held.text)
    return size


STRANGE = {
    "heads": a_head(LARGEST_HEADERS) * 40,
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
def test_what_is_kept_of_a_stranger_is_bounded(kind: str, size: int, reads: bool) -> None:
    house, loop = a_house(admits=Strangers())
    connection, wire = connect(house, loop)
    if not reads:
        connection.pause_writing()
    most = 0
    for piece in in_pieces(STRANGE[kind], size):
        if wire.is_closed or not wire.is_reading:
            break
        connection.data_received(piece)
        most = max(most, kept_bytes(connection))
        loop.turn()
    assert most <= 3 * LARGEST_HEADERS + size


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
