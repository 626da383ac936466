"""Deadlines of running calls over HTTP: an error status before the first byte, in-band after it."""

from pathlib import Path
from typing import Any

import pytest

from support.scripted_gateway import ScriptedGateway
from support.serving import post

CALL: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
WORDS = tuple(f" word{number}" for number in range(100))


@pytest.mark.parametrize(
    ("server", "headers", "code"),
    [
        ({}, {"x-inferry-deadline-ms": "300"}, "deadline_exceeded"),
        ({"request_timeout_s": 0.3}, {}, "request_timeout"),
    ],
)
def test_a_call_that_runs_too_long_is_ended(
    tmp_path: Path, server: dict[str, float], headers: dict[str, str], code: str
) -> None:
    with ScriptedGateway(tmp_path, {"server": server}, words=WORDS, pause_s=0.05) as gateway:
        status, _, body = post(gateway.url, "/v1/chat/completions", CALL, headers)
        assert (status, body["error"]["code"]) == (504, code)
        status, _, events = post(gateway.url, "/v1/chat/completions", CALL | {"stream": True}, headers)
        assert status == 200
        assert "word0" in events
        assert code in events.split("data: ")[-1] or code in events.split("data: ")[-2]
        assert gateway.service.gateway.in_flight == 0
