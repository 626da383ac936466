"""Stop strings of a job that goes on elsewhere, looked for across the point where it broke off.

An engine looks for stop strings in what it writes itself, and while one may still be completed it holds text back: as
many characters as the longest has, less one (vLLM's rule). So an attempt that broke off has delivered less text than
its token ids stand for, and a stop string may begin before the break and end behind it. The server that goes on is
therefore sent no stop strings. They are looked for here, by the same rule, in the text that went before and the text
that comes, and the text that had been held back is delivered first.
"""

from collections.abc import Sequence

import msgspec

from inferry.domain.jobs import InferenceJob, ResumePoint

COMPARED_CHARS = 64
"""How much of what was delivered is compared with what the ids read as."""

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class StopMatcher:
    """Text after a break, as an undisturbed engine would have delivered it.

    `before` is the end of the text so far, of which the last `unsent` characters have not been delivered. Law: the
    pieces joined are the text from there on, cut where the stop string that is complete first begins (or ends, where
    it is part of the output); of two that end together, the first of the list counts.
    """

    __slots__ = ("_delivered", "_held_chars", "_includes_stop", "_max_stop_chars", "_min_tokens", "_stops", "_text")

    def __init__(
        self, stops: Sequence[str], before: str, unsent: int, *, includes_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._stops = tuple(stops)
        self._max_stop_chars = max(map(len, stops))
        self._text = before
        self._delivered = len(before) - unsent
        self._includes_stop = includes_stop
        self._held_chars = held_back_chars(stops, includes_stop=includes_stop)
        self._min_tokens = min_tokens

    def push(self, text: str, tokens: int) -> tuple[str, str | None]:
        """More text, with which there are `tokens` in all: what to deliver, and the stop string that ends it."""
        start = len(self._text)
        self._text += text
        if text and tokens > self._min_tokens:
            found: tuple[int, int, str] | None = None
            for stop in self._stops:
                at = self._text.find(stop, max(0, start - len(stop) + 1))
                if at >= 0 and (found is None or at + len(stop) < found[0]):
                    found = (at + len(stop), at, stop)
            if found is not None:
                end = found[0] if self._includes_stop else found[1]
                piece = self._text[self._delivered : end]
                self._delivered = len(self._text)
                return piece, found[2]
        piece = self._take(len(self._text) - self._held_chars)
        dropped = min(self._delivered, len(self._text) - self._max_stop_chars + 1)
        if dropped > 0:
            self._text = self._text[dropped:]
            self._delivered -= dropped
        return piece, None

    def finish(self) -> str:
        """What is left, at the end of the output."""
        return self._take(len(self._text))

    @property
    def unsent(self) -> str:
        return self._text[self._delivered :]

    def _take(self, end: int) -> str:
        if end <= self._delivered:
            return ""
        piece = self._text[self._delivered : end]
        self._delivered = end
        return piece


def held_back_chars(stops: Sequence[str], *, includes_stop: bool) -> int:
    """How many characters an engine holds back for its stop strings."""
    return 0 if includes_stop else max(map(len, stops), default=1) - 1


def resume_stop_matcher(job: InferenceJob, resume_point: ResumePoint, text: str) -> StopMatcher | None:
    """Where the job goes on, with `text` as the end of its output so far; None where that is not what was delivered.

    What an earlier attempt had delivered it may say itself (`resume_point.unsent`); an engine's own attempt follows the
    rule.
    """
    stops = job.payload.sampling.stop
    fields = _fields_decoder.decode(job.payload.body)
    includes_stop = fields.get("include_stop_str_in_output")
    includes_stop_value = includes_stop is not None and bytes(includes_stop) == b"true"
    min_tokens_field = fields.get("min_tokens")
    if resume_point.unsent is None:
        unsent = min(len(text), held_back_chars(stops, includes_stop=includes_stop_value))
    elif text.endswith(resume_point.unsent):
        unsent = len(resume_point.unsent)
    else:
        return None
    delivered = text[: len(text) - unsent]
    if resume_point.tail and not _ends_match(delivered, resume_point.tail):
        return None
    min_tokens = msgspec.json.decode(min_tokens_field, type=int | None) if min_tokens_field is not None else None
    return StopMatcher(stops, text, unsent, includes_stop=includes_stop_value, min_tokens=min_tokens or 0)


def _ends_match(delivered: str, tail: str) -> bool:
    """Whether both end alike, as far as both are known."""
    length = min(len(delivered), len(tail), COMPARED_CHARS)
    return delivered[len(delivered) - length :] == tail[len(tail) - length :]
