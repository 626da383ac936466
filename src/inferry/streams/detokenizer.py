"""Token ids in, text out: one assembler per job, based on `Tokenizer.decode` alone."""

from collections.abc import Sequence

from inferry.domain.ports import TokenDecoder
from inferry.streams.stop_strings import StopStrings

_UNFINISHED = "\ufffd"
# A character has at most four bytes, so at most three trailing replacement characters may still become one.
_MAX_UNCERTAIN_CHARS = 3
_CONTEXT_TOKENS = 4
_WINDOW_TOKENS = 16


class Assembler:
    """Text of a growing list of tokens, emitted as soon as it is certain, up to the first stop string.

    Invariant: the emitted text is the decoded text of all tokens, cut before the stop string that is complete first
    (of two that end together, the longer). Held back is only an incomplete character or the beginning of a stop string.
    A complete character stays, even where decoding all tokens would replace it because of later bytes.
    """

    def __init__(self, tokenizer: TokenDecoder, stop: tuple[str, ...] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)

    @property
    def matched(self) -> str | None:
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        return self._stops.push(self._detokenizer.push(token_ids))

    def finish(self) -> str:
        text, stopped = self._stops.push(self._detokenizer.finish())
        return text if stopped else text + self._stops.finish()


class Detokenizer:
    """Decodes a short window at the end of the tokens, so that a token costs the same however long the output is.

    The window starts a few tokens before the first one not yet emitted: decoders treat the start of a text specially,
    for example drop a space, and that must not happen in the middle.

    Decoders that fall back to bytes read a run of byte tokens as a whole: with one byte of the next character all
    characters before it become unreadable. Emitted text stands, and the tokens after it are decoded alone.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted = ""  # the part of the window's text that is emitted
        self._settled_tokens = 0  # tokens of the window whose text is fully emitted

    def push(self, token_ids: Sequence[int]) -> str:
        window = self._window
        window.extend(token_ids)
        text = self._tokenizer.decode(window)
        if text.endswith(_UNFINISHED) and len(token_ids) > 1:
            # Only decoding token by token shows how much is incomplete.
            del window[-len(token_ids) :]
            return "".join([self.push((token,)) for token in token_ids])
        if not text.startswith(self._emitted):
            del window[: self._settled_tokens]
            self._settled_tokens, self._emitted = 0, ""
            text = self._tokenizer.decode(window)
        certain = len(text)
        if text.endswith(_UNFINISHED):
            open_end = len(text) - len(text.rstrip(_UNFINISHED))
            certain -= min(open_end, _MAX_UNCERTAIN_CHARS)
        else:
            self._settled_tokens = len(window)
        if certain <= len(self._emitted):
            new_text = ""
        else:
            new_text = text[len(self._emitted) : certain]
            self._emitted = text[:certain]
        if len(window) >= _WINDOW_TOKENS:
            self._slide_window(text)
        return new_text

    def finish(self) -> str:
        text = self._tokenizer.decode(self._window)
        new_text = text[len(self._emitted) :]
        self._window, self._emitted, self._settled_tokens = [], "", 0
        return new_text

    def _slide_window(self, text: str) -> None:
        """Drop emitted tokens from the window where the remaining text does not change."""
        window, emitted = self._window, len(self._emitted)
        cut = len(window) - _CONTEXT_TOKENS
        if emitted < len(text):
            # The end is incomplete: cut before it, and only if the text does not change.
            while cut > 0 and len(self._tokenizer.decode(window[:cut])) > emitted:
                cut -= 1
        rest = window[cut:]
        tail = self._tokenizer.decode(rest)
        open_text = text[emitted:]
        if cut > 0 and text.endswith(tail) and len(tail) >= len(open_text):
            self._window = rest
            self._settled_tokens = max(0, self._settled_tokens - cut)
            self._emitted = tail[: len(tail) - len(open_text)]
