"""Which messages must have content."""

from inferry.domain.errors import InvalidRequest
from inferry.ingress.openai.request_schema import MISSING_RAW, MessageSchema

_ROLES_WITHOUT_CONTENT = frozenset({"assistant", "function"})
"""An answer that is sent back may be tool calls or a refusal alone; the result of a function may be null."""


def check_contents(messages: list[MessageSchema]) -> None:
    """Refuse messages whose content is null or missing, but for the roles that may have none."""
    length = len(MISSING_RAW)
    for index, message in enumerate(messages):
        content = message.content
        if len(content) == length and content == MISSING_RAW and message.role not in _ROLES_WITHOUT_CONTENT:
            param = f"messages[{index}].content"
            description = "is required" if content is MISSING_RAW else "must be text or a list of parts, got null"
            raise InvalidRequest(f"`{param}` {description}", param=param)
