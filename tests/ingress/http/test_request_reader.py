"""Requests from bytes, without a connection."""

from inferry.domain.errors import InvalidRequest
from inferry.ingress.http.request_reader import MAX_PIPELINED_REQUESTS, ReadPhase, RequestReader
from support.fake_transport import a_server

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"


def a_reader(max_body_bytes: int = 1000) -> RequestReader:
    server, _ = a_server(max_body_bytes=max_body_bytes)
    return RequestReader(server)


def test_requests_are_complete_in_their_order() -> None:
    reader = a_reader()
    assert reader.read(GET + POST, 0) == len(GET + POST)
    assert [reader.take().body, reader.take().body] == [b"", b"abc"]
    assert reader.phase is ReadPhase.IDLE


def test_bytes_beyond_the_pipeline_limit_stay_unread_until_a_request_is_taken() -> None:
    reader, data = a_reader(), GET * (MAX_PIPELINED_REQUESTS + 1)
    at = reader.read(data, 0)
    assert (at, reader.is_full) == (len(GET) * MAX_PIPELINED_REQUESTS, True)
    reader.take()
    assert reader.read(data, at) == len(data)


def test_bodies_that_wait_count_against_the_body_limit() -> None:
    reader, data = a_reader(max_body_bytes=4), POST * 3
    assert reader.read(data, 0) == 2 * len(POST)
    reader.take()
    assert not reader.is_full


def test_the_first_half_of_an_empty_line_stays_unread() -> None:
    reader = a_reader()
    assert reader.read(b"\r", 0) == 0
    assert reader.read(b"\r\n" + GET, 0) == 2 + len(GET)
    assert len(reader.requests) == 1


def test_bytes_that_are_no_request_end_the_reading_after_those_before_them() -> None:
    reader = a_reader()
    reader.read(GET + b"nonsense\r\n\r\n" + GET, 0)
    assert [one.protocol_error for one in reader.requests] == [None, (400, "malformed HTTP/1.1 request")]
    assert reader.is_finished


def test_a_request_may_be_refused_before_its_body_is_complete() -> None:
    reader, problem = a_reader(), InvalidRequest("late")
    reader.read(POST[:-1], 0)
    assert (reader.phase, reader.is_reading_body) == (ReadPhase.BODY, True)
    reader.refuse_incomplete(problem)
    assert reader.take().problem is problem
    assert reader.is_finished
