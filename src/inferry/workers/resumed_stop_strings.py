"""Stop strings of a resumed job, matched across its resume point.

An engine matches stop strings in its own output only. While one may still be completed it holds text back: as many
characters as the longest stop string has, less one (vLLM's rule). So a lost attempt has delivered less text than its
token ids stand for, and a stop string may begin before the resume point and end after it. The resumed request
therefore has no stop strings. This module matches them by the same rule over the text before and after the resume
point, and delivers the text held back first.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from inferry.domain.jobs import InferenceJob, ResumePoint

COMPARED_CHARS: Final = 64
"""Characters of the delivered text that are compared with the detokenised text."""

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class StopMatcher:
    """Delivers text after a resume point as an undisturbed engine would have done.

    `before` is the end of the text so far, of which the last `unsent` characters were not delivered. Rule: the joined
    pieces are the text from there on, cut at the start of the stop string that is complete first (or at its end, where
    it is part of the output). Of two that end together, the first in the list counts.
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
        """Add text, with `tokens` in total; return the text to deliver and the stop string that was matched."""
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
        """The text held back, at the end of the output."""
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
    """Characters that an engine holds back for its stop strings."""
    return 0 if includes_stop else max(map(len, stops), default=1) - 1


def resume_stop_matcher(job: InferenceJob, resume_point: ResumePoint, text: str) -> StopMatcher | None:
    """A matcher for the resumed job. `text` is the end of its output so far.

    Returns None where `text` differs from the delivered text. The text held back is `resume_point.unsent`, all of
    `text` where none was delivered, or else follows from the rule.
    """
    stops = job.payload.sampling.stop
    fields = _fields_decoder.decode(job.payload.body)
    includes_stop = fields.get("include_stop_str_in_output")
    includes_stop_value = includes_stop is not None and bytes(includes_stop) == b"true"
    min_tokens_field = fields.get("min_tokens")
    if resume_point.unsent is None and resume_point.tail == "":
        unsent = len(text)
    elif resume_point.unsent is None:
        unsent = min(len(text), held_back_chars(stops, includes_stop=includes_stop_value))
    elif text.endswith(resume_point.unsent):
        unsent = len(resume_point.unsent)
    else:
        return None
    if resume_point.tail and not text[: len(text) - unsent].endswith(resume_point.tail):
        return None
    min_tokens = msgspec.json.decode(min_tokens_field, type=int | None) if min_tokens_field is not None else None
    return StopMatcher(stops, text, unsent, includes_stop=includes_stop_value, min_tokens=min_tokens or 0)
