"""Chunks and bodies in OpenAI's format, for jobs whose worker delivers text instead of events.

Chunks are assembled from bytes around one encoded string, because this runs once per token.
"""

import re
from typing import Any, Final

import msgspec

from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Delta, Done
from inferry.domain.usage import usage_object

_encode: Final = msgspec.json.encode

DONE_EVENT: Final = b"data: [DONE]\n\n"
_PLACEHOLDER: Final = "\x00 here \x00"


_TIER_FIELD: Final = re.compile(rb'"service_tier":(?:null|"[a-z]*")')


def set_service_tier(events: bytes, tier: str) -> bytes:
    """The events with the service tier that was granted; replaces the engine's own field."""
    field = b'"service_tier":"%b"' % tier.encode()
    if b'"service_tier":' in events:  # quotes inside text are escaped, so this is a field
        return _TIER_FIELD.sub(field, events)
    return (b"\n\n" + events).replace(b'\n\ndata: {"', b"\n\ndata: {" + field + b',"')[2:]


def set_service_tier_in_body(body: bytes, tier: str) -> bytes:
    """The same for a non-streaming body."""
    field = b'"service_tier":"%b"' % tier.encode()
    return _TIER_FIELD.sub(field, body) if b'"service_tier":' in body else b"{" + field + b"," + body[1:]


def early_stop_object(stopped: GatewayError) -> dict[str, Any]:
    """The `inferry` field of a response that a budget ended early."""
    return {"code": stopped.code, "message": stopped.message}


class PassThrough:
    """For deltas with the upstream's events: forwarded unchanged."""

    __slots__ = ()

    def piece(self, delta: Delta) -> bytes:
        return delta.raw

    def last(self, done: Done, *, include_usage: bool) -> bytes:
        return done.raw + DONE_EVENT if include_usage else DONE_EVENT


class ContinuationWriter:
    """For a stream that began with one engine's events and continues as text after a failover, or was stopped.

    Shape, ids and names are those of `raw`, the first events of the stream. The usage covers all attempts.
    """

    __slots__ = ("_after", "_before", "_choices", "_event")

    def __init__(self, raw: bytes, choices: int = 1) -> None:
        self._choices = choices
        *_, last = (line for line in raw.split(b"\n") if line.startswith(b"data:"))
        self._event: dict[str, Any] = msgspec.json.decode(last[5:])
        self._event.pop("usage", None)
        choice = self._event["choices"][0]
        choice.update({key: None for key in choice if key not in ("index", "delta", "text")})
        self._text_event(_PLACEHOLDER)
        before, after = _encode(self._event).split(_encode(_PLACEHOLDER))
        self._before, self._after = b"data: " + before, after + b"\n\n"

    def piece(self, delta: Delta) -> bytes:
        return delta.raw + self.text(delta.text)

    def last(self, done: Done, *, include_usage: bool) -> bytes:
        return self.finish(done) + (self.usage(done) if include_usage else b"") + DONE_EVENT

    def text(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after if text else b""

    def finish(self, done: Done) -> bytes:
        self._text_event("")
        shown = self._event["choices"][0]
        ends: dict[str, Any] = {"finish_reason": done.finish.value}
        if "token_ids" in shown or done.stop_reason is not None:  # as vLLM ends its streams
            ends["stop_reason"] = done.stop_reason
        ids = {key: shown[key] for key in ("prompt_token_ids", "token_ids") if key in shown}
        choice = {key: value for key, value in shown.items() if key not in ends and key not in ids} | ends | ids
        event = self._event | {"choices": [choice | {"index": index} for index in range(self._choices)]}
        if done.stopped is not None:
            event["inferry"] = early_stop_object(done.stopped)
        return b"data: " + _encode(event) + b"\n\n"

    def usage(self, done: Done) -> bytes:
        return b"data: " + _encode(self._event | {"choices": [], "usage": usage_object(done.usage)}) + b"\n\n"

    def _text_event(self, text: str) -> None:
        choice = self._event["choices"][0]
        if "delta" in choice:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text


class ChunkWriter:
    """For deltas with text: chunks in OpenAI's format."""

    __slots__ = ("_after", "_before", "_echo", "_is_chat", "_open", "_opened")

    def __init__(self, job: InferenceJob, created: float) -> None:
        self._is_chat = job.payload.api == "chat"
        self._echo = job.payload.echo
        self._opened = not self._is_chat and not self._echo
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
        stopped = b"" if done.stopped is None else b',"inferry":' + _encode(early_stop_object(done.stopped))
        reason = b'"%s"' % done.finish.value.encode()
        if done.stop_reason is not None:  # as vLLM writes it
            reason += b',"stop_reason":' + _encode(done.stop_reason)
        finish = b'{"index":0,%s,"logprobs":null,"finish_reason":%s}]%s}\n\n' % (empty, reason, stopped)
        events = self._opening() + self._open + finish
        if include_usage:
            events += self._open + b'],"usage":%s}\n\n' % _encode(usage_object(done.usage))
        return events + DONE_EVENT

    def _opening(self) -> bytes:
        """The first chunk: of a chat stream the role, of a completion the prompt, where it is to be repeated."""
        if self._opened:
            return b""
        self._opened = True
        if not self._is_chat:
            return self._before + _encode(self._echo) + self._after
        role = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        return self._open + role


def full_response(job: InferenceJob, text: str, done: Done, created: float) -> dict[str, Any]:
    """The body of a non-streaming response."""
    choice: dict[str, Any] = {"index": 0}
    if job.payload.api == "chat":
        head: dict[str, Any] = {"id": f"chatcmpl-{job.job_id}", "object": "chat.completion"}
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        head = {"id": f"cmpl-{job.job_id}", "object": "text_completion"}
        choice["text"] = job.payload.echo + text
    choice |= {"logprobs": None, "finish_reason": done.finish.value}
    if done.stop_reason is not None:  # as vLLM writes it
        choice["stop_reason"] = done.stop_reason
    head |= {"created": int(created), "model": job.route.model}
    stopped = {} if done.stopped is None else {"inferry": early_stop_object(done.stopped)}
    return head | {"choices": [choice], "usage": usage_object(done.usage)} | stopped
