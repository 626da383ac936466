"""Which messages must have content."""

from inferry.domain.errors import InvalidRequest
from inferry.ingress.wire import MISSING, MessageShape

_MAY_SAY_NOTHING = frozenset({"assistant", "function"})
"""An answer that is sent back may be tool calls or a refusal alone; the result of a function may be null."""


def check_contents(messages: list[MessageShape]) -> None:
    """Refuse messages whose content is null or missing, but for the roles that may have none."""
    length = len(MISSING)
    for index, message in enumerate(messages):
        content = message.content
        if len(content) == length and content == MISSING and message.role not in _MAY_SAY_NOTHING:
            param = f"messages[{index}].content"
            said = "is required" if content is MISSING else "must be text or a list of parts, got null"
            raise InvalidRequest(f"`{param}` {said}", param=param)
