"""Chunks and answers of several prompts become those of one call."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.errors import WorkerLost
from inferry.ingress.openai.collect import collect_events
from inferry.ingress.openai.merged_choices import MergedChoices, add_usage
from support.upstream import DONE, event


def piece(index: int, text: str, finish: str | None = None) -> bytes:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
    return event({"id": "up", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})


def usage(prompt: int, output: int) -> dict[str, Any]:
    cached = {"cached_tokens": 1}
    total = prompt + output
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": total,
        "prompt_tokens_details": cached,
    }


def stream_of(texts: list[list[str]], prompt: int) -> list[bytes]:
    """The events of one prompt: texts[j] are the pieces of choice j."""
    found = [piece(j, text) for j, pieces in enumerate(texts) for text in pieces]
    found += [piece(j, "", "stop") for j in range(len(texts))]
    head = {"id": "up", "object": "text_completion", "created": 1, "model": "m", "choices": []}
    return [*found, event({**head, "usage": usage(prompt + 1, sum(map(len, texts)))}) + DONE]


@given(st.data())
def test_any_interleaving_gives_the_same_choices(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3))
    prompts = data.draw(st.integers(2, 4))
    choice = st.lists(st.text(max_size=4), max_size=3)
    texts = [data.draw(st.lists(choice, min_size=n, max_size=n)) for _ in range(prompts)]
    streams = {prompt: stream_of(texts[prompt], prompt) for prompt in range(prompts)}
    merged = MergedChoices("cmpl-1", n)
    raw = b""
    while streams:
        prompt = data.draw(st.sampled_from(sorted(streams)))
        size = data.draw(st.integers(1, 3))
        raw += merged.events(prompt, b"".join(streams[prompt][:size]))
        del streams[prompt][:size]
        if not streams[prompt]:
            del streams[prompt]
    assert b"[DONE]" not in raw
    assert b'"usage"' not in raw
    whole = collect_events(raw, merged.usage_event())
    assert whole["id"] == "cmpl-1"
    assert [one["index"] for one in whole["choices"]] == list(range(prompts * n))
    assert [one["text"] for one in whole["choices"]] == ["".join(pieces) for one in texts for pieces in one]
    expected: dict[str, Any] = {}
    for prompt in range(prompts):
        add_usage(expected, usage(prompt + 1, sum(map(len, texts[prompt]))))
    assert whole["usage"] == expected


def test_bodies_are_joined_in_the_order_of_the_prompts() -> None:
    def body(text: str, **more: Any) -> bytes:
        choices = [{"index": j, "text": f"{text}{j}", "finish_reason": "stop"} for j in (0, 1)]
        return msgspec.json.encode({"id": text, "model": "m", "choices": choices, "usage": usage(3, 4), **more})

    stopped = {"code": "run_budget_exhausted", "message": "…"}
    whole = msgspec.json.decode(MergedChoices("cmpl-1", 2).body([body("a"), body("b", inferry=stopped)]))
    assert [(one["index"], one["text"]) for one in whole["choices"]] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert whole["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 8,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert whole["id"] == "cmpl-1"
    assert whole["inferry"] == stopped


@pytest.mark.parametrize("index", [1, -1, "0", None, True])
def test_a_choice_that_was_not_requested_does_not_become_another_prompts(index: Any) -> None:
    bad = event({"choices": [{"index": index, "text": "x"}]})
    with pytest.raises(WorkerLost):
        MergedChoices("cmpl-1", 1).events(0, bad)


def test_an_error_passes_unchanged() -> None:
    error = event({"error": {"message": "gone", "code": "worker_lost"}})
    assert msgspec.json.decode(MergedChoices("cmpl-1", 1).events(1, error)[5:]) == msgspec.json.decode(error[5:])


def test_usage_without_numbers_is_no_usage() -> None:
    total: dict[str, Any] = {}
    add_usage(total, None)
    add_usage(total, {"prompt_tokens": 2, "prompt_tokens_details": None})
    add_usage(total, {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}})
    assert total == {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}
