"""Stop strings of a job that goes on elsewhere, looked for across the point where it broke off.

An engine looks for stop strings in what it writes itself, and while one may still be completed it holds text back: as
many characters as the longest has, less one (vLLM's rule). So an attempt that broke off has delivered less text than
its token ids stand for, and a stop string may begin before the break and end behind it. The server that goes on is
therefore sent no stop strings. They are looked for here, by the same rule, in the text that went before and the text
that comes, and the text that had been held back is delivered first.
"""

from collections.abc import Sequence

import msgspec

from inferry.domain.jobs import InferenceJob, SoFar

VERIFIED_CHARS = 64
"""How much of what was delivered is compared with what the ids read as."""

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class StopSeam:
    """Text after a break, as an undisturbed engine would have delivered it.

    `before` is the end of the text so far, of which the last `unsent` characters have not been delivered. Law: the
    pieces joined are the text from there on, cut where the stop string that is complete first begins (or ends, where
    it is part of the output); of two that end together, the first of the list counts.
    """

    __slots__ = ("_given", "_hold", "_includes", "_least_tokens", "_longest", "_stops", "_text")

    def __init__(
        self, stops: Sequence[str], before: str, unsent: int, *, includes: bool = False, least_tokens: int = 0
    ) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._text = before
        self._given = len(before) - unsent
        self._includes = includes
        self._hold = held_back(stops, includes=includes)
        self._least_tokens = least_tokens

    def push(self, text: str, tokens: int) -> tuple[str, str | None]:
        """More text, with which there are `tokens` in all: what to deliver, and the stop string that ends it."""
        start = len(self._text)
        self._text += text
        if text and tokens > self._least_tokens:
            found: tuple[int, int, str] | None = None
            for stop in self._stops:
                at = self._text.find(stop, max(0, start - len(stop) + 1))
                if at >= 0 and (found is None or at + len(stop) < found[0]):
                    found = (at + len(stop), at, stop)
            if found is not None:
                end = found[0] if self._includes else found[1]
                piece = self._text[self._given : end]
                self._given = len(self._text)
                return piece, found[2]
        piece = self._take(len(self._text) - self._hold)
        behind = min(self._given, len(self._text) - self._longest + 1)
        if behind > 0:
            self._text = self._text[behind:]
            self._given -= behind
        return piece, None

    def finish(self) -> str:
        """What is left, at the end of the output."""
        return self._take(len(self._text))

    @property
    def unsent(self) -> str:
        return self._text[self._given :]

    def _take(self, end: int) -> str:
        if end <= self._given:
            return ""
        piece = self._text[self._given : end]
        self._given = end
        return piece


def held_back(stops: Sequence[str], *, includes: bool) -> int:
    """How many characters an engine holds back for its stop strings."""
    return 0 if includes else max(map(len, stops), default=1) - 1


def seam(job: InferenceJob, so_far: SoFar, text: str) -> StopSeam | None:
    """Where the job goes on, with `text` as the end of its output so far; None where that is not what was delivered.

    What an earlier attempt had delivered it may say itself (`so_far.unsent`); an engine's own attempt follows the rule.
    """
    stops = job.payload.sampling.stop
    fields = _fields_decoder.decode(job.payload.body)
    includes = fields.get("include_stop_str_in_output")
    is_included = includes is not None and bytes(includes) == b"true"
    least = fields.get("min_tokens")
    if so_far.unsent is None:
        unsent = min(len(text), held_back(stops, includes=is_included))
    elif text.endswith(so_far.unsent):
        unsent = len(so_far.unsent)
    else:
        return None
    delivered = text[: len(text) - unsent]
    if so_far.tail and not _agree(delivered, so_far.tail):
        return None
    least_tokens = msgspec.json.decode(least, type=int | None) if least is not None else None
    return StopSeam(stops, text, unsent, includes=is_included, least_tokens=least_tokens or 0)


def _agree(delivered: str, tail: str) -> bool:
    """Whether both end alike, as far as both are known."""
    length = min(len(delivered), len(tail), VERIFIED_CHARS)
    return delivered[len(delivered) - length :] == tail[len(tail) - length :]
