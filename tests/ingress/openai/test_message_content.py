"""Messages without content are refused where OpenAI refuses them, and accepted for roles that may have none."""

from typing import Any

import pytest

from support.scripted_gateway import ScriptedGateway
from support.serving import post

CHAT = "/v1/chat/completions"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def asked(gateway: ScriptedGateway, *messages: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    status, _, body = post(gateway.url, CHAT, {"model": "m", "messages": list(messages)})
    return status, body


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool"])
@pytest.mark.parametrize("message", [{}, {"content": None}], ids=["missing", "null"])
def test_a_message_that_needs_content_is_refused_without_it(
    scripted: ScriptedGateway, role: str, message: dict[str, Any]
) -> None:
    first = {"role": "user", "content": "hello"}
    status, body = asked(scripted, first, {"role": role, "tool_call_id": "c1", **message})
    assert status == 400
    assert (body["error"]["code"], body["error"]["param"]) == ("invalid_request", "messages[1].content")


@pytest.mark.parametrize("more", [{"tool_calls": []}, {"function_call": None}, {"refusal": "no"}, {}])
def test_an_answer_without_content_may_be_sent_back(scripted: ScriptedGateway, more: dict[str, Any]) -> None:
    assistant = {"role": "assistant", "content": None, **more}
    status, _ = asked(scripted, {"role": "user", "content": "hello"}, assistant, {"role": "user", "content": ""})
    assert status == 200
