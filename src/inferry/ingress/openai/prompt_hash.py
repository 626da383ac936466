"""A checksum of a prompt, for grouping calls with equal prompts."""

from typing import Final
from zlib import crc32

from msgspec import Raw

from inferry.ingress.openai.request_schema import ChatCompletionRequest, CompletionRequest

HASHED_TAIL_BYTES: Final = 8192
"""Bytes at either end of a long text that enter the checksum."""


def prompt_hash(wire: ChatCompletionRequest | CompletionRequest, size: int) -> str:
    """Equal for equal prompts to one model, whatever else the bodies hold. `size` is that of the whole body.

    A hint for grouping, not a proof of identity: a checksum, which covers only the ends and the length of a long text.
    """
    found = crc32(wire.model.encode())
    if isinstance(wire, CompletionRequest):
        found = _checksum(wire.prompt, found)
    elif size <= 2 * HASHED_TAIL_BYTES:  # so every message is short
        for message in wire.messages:
            found = crc32(message.content, (found + len(message.role)) & 0xFFFFFFFF)
    else:
        for message in wire.messages:
            found = _checksum(message.content, found + len(message.role))
    return f"{found:08x}"


def _checksum(raw: Raw, crc: int) -> int:
    view = memoryview(raw)
    if len(view) <= 2 * HASHED_TAIL_BYTES:
        return crc32(view, crc & 0xFFFFFFFF)
    crc = crc32(b"%d" % len(view), crc & 0xFFFFFFFF)
    return crc32(view[-HASHED_TAIL_BYTES:], crc32(view[:HASHED_TAIL_BYTES], crc))
