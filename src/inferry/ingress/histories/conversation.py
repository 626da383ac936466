"""Where a conversation is cut, and how it reads with a summary. Pure."""

from hashlib import blake2b
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

_SYSTEM = ("system", "developer")


class _ToolCall(Struct):
    id: str | None = None


class _Head(Struct):
    """What decides where a conversation may be cut."""

    role: str = ""
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


_head_decoder = msgspec.json.Decoder(_Head)


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
    """How many messages a summary may cover, so that at least `keep_messages` remain.

    The rest begins with a user's message, or with the assistant's next step after results of tools. A result stays with
    its call. None where nothing beyond the first `after` messages can be covered.
    """
    heads = [_head(message) for message in messages]
    calls = _calls_of_results(heads)
    first_needed = len(messages)
    for index in range(len(messages) - 1, max(after, system_messages(messages)), -1):
        first_needed = min(first_needed, calls.get(index, index))
        if index <= len(messages) - keep_messages and first_needed == index and _may_begin_rest(heads, index):
            return index
    return None


def _calls_of_results(heads: list[_Head]) -> dict[int, int]:
    """By the index of a tool's result, the index of the message with its call. An id may repeat: the latest counts."""
    called_at: dict[str | None, int] = {}
    found: dict[int, int] = {}
    for index, head in enumerate(heads):
        called_at |= {call.id: index for call in head.tool_calls or ()}
        if head.role == "tool":
            found[index] = called_at.get(head.tool_call_id, index)
    return found


def _may_begin_rest(heads: list[_Head], index: int) -> bool:
    # An answer to a user stays with the question. An agent's next step has none: its loop may have one question only.
    return heads[index].role == "user" or (heads[index].role == "assistant" and heads[index - 1].role == "tool")


def system_messages(messages: list[Raw]) -> int:
    """The number of leading system messages, which no summary replaces."""
    for index, message in enumerate(messages):
        if _head(message).role not in _SYSTEM:
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


def _head(message: Raw) -> _Head:
    try:
        return _head_decoder.decode(message)
    except msgspec.MsgspecError:
        return _Head()
