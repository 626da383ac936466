"""Shape of a server's non-streaming answers: fields, their order, and which are null.

Stream events omit null fields, so an answer assembled from events lacks them. They are restored from the shape of one
non-streaming answer of the same server.
"""

from typing import Any, Final

_PRESENT: Final = ...  # no JSON value decodes to this
_OPTIONAL_FIELDS: Final = frozenset(
    {"token_ids", "prompt_token_ids", "prompt_logprobs", "reasoning", "reasoning_content"}
)
"""Null where they were not requested or written, whatever they were in the answer the shape was taken from."""


def shape_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Fields of an answer in order, null or present, without their values."""
    return {key: None if key in _OPTIONAL_FIELDS else _kind(value) for key, value in answer.items()}


def with_null_fields(answer: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The answer with the shape's null fields added, in the shape's order; unknown fields last."""
    found: dict[str, Any] = {}
    named = 0
    for key, kind in shape.items():
        value = answer.get(key, _PRESENT)
        if value is not _PRESENT:
            named += 1
            found[key] = value if kind is None or kind is _PRESENT else _with_null_fields(value, kind)
        elif kind is None:
            found[key] = None
    if named != len(answer):
        for key, value in answer.items():
            if key not in shape:
                found[key] = value
    return found


def _kind(value: Any) -> Any:
    if isinstance(value, dict):
        return shape_of(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [shape_of(value[0])]
    return None if value is None else _PRESENT


def _with_null_fields(value: Any, kind: Any) -> Any:
    if isinstance(value, dict) and isinstance(kind, dict):
        return with_null_fields(value, kind)
    if isinstance(value, list) and isinstance(kind, list):
        return [with_null_fields(one, kind[0]) if isinstance(one, dict) else one for one in value]
    return value
