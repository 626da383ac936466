"""A gateway with an in-memory ledger: keys are created over HTTP and live as long as the process."""

from pathlib import Path

from support.scripted_gateway import ScriptedGateway
from support.serving import get, post

CHAT = "/v1/chat/completions"
CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}


def test_keys_of_an_in_memory_gateway_are_created_over_http_and_leave_no_file(tmp_path: Path) -> None:
    config = {"ledger": "sqlite:///:memory:", "tenants": {"acme": {"day_token_ceiling": 1_000}}}
    with ScriptedGateway(tmp_path, config) as gateway:
        assert post(gateway.url, CHAT, CALL)[0] == 200
        status, _, made = post(gateway.url, "/admin/keys", {"tenant": "acme"})
        assert status == 201
        assert post(gateway.url, CHAT, CALL)[0] == 401
        assert post(gateway.url, CHAT, CALL, {"authorization": f"Bearer {made['key']}"})[0] == 200
        assert get(gateway.url, "/ready")[0] == 200
    assert list(tmp_path.iterdir()) == []
