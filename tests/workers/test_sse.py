"""The event scanner: the result does not depend on how events are split into reads."""

import json
from importlib import import_module
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.cli.checkout import is_compiled
from inferry.domain.streams import FinishReason
from inferry.workers.openai_http.chunk_schema import ReportedUsage
from inferry.workers.openai_http.sse import EventScanner, scan_plain_events, to_usage


def event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


ROLE = event({"role": "assistant", "content": ""})
COMMENT = b": still here\n\n"
TWO_LINES = b'data: {"choices":[{"index":0,"delta":{"content":"a"},\ndata: "finish_reason":null}]}\n\n'
END = event({"content": "last"}, "stop")
DONE = b"data: [DONE]\n\n"
texts = st.sampled_from(["a", " word", "\n\n", '"finish_reason":null', "data: [DONE]", "ü", '"role":"assistant"'])
middles = st.one_of(texts.map(lambda text: event({"content": text})), st.sampled_from([ROLE, COMMENT, TWO_LINES]))


@given(st.lists(middles, max_size=8), st.lists(st.integers(0, 12), max_size=4), st.booleans())
def test_how_events_come_together_changes_nothing(middle: list[bytes], cuts: list[int], has_role: bool) -> None:
    events = [*([ROLE] if has_role else []), *middle, END, DONE]
    one_by_one, together = EventScanner(), EventScanner()
    passed = b"".join(one_by_one.scan(one)[0] for one in events)
    at = [0, *sorted(min(cut, len(events)) for cut in cuts), len(events)]
    groups = [b"".join(events[a:b]) for a, b in pairwise(at) if a < b]
    assert b"".join(together.scan(group)[0] for group in groups) == passed
    assert (together.tokens, together.events) == (one_by_one.tokens, one_by_one.events)
    assert together.is_done
    assert together.finish is FinishReason.STOP


def test_events_after_the_end_are_ignored() -> None:
    scanner = EventScanner()
    passed, tokens = scanner.scan(DONE + ROLE + event({"content": "more"}))
    assert (passed, tokens, scanner.is_done) == (b"", 0, True)


pieces = st.one_of(middles, st.sampled_from([END, DONE, b"data: {}\n\n", b"data: ", b"\n", b'"finish_reason":null']))


@pytest.mark.skipif(not is_compiled(), reason="nothing is compiled here")
@given(st.lists(pieces, max_size=8), st.integers(0, 40))
def test_runs_of_plain_events_are_as_long_in_c_as_in_python(some: list[bytes], left_out: int) -> None:
    in_c = import_module("inferry.workers.openai_http._sse_scan").scan_plain_events
    events = b"".join(some)
    events = events[: len(events) - left_out]
    end, said = in_c(events)
    assert end == 0 or events[:end].endswith(b"\n\n")
    assert scan_plain_events(events[:end]) == (end, said)  # what is a run there is one here
    if b'"role":"assistant"' not in events:
        assert scan_plain_events(events) == (end, said)


def test_paced_events_are_scanned_one_by_one() -> None:
    one = event({"content": "a"})
    assert scan_plain_events(one) == (len(one), 1)
    assert scan_plain_events(one + END) == (len(one), 1)
    assert scan_plain_events(one + b'"finish_reason":null') == (len(one), 1)
    assert (
        scan_plain_events(ROLE)
        == scan_plain_events(END)
        == scan_plain_events(COMMENT)
        == scan_plain_events(TWO_LINES)
        == scan_plain_events(b"")
        == (0, 0)
    )


@pytest.mark.parametrize(("reported", "expected"), [(0, 0), (7, 7), (None, 3)])
def test_output_tokens_are_counted_only_where_the_server_reports_none(reported: int | None, expected: int) -> None:
    usage = to_usage(ReportedUsage(prompt_tokens=5, completion_tokens=reported), counted=3)
    assert usage.output_tokens == expected
