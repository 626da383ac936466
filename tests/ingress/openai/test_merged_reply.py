"""One client, several prompts: what it is sent, and what is cancelled."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from inferry.domain.errors import CallAborted, ClientClosed, GatewayError
from inferry.domain.values import replace
from inferry.ingress.errors import error_event
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.openai.merged_reply import MergedReply, PromptReply
from inferry.ingress.wire_format import COMMENT
from support.builders import a_job
from support.upstream import DONE, chunk, usage

pytestmark = pytest.mark.plain

HEADERS = b"x-inferry-worker: a\r\n"


class Client:
    def __init__(self) -> None:
        self.request = Request(b"POST", b"/v1/completions", {})
        self.is_paused = False
        self.is_aborted = False
        self.is_over = False
        self.status = 0
        self.headers = b""
        self.body = b""
        self.heartbeat = b""
        self.on_disconnect: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        assert not self.is_over
        self.status, self.headers, self.body, self.is_over = status, headers, body, True

    def begin(self, headers: bytes) -> None:
        assert not self.status, "headers are sent once"
        self.status, self.headers = 200, headers

    def write(self, piece: bytes) -> None:
        assert not self.is_over
        self.body += piece

    def end(self, piece: bytes) -> None:
        self.write(piece)
        self.is_over = True

    def abort(self) -> None:
        self.is_aborted = True


class Call:
    """Three prompts of one call, with their replies."""

    def __init__(self, *, streams: bool, max_unread_bytes: int = 10_000, include_usage: bool = False) -> None:
        job = a_job(stream=streams)
        payload = replace(job.payload, include_usage=include_usage)
        jobs = [replace(job, job_id=f"j{number}", payload=payload) for number in range(3)]
        self.client = Client()
        self.cancelled: list[tuple[str, GatewayError | None]] = []
        client: Any = self.client
        merged = MergedReply(
            client, jobs, lambda job_id, error: self.cancelled.append((job_id, error)), max_unread_bytes
        )
        self.parts: list[PromptReply] = merged.start()

    def texts(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for line in self.client.body.split(b"\n"):
            if line.startswith(b"data: {"):
                for choice in msgspec.json.decode(line[6:]).get("choices", []):
                    found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
        return found


def words(text: str) -> bytes:
    return chunk(text, chat=False)


def answer(text: str) -> bytes:
    return msgspec.json.encode({"choices": [{"index": 0, "text": text}], "usage": {"prompt_tokens": 1}})


def test_a_stream_ends_once_with_the_sum_of_usage() -> None:
    call = Call(streams=True, include_usage=True)
    for number in (2, 0, 1):
        call.parts[number].begin(HEADERS)
        call.parts[number].write(words(f"a{number}"))
    for number in (1, 2, 0):
        assert not call.client.is_over
        call.parts[number].end(words(f"b{number}") + usage(5, 2) + DONE)
    assert call.client.is_over
    assert call.texts() == {0: "a0b0", 1: "a1b1", 2: "a2b2"}
    assert call.client.body.count(b"[DONE]") == 1
    assert call.client.body.count(b'"usage"') == 1
    *_, last, _, _ = call.client.body.split(b"\n\n")
    assert msgspec.json.decode(last[6:])["usage"] == {"prompt_tokens": 15, "completion_tokens": 6, "total_tokens": 21}
    assert not call.cancelled


def test_whole_answers_are_sent_when_the_last_has_arrived() -> None:
    call = Call(streams=False)
    for number in (2, 0):
        call.parts[number].respond(200, HEADERS + b"%d" % number, answer(f"t{number}"))
        assert not call.client.is_over
    call.parts[1].respond(200, HEADERS + b"1", answer("t1"))
    body = msgspec.json.decode(call.client.body)
    assert [one["text"] for one in body["choices"]] == ["t0", "t1", "t2"]
    assert body["usage"] == {"prompt_tokens": 3}
    assert call.client.headers == HEADERS + b"0"


def test_a_prompt_that_fails_before_anything_was_sent_is_a_status_and_cancels_the_others() -> None:
    for streams in (True, False):
        call = Call(streams=streams)
        call.parts[1].respond(502, b"", b'{"error":{}}')
        assert (call.client.status, call.client.body) == (502, b'{"error":{}}')
        assert [job_id for job_id, _ in call.cancelled] == ["j0", "j2"]
        assert all(isinstance(error, CallAborted) for _, error in call.cancelled)
        call.parts[0].respond(499, b"", b"late")  # how the cancelled ones end
        call.parts[2].abort()
        assert not call.client.is_aborted


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_prompt_that_fails_later_is_an_error_in_the_stream(has_begun: bool) -> None:
    call = Call(streams=True)
    call.parts[0].begin(HEADERS)
    call.parts[0].write(words("a"))
    if has_begun:
        call.parts[1].begin(HEADERS)
        call.parts[1].end(words("b") + error_event(GatewayError("broken")))
    else:
        call.parts[1].respond(502, b"", b'{"error":{"message":"broken"}}')
    assert call.client.is_over
    assert b"broken" in call.client.body
    assert b"[DONE]" not in call.client.body
    assert [job_id for job_id, _ in call.cancelled] == ["j0", "j2"]
    call.parts[0].write(words("late"))
    assert b"late" not in call.client.body


def test_a_disconnect_cancels_what_has_not_ended() -> None:
    call = Call(streams=True)
    call.parts[1].begin(HEADERS)
    call.parts[1].end(words("done") + DONE)
    assert call.client.on_disconnect is not None
    call.client.on_disconnect()
    assert call.cancelled == [("j0", None), ("j2", None)]
    call.parts[0].abort()
    assert not call.client.is_aborted


def test_the_prompts_have_one_heartbeat() -> None:
    call = Call(streams=True)
    for part in call.parts:
        part.begin(HEADERS)
        part.write(COMMENT)
    assert call.client.body == COMMENT
    call.parts[0].end(DONE)
    for part in call.parts[1:]:
        part.write(COMMENT)
    assert call.client.body == COMMENT + COMMENT


def test_a_slow_reader_gets_everything_up_to_the_limit() -> None:
    call = Call(streams=True)
    for part in call.parts:
        part.begin(HEADERS)
    call.client.is_paused = True
    for number, part in enumerate(call.parts):
        part.write(words(f"a{number}"))
    assert not call.client.body
    call.client.is_paused = False
    assert call.client.on_writable is not None
    call.client.on_writable()
    for part in call.parts:
        part.end(words("z") + DONE)
    assert call.texts() == {0: "a0z", 1: "a1z", 2: "a2z"}


def test_a_reader_that_leaves_too_much_unread_is_cut_off() -> None:
    call = Call(streams=True, max_unread_bytes=500)
    call.parts[0].begin(HEADERS)
    call.client.is_paused = True
    call.parts[0].write(words("a"))
    assert not call.client.is_aborted
    call.parts[1].write(words("b" * 500))
    assert call.client.is_aborted
    assert [job_id for job_id, _ in call.cancelled] == ["j0", "j1", "j2"]
    assert all(isinstance(error, ClientClosed) for _, error in call.cancelled)


def test_a_response_that_has_ended_refers_to_nothing() -> None:
    call = Call(streams=False)
    part: Reply = call.parts[0]
    part.on_disconnect = lambda: None
    part.respond(200, b"", answer("a"))
    assert part.on_disconnect is None
