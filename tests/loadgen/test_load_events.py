"""Streams as a bench reads them: what is a token, and what is an end."""

import pytest

from inferry.loadgen.events import EventReader, error_name
from support.upstream import DONE, chunk, event, role, usage


def reader(*parts: bytes) -> tuple[EventReader, list[int]]:
    one = EventReader()
    return one, [one.feed(part) for part in parts]


@pytest.mark.parametrize("chat", [True, False])
def test_every_event_with_text_is_one(chat: bool) -> None:
    read, tokens = reader(
        chunk("a", chat=chat), chunk("b", chat=chat) + chunk("c", chat=chat), chunk("d", "length", chat=chat), DONE
    )
    assert tokens == [1, 2, 1, 0]
    assert read.failure is None


def test_a_role_alone_is_no_token() -> None:
    assert reader(role(), role() + chunk("a"))[1] == [0, 1]


def test_empty_text_is_no_token() -> None:
    read, tokens = reader(chunk("", chat=False), chunk("a", chat=False), chunk("", "stop", chat=False))
    assert tokens == [0, 1, 0]
    assert read.failure is None


def test_text_that_looks_like_json_is_text() -> None:
    assert reader(chunk('"finish_reason":null "role" :""'), chunk("b"))[1] == [1, 1]


def test_tool_calls_and_reasoning_are_tokens() -> None:
    for delta in ({"tool_calls": [{"index": 0}]}, {"reasoning_content": "hm", "content": ""}):
        assert reader(event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))[1] == [1]


def test_it_does_not_matter_where_reads_end() -> None:
    whole = b": hello\n\n" + role() + chunk("a") + chunk("b") + chunk("c", "stop") + usage(12, 3) + DONE
    for stream in (whole, whole.replace(b"\n", b"\r\n")):
        one = EventReader()
        assert sum(one.feed(stream[at : at + 1]) for at in range(len(stream))) == 3
        assert (one.prompt_tokens, one.output_tokens, one.cached, one.finish, one.is_done) == (
            12,
            3,
            None,
            "stop",
            True,
        )


def test_cached_tokens_come_from_the_server() -> None:
    counts = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    assert reader(event({"choices": [], "usage": counts}))[0].cached == 8


def test_done_after_an_error_is_an_error() -> None:
    broken = event({"error": {"message": "the engine died", "type": "x", "code": "worker_lost"}})
    read, tokens = reader(chunk("a"), broken + chunk("b") + DONE)
    assert tokens == [1, 0]
    assert read.failure == "in band: worker_lost"
    assert "the engine died" in read.message


@pytest.mark.parametrize(
    ("last", "failure"),
    [
        (b"", "broke off"),
        (DONE, "broke off"),
        (chunk("b", "abort") + DONE, "ended by abort"),
        (b"data: nonsense\n\n", "not an event"),
        (event({"error": "out of luck"}), "in band: out of luck"),
        (event({"error": None, "choices": [{"finish_reason": "stop", "text": ""}]}), None),
    ],
)
def test_ends_are_classified(last: bytes, failure: str | None) -> None:
    assert reader(chunk("a"), last)[0].failure == failure


def test_refusals_have_names() -> None:
    assert error_name(b'{"error":{"message":"m","type":"t","code":"queue_full"}}') == "queue_full"
    assert error_name(b'{"error":{"message":"m","type":"t","code":400}}') == "t"
    assert error_name(b"<html>") == ""
