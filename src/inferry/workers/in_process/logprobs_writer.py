"""Log probabilities of an engine's tokens, written as the events of a stream, as vLLM's server writes them.

Rule: every output token has exactly one entry, in the event of its own step, also where its text is empty or held back.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import TextAssembler
from inferry.domain.streams import FinishReason, Usage
from inferry.domain.usage import usage_object
from inferry.engine.messages import TokenLogprobs

_encode = msgspec.json.encode
_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenTexts(NamedTuple):
    """Texts of tokens, special ones included: of one token in the middle of a text, and of the tokens of an answer."""

    text: Callable[[int], str]
    make_assembler: Callable[[], TextAssembler]


class LogprobEntries:
    """The entries of one answer; tokens of earlier attempts have theirs already.

    The texts of the tokens are that of the answer, cut where it grew: a token within a character has none.
    """

    def __init__(self, texts: TokenTexts, *, is_chat: bool, earlier_ids: tuple[int, ...] = ()) -> None:
        self._text = texts.text
        self._is_chat = is_chat
        self._assembler = texts.make_assembler()
        self._offset = len(self._assembler.push(earlier_ids)[0]) if earlier_ids else 0

    def entry(self, token: int, found: TokenLogprobs) -> bytes:
        """The `logprobs` of the next token, as JSON."""
        offset = self._offset
        text, _ = self._assembler.push((token,))
        self._offset += len(text)
        top = [(text if id == token else self._text(id), _finite(logprob)) for id, logprob in found.top]
        if self._is_chat:
            entry = _chat_token(text, _finite(found.logprob))
            return _encode({"content": [entry | {"top_logprobs": [_chat_token(*one) for one in top]}]})
        likely = {text: _finite(found.logprob)}
        for name, logprob in top:
            likely.setdefault(name, logprob)  # of tokens with the same text the likelier one
        own = {"token_logprobs": [_finite(found.logprob)], "tokens": [text], "top_logprobs": [likely]}
        return _encode({"text_offset": [offset], **own})


class LogprobsWriter:
    """Writes one answer. Texts and entries go in, complete server-sent events come out.

    A resumed answer has its first event already, and its reader writes the last ones.
    """

    has_calls = False

    def __init__(self, job: InferenceJob, created: float) -> None:
        self._is_chat = job.payload.api == "chat"
        self._is_resumed = job.resume_point is not None
        self._has_begun = self._is_resumed or not self._is_chat
        self._open = event_start(job, created, is_chat=self._is_chat)

    def push(self, text: str, token_ids: tuple[int, ...], logprobs: bytes) -> bytes:
        """The event of more text and its entries."""
        return self._role() + self._event(_encode(text), logprobs or b"null")

    def finish(self, finish: FinishReason, stop_reason: str | int | None) -> bytes:
        if self._is_resumed:
            return b""
        reason = b'"%b"' % finish.value.encode()
        if stop_reason is not None:  # as vLLM writes it
            reason += b',"stop_reason":' + _encode(stop_reason)
        return self._role() + self._event(b"" if self._is_chat else b'""', b"null", reason)

    def usage(self, usage: Usage) -> bytes:
        return self._open + b'],"usage":%b}\n\n' % _encode(usage_object(usage))

    def _role(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        role = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        return self._open + role

    def _event(self, text: bytes, logprobs: bytes, reason: bytes = b"null") -> bytes:
        piece = b'"text":' + text
        if self._is_chat:
            piece = b'"delta":{"content":%b}' % text if text else b'"delta":{}'
        return self._open + b'{"index":0,%b,"logprobs":%b,"finish_reason":%b}]}\n\n' % (piece, logprobs, reason)


def event_start(job: InferenceJob, created: float, *, is_chat: bool) -> bytes:
    """An event of the job's stream up to its choices."""
    if is_chat:
        head = b'"id":"chatcmpl-%b","object":"chat.completion.chunk"' % job.job_id.encode()
    else:
        head = b'"id":"cmpl-%b","object":"text_completion"' % job.job_id.encode()
    return b'data: {%b,"created":%d,"model":%b,"choices":[' % (head, int(created), _encode(job.route.model))


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
