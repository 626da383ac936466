"""Scanner for upstream server-sent events.

Most events carry one token and nothing else. A substring identifies them, and they are forwarded as bytes. JSON escapes
quotes inside strings, so `"finish_reason":null` cannot be part of generated text.
"""

import json
import re
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from inferry.domain.streams import FinishReason, Usage
from inferry.workers.openai_http.chunk_schema import ChunkChoice, ReportedUsage, StreamEvent

MAX_TOKENS: Final = 10**9

_NOT_FINISHED: Final = b'"finish_reason":null'
_PLAIN_EVENTS: Final = re.compile(rb'(?:data: [^\n]*"finish_reason":null[^\n]*\n\n)+')
_ROLE: Final = b'"role":"assistant"'
_EMPTY_DELTAS = (b'"content":""', b'"content":null', b'"delta":{"role":"assistant"}')

_FINISHES: Final = {
    "stop": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.CONTENT_FILTER,
}


_decoder: Final = msgspec.json.Decoder(StreamEvent)
_Event = TypeVar("_Event")


def scan_plain_events(events: bytes) -> tuple[int, int]:
    """The end of the leading plain events (one line, no finish reason, no role), and their number.

    The C version may stop earlier where events with roles are between them; those are then scanned singly.
    """
    last = events.rfind(_NOT_FINISHED)
    if last < 0:
        return 0, 0
    end = events.find(b"\n\n", last) + 2  # the events behind are scanned singly
    if end < 2:  # the match is in an incomplete event
        end = events.rfind(b"\n\n", 0, last) + 2
    if events.find(_ROLE, 0, end) >= 0:
        return 0, 0
    found = _PLAIN_EVENTS.match(events, 0, end)
    return (0, 0) if found is None else (found.end(), events.count(_NOT_FINISHED, 0, found.end()))


def _load_scanner() -> Callable[[bytes], tuple[int, int]]:
    try:
        from inferry.workers.openai_http import _sse_scan
    except ImportError:
        return scan_plain_events  # not compiled
    return _sse_scan.scan_plain_events


_scan_plain_events: Final = _load_scanner()


class EventScanner:
    """Scans one stream: the bytes to forward, the tokens in them, and the end.

    `[DONE]` alone is not success: an abort or an in-band error before it decides. The last usage reported counts;
    `is_usage_event_exact` says whether `usage_event` shows it, with a total that is the sum.
    """

    __slots__ = (
        "_counts_output",
        "error",
        "events",
        "finish",
        "is_done",
        "is_usage_event_exact",
        "reports_cached",
        "stop_reason",
        "tokens",
        "usage",
        "usage_event",
    )

    def __init__(self) -> None:
        self.events = 0
        self.tokens = 0
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.usage: Usage | None = None
        self._counts_output = False  # the server reports usage without output tokens
        self.reports_cached = False
        self.usage_event = b""
        self.is_usage_event_exact = True
        self.error: bytes | None = None
        self.is_done = False

    def scan(self, events: bytes) -> tuple[bytes, int]:
        """Scan complete events; return the bytes for the client and the tokens in them."""
        end, tokens = _scan_plain_events(events)
        if end == len(events):
            self.events += tokens
            self.tokens += tokens
            return events, tokens
        forwarded, more_tokens = b"", 0
        if end == 0:
            # Only the end, or the role: the first event has the role, and the others are scanned as usual.
            first = events.find(b"\n\n") + 2
            forwarded, more_tokens = self._scan_one_by_one(events[:first])
            events = b"" if self.is_done else events[first:]
            end, tokens = _scan_plain_events(events)
        self.events += tokens
        tokens += more_tokens
        if end:
            forwarded += events[:end]
            events = events[end:]
        if events:
            more_bytes, more_tokens = self._scan_one_by_one(events)
            tokens += more_tokens
            forwarded += more_bytes
        self.tokens += tokens
        if self._counts_output and self.usage is not None:
            self.usage = Usage(self.usage.prompt_tokens, self.usage.cached_tokens, self.tokens)
        return forwarded, tokens

    def _scan_one_by_one(self, events: bytes) -> tuple[bytes, int]:
        forwarded: list[bytes] = []
        tokens = 0
        for event in events.split(b"\n\n"):
            if not event:
                continue
            self.events += 1
            if _NOT_FINISHED in event:
                forwarded.append(event)
                if _ROLE not in event or not any(is_empty in event for is_empty in _EMPTY_DELTAS):
                    tokens += 1
            else:
                parsed = self._parse_event(event)
                if parsed is not None:
                    forwarded.append(parsed[0])
                    tokens += any(map(has_output, parsed[1].choices))
                elif self.is_done:
                    break
        if not forwarded:
            return b"", 0
        forwarded.append(b"")
        return b"\n\n".join(forwarded), tokens

    def _parse_event(self, event: bytes) -> tuple[bytes, StreamEvent] | None:
        """Scan one event that is not plain; return it if it is for the client."""
        data = data_of(event)
        if not data or data == b"[DONE]":
            self.is_done = bool(data)
            return None  # a comment, or the end of an event
        try:
            decoded = _decoder.decode(data)
        except msgspec.MsgspecError:
            corrected = decode_without_usage(_decoder, data)
            if corrected is None:
                self.error = b"not an event"
                return None
            decoded, data = corrected
            event = b"data: " + data
            if self.usage is None and not decoded.choices:
                self.usage_event = event + b"\n\n"  # its other fields are correct
        if is_present(decoded.error):
            self.error = b"reported"
            return None
        usage, choices = decoded.usage, decoded.choices
        if usage is not None:
            self._record_usage(usage)
            if not choices:
                self.usage_event = b"data: " + data + b"\n\n"
            elif self.usage_event:
                self.is_usage_event_exact = False  # it shows an earlier usage
        for choice in choices:
            reason = choice.finish_reason
            if reason == "abort":
                self.error = b"aborted"
                return None
            if reason is not None:
                self.finish = to_finish_reason(reason)
        return (event, decoded) if choices else None

    def _record_usage(self, reported: ReportedUsage) -> None:
        self.usage = to_usage(reported, self.tokens)
        output_tokens = reported.completion_tokens
        self._counts_output = output_tokens is None
        self.reports_cached = reported.prompt_tokens_details is not None
        self.is_usage_event_exact = (
            output_tokens is not None and reported.total_tokens == reported.prompt_tokens + output_tokens
        )


def decode_without_usage(decoder: "msgspec.json.Decoder[_Event]", data: bytes) -> tuple[_Event, bytes] | None:
    """An event, or a body, whose usage alone is malformed: decoded and as bytes, without the usage.

    Malformed counts are strings, fractions and NaN, which is not JSON but which many engines write and Python reads.
    """
    try:
        fields = json.loads(data)
        if not isinstance(fields, dict) or fields.pop("usage", None) is None:
            return None
        stripped = msgspec.json.encode(fields)
        return decoder.decode(stripped), stripped
    except (ValueError, RecursionError):
        return None


def has_output(choice: ChunkChoice) -> bool:
    """The event with the finish reason often has the last token too."""
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning or delta.reasoning_content) or is_present(delta.tool_calls)


def _clamp_count(count: int) -> int:
    """A count clamped to -1 to MAX_TOKENS. `domain.usage` refuses negative counts."""
    return min(max(count, -1), MAX_TOKENS)


def decode_response(body: bytes) -> tuple[StreamEvent, bytes] | None:
    """A non-streaming response, decoded and as bytes; None where it is malformed."""
    if not body.isascii() and not is_utf8(body):
        return None
    try:
        decoded = _decoder.decode(body)
    except msgspec.MsgspecError:
        corrected = decode_without_usage(_decoder, body)
        if corrected is None:
            return None
        decoded, body = corrected
    return None if is_present(decoded.error) else (decoded, body)


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def data_of(event: bytes) -> bytes:
    """The data of one event."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    return b"".join([line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")])


def to_finish_reason(reason: str) -> FinishReason:
    return _FINISHES.get(reason, FinishReason.STOP)


def to_usage(reported: ReportedUsage, counted: int) -> Usage:
    """The usage that the server reports, with `counted` output tokens where it reports none."""
    details = reported.prompt_tokens_details
    cached = (details.cached_tokens if details is not None else None) or 0
    output = reported.completion_tokens
    output = counted if output is None else output
    return Usage(_clamp_count(reported.prompt_tokens), _clamp_count(cached), _clamp_count(output))


def is_present(raw: Raw | UnsetType) -> bool:
    return raw is not UNSET and bytes(raw) not in (b"null", b"[]", b'""')
