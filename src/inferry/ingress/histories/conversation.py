"""Where a conversation is cut, and how it reads with a summary. Pure."""

from hashlib import blake2b
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

_SYSTEM = ("system", "developer")


class Role(Struct):
    role: str = ""


_role_decoder = msgspec.json.Decoder(Role)


class HistorySettings(Struct, frozen=True, kw_only=True):
    """When and how the history of a model's conversations is summarised. The configuration says what each is for."""

    threshold: float = 0.7
    keep_messages: int = 8
    context_tokens: int | None = None
    summary_model: str | None = None
    max_summary_tokens: int = 1024
    prompt: str = ""
    wait_s: float = 60.0
    ttl_s: float | None = 7 * 86_400.0
    tenants: tuple[str, ...] | None = None


class Summary(NamedTuple):
    """A summary of the first `messages` messages of a conversation; the original is stored under `id`."""

    id: str
    messages: int
    text: str


def cut_at(messages: list[Raw], keep_messages: int, after: int) -> int | None:
    """How many messages a summary may cover, so that at least `keep_messages` remain and the rest begins with a user.

    An answer of a tool stays with its call. None where nothing beyond the first `after` messages can be covered.
    """
    for index in range(len(messages) - keep_messages, max(after, system_messages(messages)), -1):
        if _role(messages[index]) == "user":
            return index
    return None


def system_messages(messages: list[Raw]) -> int:
    """The number of leading system messages, which no summary replaces."""
    for index, message in enumerate(messages):
        if _role(message) not in _SYSTEM:
            return index
    return len(messages)


def prefix_ids(tenant: str, model: str, messages: list[Raw]) -> list[str]:
    """The id of each prefix of the conversation, for one tenant and model: of the first message, of the first two, …"""
    running = blake2b(f"{tenant}\n{model}\n".encode(), digest_size=16)
    found: list[str] = []
    for message in messages:
        data = bytes(message)
        running.update(len(data).to_bytes(8, "big"))
        running.update(data)
        found.append(f"hist_{running.hexdigest()}")
    return found


def with_summary(messages: list[Raw], summary: Summary) -> list[Raw]:
    """The conversation with a marker in place of what the summary covers."""
    start = system_messages(messages)
    covered = summary.messages - start
    marker = {
        "role": "user",
        "content": (
            f"[{covered} earlier messages of this conversation were summarised to save context. "
            f"The original is stored as {summary.id}. Summary:]\n{summary.text}"
        ),
    }
    return [*messages[:start], Raw(msgspec.json.encode(marker)), *messages[summary.messages :]]


def summary_request(messages: list[Raw], known: Summary | None, covered: int, settings: HistorySettings) -> list[Raw]:
    """The messages of the call that makes a summary: the instruction, and the conversation as one text."""
    start = system_messages(messages)
    lines = [bytes(one).decode() for one in messages[start if known is None else known.messages : covered]]
    if known is not None:
        lines.insert(0, f"Summary of what came before: {known.text}")
    asked = [{"role": "system", "content": settings.prompt}, {"role": "user", "content": "\n".join(lines)}]
    return [Raw(msgspec.json.encode(one)) for one in asked]


def _role(message: Raw) -> str:
    try:
        return _role_decoder.decode(message).role
    except msgspec.MsgspecError:
        return ""
