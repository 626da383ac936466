"""Log probabilities as the Responses API writes them: with the bytes of tokens in items, without them in events."""

from collections.abc import Sequence
from typing import Any

import msgspec

from inferry.ingress.chunk_schema import TokenLogprob, TopLogprob


def event_logprobs(entries: Sequence[TokenLogprob]) -> bytes:
    """The entries in an event, as JSON."""
    return msgspec.json.encode([_entry(one) | {"top_logprobs": list(map(_entry, one.top_logprobs))} for one in entries])


def item_logprobs(entries: Sequence[TokenLogprob]) -> bytes:
    """The entries in a content part, as JSON."""
    return msgspec.json.encode(
        [_with_bytes(one) | {"top_logprobs": list(map(_with_bytes, one.top_logprobs))} for one in entries]
    )


def _entry(one: TopLogprob) -> dict[str, Any]:
    return {"token": one.token, "logprob": one.logprob}


def _with_bytes(one: TopLogprob) -> dict[str, Any]:
    given = list(one.token.encode("utf-8", "replace")) if one.bytes is None else one.bytes
    return {"token": one.token, "bytes": given, "logprob": one.logprob}
