"""Token ids of a stream, kept for a failover and removed from the events before the client sees them.

Engines return token ids in the events. Nearly every event is a piece of plain text with its ids, which a regular
expression recognises. Other events are decoded.
"""

from array import array
from collections import deque
from typing import Final

import msgspec

from inferry.domain.event_ids import strip_token_ids
from inferry.domain.jobs import ResumePoint
from inferry.domain.streams import FinishReason
from inferry.domain.values import replace
from inferry.workers.openai_http.chunk_schema import TracedChoice, TracedDelta, TracedEvent
from inferry.workers.openai_http.sse import (
    EventScanner,
    data_of,
    decode_without_usage,
    is_present,
    to_finish_reason,
    to_usage,
)
from inferry.workers.resumed_stop_strings import COMPARED_CHARS, StopMatcher

RECENT_EVENTS: Final = 8
"""Pieces kept of a stream with stop strings, to compare the end of its text with the detokenised ids."""

# A piece of plain text of choice 0 without a finish reason: the bytes before the text, and between text and ids. Quotes
# inside strings are escaped, so none of this can be part of generated text.
_CHAT = (
    b'"choices":[{"index":0,"delta":{"content":"',
    b'"},"logprobs":null,"finish_reason":null,"token_ids":[',
)
_COMPLETION = (
    b'"choices":[{"index":0,"text":"',
    b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[',
)
_ANOTHER_FIELD: Final = b'","'
_QUOTE: Final = 0x22


_decoder = msgspec.json.Decoder(TracedEvent)
_ids_decoder = msgspec.json.Decoder(tuple[int, ...])


class TokenTrace:
    """The ids of the prompt, and of the output whose text was forwarded.

    Ids whose text the engine still holds back (part of a character) are pending until it arrives. With
    `engine_holds_text` (stop strings) text arrives later than its ids in any case, and all ids count. `is_exact`: all
    forwarded text was plain text with known ids.
    """

    __slots__ = ("_engine_holds_text", "_held", "_output", "_prompt", "_shape", "is_exact")

    def __init__(self, resume_point: ResumePoint | None = None, *, engine_holds_text: bool = False) -> None:
        self._engine_holds_text = engine_holds_text
        self._prompt: bytes | tuple[int, ...] | None = None if resume_point is None else resume_point.prompt_ids
        self._output = array("I", () if resume_point is None else resume_point.output_ids)
        self._held: list[int] = []
        self._shape = _CHAT
        self.is_exact = True

    def set_prompt(self, prompt: bytes) -> None:
        if self._prompt is None:
            self._prompt = prompt

    def add(self, text: str | None, ids: list[int] | None) -> None:
        """Add a piece of text and its ids."""
        if ids:
            self._held += ids
        if not text:
            return
        if not self._held:
            self.is_exact = False  # text without ids
        try:
            self._output.extend(self._held)
        except (OverflowError, TypeError):
            self.is_exact = False
        self._held.clear()

    def strip(self, events: bytes) -> tuple[bytes, int | None]:
        """Trace complete events; return them without ids, and their number if all were plain text."""
        if self._prompt is not None and self.is_exact:
            found = self._strip_plain(events)
            if found is not None:
                return found
        return self._strip_one_by_one(events), None

    def _strip_plain(self, events: bytes) -> tuple[bytes, int] | None:
        """Trace plain events; None without any change where one of them is not plain."""
        before, between = self._shape
        find = events.find
        pieces: list[bytes] = []
        ids = self._held
        held = len(ids)
        at = copied_to = 0
        while at < len(events):
            end = find(b"\n\n", at)
            start = find(before, at, end) + len(before)
            stop = find(between, start, end)
            if stop < 0 or start < len(before) or events[start] == _QUOTE or find(_ANOTHER_FIELD, start, stop) >= 0:
                break
            first = stop + len(between)
            last = find(b"]", first, end)
            pieces.append(events[copied_to : first - 1])
            copied_to = last + 1
            at = end + 2
            try:
                ids.append(int(events[first:last]))
            except ValueError:
                try:
                    ids += [int(one) for one in events[first:last].split(b",")]
                except ValueError:
                    break
        else:
            try:
                self._output.extend(ids)
            except OverflowError:
                self.is_exact = False
            ids.clear()
            count = len(pieces)
            pieces.append(events[copied_to:])
            return b"null".join(pieces), count
        del ids[held:]
        return None

    def _strip_one_by_one(self, events: bytes) -> bytes:
        if not self.is_exact:
            return strip_token_ids(events)
        for event in events.split(b"\n\n"):
            data = data_of(event)
            if not data or data == b"[DONE]":
                continue
            try:
                decoded = _decoder.decode(data)
            except msgspec.MsgspecError:
                self.is_exact = False
                break
            self._record(decoded)
        return strip_token_ids(events)

    def _record(self, decoded: TracedEvent) -> None:
        if is_present(decoded.prompt_token_ids):
            self.set_prompt(bytes(decoded.prompt_token_ids))  # type: ignore[arg-type]
        for choice in decoded.choices:
            if is_present(choice.prompt_token_ids):
                self.set_prompt(bytes(choice.prompt_token_ids))  # type: ignore[arg-type]
            delta = choice.delta
            if choice.index or (delta is not None and _has_non_text(delta)):
                self.is_exact = False
            if delta is None:
                self._shape = _COMPLETION
            text = choice.text if delta is None else delta.content
            if text and self._prompt is None:
                self.is_exact = False  # a server that returns ids sends those of the prompt first
            self.add(text, choice.token_ids)

    @property
    def has_text(self) -> bool:
        """Whether some text has arrived. Its ids stop being pending then."""
        return len(self._output) > 0

    def resume_point(self) -> ResumePoint | None:
        """Where another attempt can resume; None where that is not exact."""
        if not self.is_exact or self._prompt is None:
            return None
        if isinstance(self._prompt, bytes):
            try:
                self._prompt = _ids_decoder.decode(self._prompt)
            except msgspec.MsgspecError:
                return None
        output = tuple(self._output)
        return ResumePoint(self._prompt, (*output, *self._held) if self._engine_holds_text else output)


class TracingScanner(EventScanner):
    """Scans a stream with token ids. They are removed unless the client asked for them (`keeps_ids`)."""

    __slots__ = ("_keeps_ids", "_recent", "trace")

    def __init__(self, *, keeps_ids: bool = False, engine_holds_text: bool = False) -> None:
        super().__init__()
        self.trace = TokenTrace(engine_holds_text=engine_holds_text)
        self._keeps_ids = keeps_ids
        self._recent: deque[bytes] | None = deque(maxlen=RECENT_EVENTS) if engine_holds_text else None

    def scan(self, events: bytes) -> tuple[bytes, int]:
        stripped, tokens = self.trace.strip(events)
        if self._keeps_ids:
            stripped = events
        if tokens is None:
            stripped, tokens = EventScanner.scan(self, stripped)
        else:
            self.events += tokens
            self.tokens += tokens
        if self._recent is not None:
            self._recent.append(stripped)
        return stripped, tokens

    def resume_point(self) -> ResumePoint | None:
        """Where another attempt can resume."""
        found = self.trace.resume_point()
        if found is None or self._recent is None:
            return found
        if not self.trace.has_text:
            return replace(found, tail="")
        try:
            return replace(found, tail=text_of(b"".join(self._recent))[-COMPARED_CHARS:] or None)
        except msgspec.MsgspecError:
            return None  # an event was malformed


class ContinuationScanner(EventScanner):
    """Reads the stream of a continuation as text and ids. The response writes its own events from them.

    `stops` holds back and delivers the text; a matched stop string ends the stream (`is_stopped`).
    """

    __slots__ = ("_resumed_tokens", "is_stopped", "stops", "trace")

    def __init__(self, resume_point: ResumePoint, stops: StopMatcher | None = None) -> None:
        super().__init__()
        self.trace = TokenTrace(resume_point, engine_holds_text=stops is not None)
        self.stops = stops
        self.is_stopped = False
        self._resumed_tokens = len(resume_point.output_ids)

    def resume_point(self) -> ResumePoint | None:
        """Where another attempt can resume."""
        found = self.trace.resume_point()
        return found if found is None or self.stops is None else replace(found, unsent=self.stops.unsent)

    def read(self, events: bytes) -> tuple[str, tuple[int, ...]]:
        """The text and token ids of complete events."""
        texts: list[str] = []
        ids: list[int] = []
        for event in events.split(b"\n\n"):
            data = data_of(event)
            if not event or not data:
                continue
            self.events += 1
            if data == b"[DONE]":
                self.is_done = True
                break
            try:
                decoded = _decoder.decode(data)
            except msgspec.MsgspecError:
                corrected = decode_without_usage(_decoder, data)
                if corrected is None:
                    self.error = b"not an event"
                    continue
                decoded = corrected[0]
            if is_present(decoded.error):
                self.error = b"reported"
                continue
            if decoded.usage is not None:
                self.usage = to_usage(decoded.usage, self.tokens)
                self.reports_cached = decoded.usage.prompt_tokens_details is not None
            for choice in decoded.choices:
                if choice.finish_reason == "abort":
                    self.error = b"aborted"
                    continue
                if choice.token_ids:
                    ids += choice.token_ids
                    self.tokens += len(choice.token_ids)
                elif choice.text:
                    self.tokens += 1
                self.trace.add(choice.text, choice.token_ids)
                texts.append(self._delivered(choice))
                if self.is_stopped:
                    return "".join(texts), tuple(ids)
        return "".join(texts), tuple(ids)

    def _delivered(self, choice: TracedChoice) -> str:
        """The text of a choice to deliver now, and whether it ends the stream."""
        text, found = choice.text or "", None
        if self.stops is not None:
            text, found = self.stops.push(text, self._resumed_tokens + self.tokens)
        if found is not None:
            self.finish, self.stop_reason, self.is_stopped = FinishReason.STOP, found, True
        elif choice.finish_reason is not None:
            self.finish, self.stop_reason = to_finish_reason(choice.finish_reason), choice.stop_reason
            if self.stops is not None:
                text += self.stops.finish()
        return text


def text_of(events: bytes) -> str:
    """The text of complete events."""
    texts: list[str] = []
    for event in events.split(b"\n\n"):
        data = data_of(event)
        if data and data != b"[DONE]":
            for choice in _decoder.decode(data).choices:
                texts.append((choice.text if choice.delta is None else choice.delta.content) or "")
    return "".join(texts)


def _has_non_text(delta: TracedDelta) -> bool:
    return any(
        is_present(raw)
        for raw in (delta.reasoning, delta.reasoning_content, delta.tool_calls, delta.function_call, delta.refusal)
    )
