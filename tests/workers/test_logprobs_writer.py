"""Log probabilities of tokens to the events of a stream, whole and resumed."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from inferry.domain.jobs import InferenceJob, ResumePoint
from inferry.domain.streams import FinishReason, Usage
from inferry.domain.values import replace
from inferry.engine.messages import TokenLogprobs
from inferry.ingress.openai.collect import collect_events
from inferry.streams.detokenizer import Assembler
from inferry.workers.in_process.logprobs_writer import LogprobEntries, LogprobsWriter, TokenTexts
from support.engine_fixtures import a_job

VOCABULARY = [b"Hi", b" there", "ü".encode()[:1], "ü".encode()[1:], b"<|end|>", b"!", b"!"]


class Vocabulary:
    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(VOCABULARY[id] for id in token_ids).decode(errors="replace")


TEXTS = TokenTexts(lambda id: Vocabulary().decode([id]), lambda: Assembler(Vocabulary()))


def a_call(api: Any, *, resumed: tuple[int, ...] = ()) -> InferenceJob:
    job = a_job("job", [1])
    point = ResumePoint((1,), resumed) if resumed else None
    return replace(job, payload=replace(job.payload, api=api), resume_point=point)


def found(*top: tuple[int, float], logprob: float = -0.5) -> TokenLogprobs:
    return TokenLogprobs(1, logprob, list(top))


def events_of(raw: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in raw.decode().splitlines() if line]


def test_a_chat_answer_has_one_entry_for_each_token() -> None:
    job = a_call("chat")
    entries, writer = LogprobEntries(TEXTS, is_chat=True), LogprobsWriter(job, 17.0)
    raw = writer.push("Hi", (0,), entries.entry(0, found((0, -0.5), (1, -1.5))))
    raw += writer.push("", (4,), entries.entry(4, found((1, -0.25), (0, float("-inf")))))
    raw += writer.finish(FinishReason.STOP, None)
    role, first, _, last = events_of(raw)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["delta"] == {"content": "Hi"}
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    body = collect_events(raw, writer.usage(Usage(1, 0, 2)))
    assert (body["object"], body["id"], body["usage"]["completion_tokens"]) == ("chat.completion", "chatcmpl-job", 2)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hi"}
    hi = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    there = {"token": " there", "bytes": list(b" there")}
    assert choice["logprobs"]["content"] == [
        hi | {"top_logprobs": [hi, there | {"logprob": -1.5}]},
        {
            "token": "<|end|>",
            "logprob": -0.5,
            "bytes": list(b"<|end|>"),
            "top_logprobs": [there | {"logprob": -0.25}, hi | {"logprob": -9999.0}],
        },
    ]


def test_a_completion_has_offsets_and_its_own_token_among_the_likely_ones() -> None:
    entries, writer = LogprobEntries(TEXTS, is_chat=False), LogprobsWriter(a_call("completions"), 17.0)
    pieces = [(0, "Hi"), (2, ""), (3, "ü"), (5, "!")]
    raw = b"".join(writer.push(text, (id,), entries.entry(id, found((1, -0.25), (6, -0.3)))) for id, text in pieces)
    raw += writer.push("", (), b"") + writer.finish(FinishReason.STOP, "!")
    (choice,) = collect_events(raw, writer.usage(Usage()))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hiü!", "stop", "!")
    assert choice["logprobs"]["tokens"] == ["Hi", "", "ü", "!"], "half a character has no text"
    assert choice["logprobs"]["text_offset"] == [0, 2, 2, 3]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 4
    assert choice["logprobs"]["top_logprobs"][0] == {"Hi": -0.5, " there": -0.25, "!": -0.3}
    assert choice["logprobs"]["top_logprobs"][3] == {"!": -0.5, " there": -0.25}, "its own value comes first"


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_resumed_answer_continues_the_offsets_and_has_neither_begin_nor_end(api: Any) -> None:
    job = a_call(api, resumed=(0, 2))
    entries = LogprobEntries(TEXTS, is_chat=api == "chat", earlier_ids=(0, 2))
    writer = LogprobsWriter(job, 17.0)
    (event,) = events_of(writer.push("ü", (3,), entries.entry(3, found())) + writer.finish(FinishReason.STOP, None))
    (choice,) = event["choices"]
    if api == "chat":
        assert choice["delta"] == {"content": "ü"}
        assert choice["logprobs"]["content"][0]["token"] == "ü"
    else:
        assert choice["text"] == "ü"
        assert choice["logprobs"]["text_offset"] == [2]
