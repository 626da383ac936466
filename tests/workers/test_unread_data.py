"""Data received before a lost connection is not lost with it."""

import asyncio

import pytest

from inferry.domain.streams import Usage
from inferry.domain.usage import plausible_usage
from inferry.workers.http_client import MAX_IDLE_S, Client, Connection
from inferry.workers.openai_http.sse import EventScanner
from support.builders import a_job
from support.upstream import DONE, chunk

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def a_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Exchange:
    def __init__(self) -> None:
        self.told: list[str | bytes] = []

    def on_head(self, status: int) -> None:
        self.told.append(f"{status}")

    def on_body(self, body: bytes) -> None:
        self.told.append(body)

    def on_end(self) -> None:
        self.told.append("end")

    def on_lost(self, cause: str) -> None:
        self.told.append("lost")


class Pipe(asyncio.Transport):
    """A transport that leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def is_closing(self) -> bool:
        return self.is_closed

    def write(self, data: object) -> None: ...

    def abort(self) -> None:
        self.is_closed = True


class Scene:
    """One connection, with the test for a server."""

    def __init__(self) -> None:
        self.client = Client("http://nowhere:1", {}, 1.0)
        self.connection = Connection(self.client)
        self.pipe = Pipe()
        self.connection.connection_made(self.pipe)

    def answers(self, *packets: bytes) -> list[str | bytes]:
        exchange = Exchange()
        self.connection.start(exchange, (b"GET / HTTP/1.1\r\n\r\n",))
        for packet in packets:
            self.connection.data_received(packet)
        return exchange.told


def played(*packets: bytes) -> tuple[list[str | bytes], bool]:
    """What the reader of an answer was told, and whether its connection was kept."""

    async def main() -> tuple[list[str | bytes], bool]:
        scene = Scene()
        told = scene.answers(*packets)
        return told, scene.client.free() is not None

    return asyncio.run(main())


def test_data_before_malformed_bytes_in_a_packet_is_delivered_before_the_loss() -> None:
    assert played(HEAD + a_chunk(b"one") + a_chunk(b"two") + b"no chunk\r\n") == (["200", b"onetwo", "lost"], False)


def test_an_answer_that_is_whole_is_one_whatever_follows_it() -> None:
    assert played(HEAD + a_chunk(b"one") + END + b"no answer\r\n\r\n") == (["200", b"one", "end"], False)


def test_another_answer_right_behind_one_is_not_kept_for_the_next_call() -> None:
    surplus = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad"
    assert played(HEAD + a_chunk(b"one") + END + surplus) == (["200", b"one", "end"], False)


def test_a_single_complete_answer_keeps_its_connection() -> None:
    assert played(HEAD, a_chunk(b"one"), END) == (["200", b"one", "end"], True)


def test_headers_of_one_answer_do_not_count_for_the_next() -> None:
    async def main() -> None:
        scene = Scene()
        first = b"HTTP/1.1 200 OK\r\nx-ratelimit-remaining-requests: 0\r\nretry-after: 9\r\ncontent-length: 1\r\n\r\na"
        scene.answers(first)
        assert set(scene.connection.rate_limit_headers) == {b"x-ratelimit-remaining-requests", b"retry-after"}
        assert scene.client.free() is scene.connection
        scene.answers(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nb")
        assert scene.connection.rate_limit_headers == {}

    asyncio.run(main())


def test_a_connection_beyond_the_servers_idle_timeout_is_not_reused() -> None:
    async def main() -> None:
        scene = Scene()
        scene.answers(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na")
        scene.connection.idle_since -= MAX_IDLE_S
        assert scene.client.free() is None
        assert scene.pipe.is_closed

    asyncio.run(main())


# -- what the events said --------------------------------------------------------------------------------------------


def usage_event(said: bytes) -> bytes:
    return b'data: {"choices":[],"usage":{%b}}\n\n' % said


@pytest.mark.parametrize("together", [True, False])
def test_output_that_a_server_does_not_report_is_counted_however_events_come_together(together: bool) -> None:
    events = [chunk("a"), chunk("b"), chunk("c", "stop"), usage_event(b'"prompt_tokens":7'), DONE]
    scanner = EventScanner()
    for piece in [b"".join(events)] if together else events:
        scanner.scan(piece)
    assert scanner.usage == Usage(7, 0, 3)


def test_output_that_a_server_reports_as_nothing_is_nothing() -> None:
    scanner = EventScanner()
    scanner.scan(chunk("a") + chunk("", "stop") + usage_event(b'"prompt_tokens":7,"completion_tokens":0'))
    assert scanner.usage == Usage(7, 0, 0)


def test_a_negative_count_is_ignored() -> None:
    scanner = EventScanner()
    details = b'"prompt_tokens_details":{"cached_tokens":-5}'
    scanner.scan(usage_event(b'"prompt_tokens":-1,"completion_tokens":-2,' + details))
    assert scanner.usage is not None
    assert plausible_usage(a_job(tokens=11), scanner.usage, counted=3) == Usage(11, 0, 3)
