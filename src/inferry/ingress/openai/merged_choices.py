"""Answers to several prompts as one answer: choice j of prompt i has the index i · n + j, and usage is the sum."""

from typing import Any, Final

import msgspec

from inferry.domain.errors import WorkerLost

_decode = msgspec.json.decode
_encode = msgspec.json.encode
_DONE: Final = b"[DONE]"


class MergedChoices:
    """Renumbers the choices of one call. `choices` is the number of choices per prompt, OpenAI's `n`."""

    def __init__(self, answer_id: str, choices: int) -> None:
        self._id = answer_id
        self._choices = choices
        self._usage: dict[str, Any] = {}
        self._usage_event: dict[str, Any] | None = None

    def events(self, prompt: int, events: bytes) -> bytes:
        """Complete server-sent events of a prompt as events of the call. Those with usage alone are kept back."""
        written: list[bytes] = []
        for line in events.split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == _DONE:
                continue
            event = _object(data)
            choices = event.get("choices")
            if choices:
                self._renumber(prompt, choices)
            elif event.get("usage") is not None:
                add_usage(self._usage, event["usage"])
                self._usage_event = event
                continue
            if "choices" in event:  # else it is an error
                event["id"] = self._id
            written.append(b"data: %b\n\n" % _encode(event))
        return b"".join(written)

    def usage_event(self) -> bytes:
        """The usage of all prompts together; empty where none was reported."""
        if self._usage_event is None:
            return b""
        return b"data: %b\n\n" % _encode(self._usage_event | {"id": self._id, "choices": [], "usage": self._usage})

    def body(self, bodies: list[bytes]) -> bytes:
        """The answers to all prompts, in their order, as one."""
        merged: dict[str, Any] = {}
        choices: list[Any] = []
        usage: dict[str, Any] = {}
        for prompt, body in enumerate(bodies):
            answer = _object(body)
            found = answer.get("choices") or []
            self._renumber(prompt, found)
            choices += found
            add_usage(usage, answer.get("usage"))
            for key, value in answer.items():
                merged.setdefault(key, value)
        return _encode(merged | {"id": self._id, "choices": choices, "usage": usage or None})

    def _renumber(self, prompt: int, choices: object) -> None:
        if not isinstance(choices, list):
            raise WorkerLost("the worker sent choices that are no list")
        for choice in choices:
            index = choice.get("index", 0) if isinstance(choice, dict) else None
            if type(index) is not int or not 0 <= index < self._choices:
                raise WorkerLost(f"the worker sent a choice that is none of the {self._choices} requested")
            choice["index"] = prompt * self._choices + index


def add_usage(total: dict[str, Any], usage: object) -> None:
    """Add the counts of a usage object, nested ones included."""
    if not isinstance(usage, dict):
        return
    for key, value in usage.items():
        known = total.get(key)
        if isinstance(value, dict):
            if not isinstance(known, dict):
                known = total[key] = {}
            add_usage(known, value)
        elif isinstance(value, int | float):
            total[key] = value + known if isinstance(known, int | float) else value
        else:
            total.setdefault(key, value)


def _object(data: bytes) -> dict[str, Any]:
    try:
        return _decode(data, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise WorkerLost("the worker sent an answer that is not a JSON object") from None
