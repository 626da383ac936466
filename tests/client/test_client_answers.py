"""Answers, events and errors as the client reads them."""

import json
from typing import Any

import pytest

from inferry.client import BudgetExhausted, CallError, ConnectionFailed, Overloaded, Piece, RunCancelled, Usage
from inferry.client.completions import CompletionBuilder, EventSplitter, call_of, completion_of
from inferry.client.errors import error_of, retry_wait_s
from inferry.domain import errors
from inferry.domain.errors import GatewayError
from inferry.ingress.errors import error_body, error_headers


def an_event(**delta: Any) -> bytes:
    return json.dumps({"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode()


@pytest.mark.parametrize(
    ("prompt", "path", "field"),
    [
        ("Hi", "/v1/completions", "prompt"),
        ([1, 2], "/v1/completions", "prompt"),
        ([{"role": "user", "content": "Hi"}], "/v1/chat/completions", "messages"),
    ],
)
def test_the_kind_of_prompt_chooses_the_endpoint(prompt: Any, path: str, field: str) -> None:
    call = call_of(prompt, {"model": "m"}, {"x-a": "b"}, "s")
    assert (call.path, call.step) == (path, "s")
    assert json.loads(call.body) == {"model": "m", field: prompt}
    assert call.headers["x-a"] == "b"


def test_events_are_split_wherever_the_bytes_are_cut() -> None:
    stream = b": waiting\n\ndata: a\n\nevent: x\ndata:b\n\ndata: [DONE]\n\n"
    for cut in range(len(stream)):
        splitter = EventSplitter()
        assert [*splitter.feed(stream[:cut]), *splitter.feed(stream[cut:])] == [b"a", b"b", b"[DONE]"]


def test_a_stream_is_joined() -> None:
    builder = CompletionBuilder()
    first = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a"'}}
    pieces = [
        builder.add(event, {})
        for event in (
            an_event(role="assistant", content=""),
            an_event(reasoning="Hm."),
            an_event(content="Hel"),
            an_event(content="lo"),
            an_event(tool_calls=[first]),
            an_event(tool_calls=[{"index": 0, "function": {"arguments": ":1}"}}]),
            b'{"choices":[{"delta":{},"finish_reason":"tool_calls"}]}',
            b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}',
            b"[DONE]",
        )
    ]
    assert pieces[:3] == [None, Piece(reasoning="Hm."), Piece("Hel")]
    assert builder.is_complete
    whole = builder.completion({"x-inferry-queue-ms": "1.5", "x-inferry-worker": "w"}, "s")
    assert (whole.text, whole.reasoning, whole.finish, whole.model) == ("Hello", "Hm.", "tool_calls", "m")
    assert whole.tool_calls == ({"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},)
    assert whole.usage == Usage(3, 4, 2)
    assert (whole.queue_ms, whole.worker, whole.step) == (1.5, "w", "s")


def test_an_error_in_a_stream_is_raised_with_its_type() -> None:
    with pytest.raises(RunCancelled) as raised:
        CompletionBuilder().add(error_body(errors.RunCancelled("the run was cancelled")), {"x-request-id": "r"})
    assert (raised.value.status, raised.value.code, raised.value.request_id) == (None, "run_cancelled", "r")


def test_an_answer_of_another_shape_is_an_error() -> None:
    for body in (b"<html>", b"[]", b'{"choices":[]}'):
        with pytest.raises(ConnectionFailed):
            completion_of(body, {}, None)


DOMAIN_ERRORS = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, GatewayError)]


def of_gateway(error: GatewayError) -> CallError:
    lines = error_headers(error).decode().splitlines()
    headers = dict(line.split(": ", 1) for line in lines)
    return error_of(error.status, headers, json.loads(error_body(error)))


@pytest.mark.parametrize("kind", DOMAIN_ERRORS)
def test_every_error_of_the_gateway_has_a_type(kind: type[GatewayError]) -> None:
    found = of_gateway(kind("why", param="p"))
    assert (found.message, found.code, found.status, found.param) == ("why", kind.code, kind.status, "p")
    is_generic = kind is errors.Conflict or kind.status == 499  # which is never sent
    assert (type(found) is CallError) == is_generic


def test_the_gateway_decides_what_is_retried_and_when() -> None:
    busy = of_gateway(errors.QueueFull("full", retry_after_s=1.5))
    assert isinstance(busy, Overloaded)
    assert retry_wait_s(busy, 60) == 1.5
    assert retry_wait_s(busy, 1) is None, "later than the caller is ready to wait"
    for final in (errors.RunBudgetExhausted("spent"), errors.RateLimited("never"), errors.WorkerLost("lost")):
        assert retry_wait_s(of_gateway(final), 60) is None
    assert isinstance(of_gateway(errors.RunBudgetExhausted("spent")), BudgetExhausted)


def test_bodies_that_are_no_errors_are_survived() -> None:
    bodies: list[Any] = [None, [], {"error": "text"}, {"error": {"code": 500, "message": None}}]
    for body in bodies:
        found = error_of(500, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, body)
        assert (found.status, found.retry_after_s) == (500, None)
