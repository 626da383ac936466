"""A message of the assistant: its blocks, its stop reason and its usage."""

from typing import Any

import msgspec
from msgspec import Raw

from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane
from inferry.ingress.chat_items import Arguments, Item, Reasoning, Refusal, Text, ToolCall

_TIERS = {Lane.P0: "priority", Lane.P1: "standard", Lane.P2: "batch"}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class Message:
    """Collects the items of a whole answer."""

    def __init__(self, job: InferenceJob) -> None:
        self._job = job
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._has_tool_calls = False

    def add(self, item: Item) -> None:
        if isinstance(item, Arguments):
            self._texts.append(item.text)
            return
        self._end_block()
        if isinstance(item, ToolCall):
            self._has_tool_calls = True
            self._blocks.append({"type": "tool_use", "id": item.id, "name": item.name, "input": {}})
        elif isinstance(item, Reasoning):
            self._blocks.append({"type": "thinking", "thinking": item.text, "signature": signature(self._job)})
        elif isinstance(item, Text | Refusal):
            self._blocks.append({"type": "text", "text": item.text})

    def render(self, finish: str, stop: str | int | None, usage: dict[str, Any]) -> dict[str, Any]:
        """The message. `finish`, `stop` and `usage` are those of the chat completion."""
        self._end_block()
        reason, sequence = stop_reason(finish, stop, self._has_tool_calls)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        counts = usage_object(self._job, usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0))
        return message_object(self._job, self._blocks or [EMPTY_BLOCK], reason, sequence, counts)

    def _end_block(self) -> None:
        """Set the arguments of the tool call that was added last."""
        if self._texts:
            self._blocks[-1]["input"] = tool_input("".join(self._texts))
            self._texts.clear()


EMPTY_BLOCK = {"type": "text", "text": ""}
"""The content of an answer without any: some clients expect at least one block."""


def message_object(
    job: InferenceJob, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": f"msg_{job.job_id}",
        "type": "message",
        "role": "assistant",
        "model": job.route.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage,
    }


def usage_object(job: InferenceJob, prompt: int, cached: int, output: int) -> dict[str, Any]:
    """`input_tokens` are without the cached ones."""
    return {
        "input_tokens": max(0, prompt - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
        "service_tier": _TIERS[job.lane],
    }


def stop_reason(finish: str, stop: str | int | None, has_tool_calls: bool) -> tuple[str, str | None]:
    """The stop reason and the stop sequence that was matched. Engines end a forced tool call with `stop`."""
    found = _STOP_REASONS.get(finish)
    if found is not None:
        return found, None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return "tool_use" if has_tool_calls else "end_turn", None


def signature(job: InferenceJob) -> str:
    """The signature of thinking blocks. Clients send it back, and it is not checked."""
    return job.job_id


def tool_input(arguments: str) -> object:
    """The arguments as an object. JSON that is invalid or cut off is wrapped, as Anthropic's documentation suggests."""
    try:
        decoded = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {"INVALID_JSON": arguments}
    if isinstance(decoded, dict):
        return Raw(arguments.encode())
    return {} if decoded is None else {"INVALID_JSON": arguments}
