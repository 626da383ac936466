"""A stream that began with one engine's events and was resumed on another looks like one stream."""

import msgspec
import pytest

from inferry.domain.streams import Delta, Done, FinishReason, Usage
from inferry.ingress.openai.collect import collect_events
from inferry.ingress.openai.render import ContinuationWriter

ROLE = (
    b'data: {"id":"chatcmpl-7","object":"chat.completion.chunk","created":17,"model":"m","choices":[{"index":0,'
    b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}\n\n'
)
WORD = (
    b'data: {"id":"chatcmpl-7","object":"chat.completion.chunk","created":17,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":"one"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
TEXT = (
    b'data: {"id":"cmpl-7","object":"text_completion","created":17,"model":"m","choices":[{"index":0,"text":"one",'
    b'"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'
)
DONE = Done("7", FinishReason.LENGTH, Usage(3, 1, 2))


def events(raw: bytes) -> list[dict[str, object]]:
    lines = [line for line in raw.split(b"\n\n") if line and line != b"data: [DONE]"]
    assert all(line.startswith(b"data: ") for line in lines)
    return [msgspec.json.decode(line[6:]) for line in lines]


@pytest.mark.parametrize(("began", "word"), [(ROLE + WORD, WORD), (TEXT, TEXT)])
def test_a_continuation_event_differs_only_in_its_text(began: bytes, word: bytes) -> None:
    piece = ContinuationWriter(began).piece(Delta("7", "r", "s", 1, 'say "hé"\n', (5,), 1))
    assert piece == word.replace(b'"one"', '"say \\"hé\\"\\n"'.encode())


def test_merged_deltas_of_a_slow_reader_stay_in_order() -> None:
    piece = ContinuationWriter(ROLE + WORD).piece(Delta("7", "r", "s", 0, " two", (1, 2), 2, ROLE + WORD))
    assert piece == ROLE + WORD + WORD.replace(b'"one"', b'" two"')


@pytest.mark.parametrize("began", [ROLE + WORD, TEXT])
def test_the_end_has_its_reason_and_the_total_usage(began: bytes) -> None:
    finish, usage = events(ContinuationWriter(began).last(DONE, include_usage=True))
    first = events(began)[0]
    assert [finish[key] for key in ("id", "object", "created", "model")] == [
        first[key] for key in ("id", "object", "created", "model")
    ]
    assert finish["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2  # type: ignore[index]
    assert ContinuationWriter(began).last(DONE, include_usage=False).count(b"usage") == 0


def test_a_full_response_joins_both_attempts() -> None:
    writer = ContinuationWriter(ROLE + WORD)
    answer = collect_events(ROLE + WORD + writer.text(" two") + writer.finish(DONE), writer.usage(DONE))
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "one two"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 5
