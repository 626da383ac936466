"""Log probabilities of an answer's text, as a chat completion has them: one entry per token of the whole output."""

from typing import Final

import msgspec
from msgspec import UNSET

from inferry.domain.errors import WorkerLost
from inferry.ingress.chunk_schema import Choice, Logprobs, TokenLogprob

_decoder: Final = msgspec.json.Decoder(Logprobs | None)


def logprobs_of(choice: Choice) -> tuple[TokenLogprob, ...]:
    """The entries of a choice. Raises WorkerLost."""
    if choice.logprobs is UNSET:
        return ()
    try:
        found: Logprobs | None = _decoder.decode(choice.logprobs)
    except msgspec.MsgspecError:
        raise WorkerLost("the worker sent malformed log probabilities") from None
    return () if found is None or found.content is None else tuple(found.content)


def entries_of_text(text: str, entries: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
    """The entries of the tokens that the text consists of, without those of reasoning, tool calls and markers.

    All entries where the tokens do not spell the text, as where their own texts are parts of characters.
    """
    start = "".join([entry.token for entry in entries]).rfind(text)
    if start < 0:
        return entries
    end = start + len(text)
    found: list[TokenLogprob] = []
    at = 0
    for entry in entries:
        before = at
        at += len(entry.token)
        # A token without text is a part of the next character.
        if start <= before < end or before < start < at:
            found.append(entry)
    return tuple(found)
