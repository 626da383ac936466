"""The OpenAI shapes the gateway writes itself: chunks and whole answers for jobs whose worker speaks in tokens.

Chunks are written by hand around one encoded string, because this runs once per token.
"""

from typing import Any, Protocol

import msgspec

from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Delta, Done, Usage

_encode = msgspec.json.encode

DONE_EVENT = b"data: [DONE]\n\n"
_MARK = "\x00 here \x00"


class EventWriter(Protocol):
    """Makes the server-sent events of one stream: a piece per delta, then the last."""

    def piece(self, delta: Delta) -> bytes: ...

    def last(self, done: Done, *, include_usage: bool) -> bytes: ...


class PassThrough:
    """For deltas that carry the upstream's own events: they leave as they came."""

    __slots__ = ()

    def piece(self, delta: Delta) -> bytes:
        return delta.raw

    def last(self, done: Done, *, include_usage: bool) -> bytes:
        return done.raw + DONE_EVENT if include_usage else DONE_EVENT


class ContinuedWriter:
    """For a stream that began as one engine's events and goes on as text: the same shape, ids and names throughout.

    The shape is taken from `raw`, events with which the stream began. The usage that the client hears is of the whole.
    """

    __slots__ = ("_after", "_before", "_event")

    def __init__(self, raw: bytes) -> None:
        *_, last = (line for line in raw.split(b"\n") if line.startswith(b"data:"))
        self._event: dict[str, Any] = msgspec.json.decode(last[5:])
        self._event.pop("usage", None)
        choice = self._event["choices"][0]
        choice.update({key: None for key in choice if key not in ("index", "delta", "text")})
        self._say(_MARK)
        before, after = _encode(self._event).split(_encode(_MARK))
        self._before, self._after = b"data: " + before, after + b"\n\n"

    def piece(self, delta: Delta) -> bytes:
        return delta.raw + self.text(delta.text)

    def last(self, done: Done, *, include_usage: bool) -> bytes:
        return self.finish(done) + (self.usage(done) if include_usage else b"") + DONE_EVENT

    def text(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after if text else b""

    def finish(self, done: Done) -> bytes:
        self._say("")
        self._event["choices"][0]["finish_reason"] = done.finish.value
        return b"data: " + _encode(self._event) + b"\n\n"

    def usage(self, done: Done) -> bytes:
        return b"data: " + _encode(self._event | {"choices": [], "usage": usage_object(done.usage)}) + b"\n\n"

    def _say(self, text: str) -> None:
        choice = self._event["choices"][0]
        if "delta" in choice:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text


class ChunkWriter:
    """For deltas that carry text: chunks in OpenAI's shape, written around it."""

    __slots__ = ("_after", "_before", "_is_chat", "_open", "_opened")

    def __init__(self, job: InferenceJob, created: float) -> None:
        self._is_chat = job.payload.api == "chat"
        self._opened = not self._is_chat
        if self._is_chat:
            head = b'"id":"chatcmpl-%s","object":"chat.completion.chunk"' % job.job_id.encode()
        else:
            head = b'"id":"cmpl-%s","object":"text_completion"' % job.job_id.encode()
        self._open = b'data: {%s,"created":%d,"model":%s,"choices":[' % (head, int(created), _encode(job.route.model))
        self._before = self._open + (b'{"index":0,"delta":{"content":' if self._is_chat else b'{"index":0,"text":')
        self._after = (b"}" if self._is_chat else b"") + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def piece(self, delta: Delta) -> bytes:
        opening = self._opening()
        return opening + self._before + _encode(delta.text) + self._after if delta.text else opening

    def last(self, done: Done, *, include_usage: bool) -> bytes:
        empty = b'"delta":{}' if self._is_chat else b'"text":""'
        finish = b'{"index":0,%s,"logprobs":null,"finish_reason":"%s"}]}\n\n' % (empty, done.finish.value.encode())
        events = self._opening() + self._open + finish
        if include_usage:
            events += self._open + b'],"usage":%s}\n\n' % _encode(usage_object(done.usage))
        return events + DONE_EVENT

    def _opening(self) -> bytes:
        """Chat streams open with the role alone, once."""
        if self._opened:
            return b""
        self._opened = True
        role = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        return self._open + role


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def whole_answer(job: InferenceJob, text: str, done: Done, created: float) -> bytes:
    """The body of a call that did not stream."""
    choice: dict[str, Any] = {"index": 0}
    if job.payload.api == "chat":
        head = {"id": f"chatcmpl-{job.job_id}", "object": "chat.completion"}
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        head = {"id": f"cmpl-{job.job_id}", "object": "text_completion"}
        choice["text"] = text
    choice |= {"logprobs": None, "finish_reason": done.finish.value}
    return _encode(
        head
        | {"created": int(created), "model": job.route.model, "choices": [choice], "usage": usage_object(done.usage)}
    )
