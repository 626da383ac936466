"""Validation of message contents."""

from typing import Final

from inferry.domain.errors import InvalidRequest
from inferry.ingress.openai.request_schema import MISSING_RAW, MessageSchema

_ROLES_WITHOUT_CONTENT: Final = frozenset({"assistant", "function"})
"""An assistant message may consist of tool calls or a refusal only; the result of a function may be null."""


def check_contents(messages: list[MessageSchema]) -> None:
    """Refuse messages without content, except for roles that may have none."""
    length = len(MISSING_RAW)
    for index, message in enumerate(messages):
        content = message.content
        if len(content) == length and content == MISSING_RAW and message.role not in _ROLES_WITHOUT_CONTENT:
            param = f"messages[{index}].content"
            description = "is required" if content is MISSING_RAW else "must be text or a list of parts, got null"
            raise InvalidRequest(f"`{param}` {description}", param=param)
