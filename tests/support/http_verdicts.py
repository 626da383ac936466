"""What three implementations of HTTP/1.1 make of the same bytes: ours, h11, and gunicorn's parser in Python.

Neither of the two shares code with ours or with each other.
"""

import re
from typing import Any, NamedTuple, cast

import h11
from gunicorn.config import Config
from gunicorn.http.errors import NoMoreData, ParseException
from gunicorn.http.parser import RequestParser

from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.http.request_reader import ReadPhase
from support.fake_transport import ManualLoop, a_server, connect, feed

LIMIT = 10_000_000

_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]+)(.*)")


class ParsedRequest(NamedTuple):
    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    body: bytes


class Verdict(NamedTuple):
    """The requests, and how it ends: `open` for more, in the midst of something, closed as asked for, or refused."""

    requests: list[ParsedRequest]
    end: str
    status: int = 0
    why: str = ""
    starts: tuple[int, ...] = ()
    """Where each request begins, and after them what is left; not known of ours."""
    is_in_body: bool = False
    """Whether ours is refused for its body; not known of the others."""


def parsed_request(method: bytes, target: bytes, fields: list[tuple[bytes, bytes]], body: bytes) -> ParsedRequest:
    """In the form in which implementations can be compared: one value a name, the target without its origin."""
    headers: dict[bytes, bytes] = {}
    for name, value in fields:
        name = name.lower()
        headers[name] = headers[name] + b", " + value if name in headers else value
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is not None:
        headers[b"host"] = absolute[1]
        target = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
    if b"transfer-encoding" in headers:
        headers[b"transfer-encoding"] = headers[b"transfer-encoding"].lower()
    return ParsedRequest(method, target, headers, body)


class Ours:
    """One house for many connections, as in a server."""

    def __init__(self) -> None:
        self._parsed_requests: list[ParsedRequest] = []
        self._server, loop = a_server(self._serve, max_body_bytes=LIMIT)
        self._loop: ManualLoop = loop

    def _serve(self, request: Request, reply: Reply) -> None:
        if request.problem is None:
            self._parsed_requests.append(
                parsed_request(request.method, request.target, list(request.headers.items()), request.body)
            )
        reply.respond(404 if request.problem is None else request.problem.status, b"", b"")

    def read(self, pieces: list[bytes]) -> Verdict:
        self._parsed_requests = []
        connection, transport = connect(self._server, self._loop)
        feed(connection, transport, self._loop, pieces)
        requests, is_in_body = self._parsed_requests, False
        statuses = [int(one) for one in re.findall(rb"(?:\A|(?<=\r\n\r\n))HTTP/1\.1 (\d+) ", transport.answers)]
        final = [status for status in statuses if status != 100]
        if len(final) == len(requests) + 1:
            end, status = "refused", final[-1]
            is_in_body = connection._reader.phase is ReadPhase.BODY
        else:
            assert len(final) == len(requests), transport.answers
            is_over = transport.is_closed or transport.is_ended
            end, status = "closed" if is_over else "open" if connection._reader.phase.value == "idle" else "midst", 0
        assert transport.is_reading or transport.is_closed
        assert self._server.active_replies == 0
        connection.connection_lost(None)
        assert not self._server.connections
        assert not self._server.held
        return Verdict(requests, end, status, is_in_body=is_in_body)


def by_h11(data: bytes) -> Verdict:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=65_536)
    requests: list[ParsedRequest] = []
    starts = [0]
    head: Any = None
    body: list[bytes] = []
    if data:  # nothing would mean the end
        connection.receive_data(data)
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                left = len(connection.trailing_data[0])
                return Verdict(requests, "midst" if head is not None or left else "open", 0, "", tuple(starts))
            if isinstance(event, h11.Request):
                head, body = event, []
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                requests.append(parsed_request(head.method, head.target, list(head.headers), b"".join(body)))
                starts.append(len(data) - len(connection.trailing_data[0]))
                head = None
                connection.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return Verdict(requests, "closed", 0, "", tuple(starts))
                connection.start_next_cycle()
            else:
                return Verdict(requests, "closed", 0, "", tuple(starts))
    except h11.RemoteProtocolError as error:
        return Verdict(requests, "refused", error.error_status_hint, str(error), tuple(starts))


def _gunicorn_config() -> Config:
    config = Config()
    for name, value in {
        "http_parser": "python",
        "header_map": "dangerous",  # fields with an underscore are fields
        "limit_request_line": 0,
        "limit_request_fields": 128,
        "limit_request_field_size": 65_536,
        "permit_unconventional_http_method": True,
    }.items():
        config.set(name, value)
    return config


_CONFIG = _gunicorn_config()


def by_gunicorn(data: bytes) -> Verdict:
    parser = cast(Any, RequestParser)(_CONFIG, iter([data]), ("127.0.0.1", 1))
    requests: list[ParsedRequest] = []
    starts = [0]
    try:
        while True:
            try:
                request = next(parser)
            except StopIteration:
                is_over = bool(requests) and parser.mesg.should_close()
                left = parser.unreader.take_buffered()
                return Verdict(requests, "closed" if is_over else "midst" if left else "open", 0, "", tuple(starts))
            body = request.body.read()
            fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
            length = dict(fields).get(b"CONTENT-LENGTH")
            if length is not None and len(body) < int(length):
                return Verdict(requests, "midst", 0, "", tuple(starts))
            requests.append(
                parsed_request(request.method.encode("latin-1"), request.uri.encode("latin-1"), fields, body)
            )
            left = parser.unreader.take_buffered()
            starts.append(len(data) - len(left))
            parser.unreader.unread(left)
    except NoMoreData:
        return Verdict(requests, "midst", 0, "", tuple(starts))
    except ParseException as error:
        return Verdict(requests, "refused", 400, str(error), tuple(starts))
