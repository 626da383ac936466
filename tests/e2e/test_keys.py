"""Keys over HTTP: authentication, and no trace of keys or prompts in logs, errors or files."""

import logging
from pathlib import Path

import openai
import pytest

from inferry.ledger.stores.opening import open_queries
from support.scripted_gateway import ScriptedGateway
from support.serving import get, post

CANARY = "zanzibar-canary"
CALL = {"model": "m", "messages": [{"role": "user", "content": CANARY}]}
CHAT = "/v1/chat/completions"


def new_key(gateway: ScriptedGateway, tenant: str = "acme", **more: object) -> str:
    status, _, made = post(gateway.url, "/admin/keys", {"tenant": tenant, **more})
    assert status == 201
    key: str = made["key"]
    return key


def test_a_local_gateway_needs_no_key_until_one_exists(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        assert post(gateway.url, CHAT, CALL)[0] == 200
        key = new_key(gateway)
        status, _, body = post(gateway.url, CHAT, CALL)
        assert (status, body["error"]["code"], body["error"]["type"]) == (
            401,
            "invalid_api_key",
            "authentication_error",
        )
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            assert post(gateway.url, CHAT, CALL, headers)[0] == 200
        assert get(gateway.url, "/health")[0] == 200
        assert get(gateway.url, "/metrics")[0] == 200


def test_the_openai_client_sends_its_key_and_gets_an_error_when_it_is_wrong(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        key = new_key(gateway)
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key) as client:
            answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            assert answer.choices[0].finish_reason
        with (
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key[:-1]) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


def test_the_tenant_is_the_keys_not_the_headers(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        key = new_key(gateway)
        new_key(gateway, "globex")
        bearer = {"authorization": f"Bearer {key}"}
        for name in ("globex", "nobody"):
            status, _, body = post(gateway.url, CHAT, CALL, {**bearer, "x-inferry-tenant": name})
            assert (status, body["error"]["param"]) == (401, "x-inferry-tenant")
            assert name not in str(body)
        assert post(gateway.url, CHAT, CALL, {**bearer, "x-inferry-tenant": "acme"})[0] == 200
    with open_queries(gateway.config.ledger) as ledger:
        assert [(row.tenant, row.key_id) for row in ledger.jobs(limit=10)] == [("acme", key.split("_")[1])]


def test_neither_prompts_nor_secrets_are_in_logs_errors_or_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with ScriptedGateway(tmp_path) as gateway:
        key = new_key(gateway)
        secret = key.rpartition("_")[2]
        wrong = key[:-1] + ("a" if key[-1] != "a" else "b")
        seen = [str(post(gateway.url, CHAT, CALL, {"authorization": f"Bearer {sent}"})) for sent in (key, wrong)]
        seen.append(str(get(gateway.url, "/metrics")))
        seen.append(str(get(gateway.url, "/admin/keys")) + str(get(gateway.url, "/admin/tenants")))
    seen.append(caplog.text)
    for file in tmp_path.iterdir():
        seen.append(file.read_bytes().decode("latin-1"))
    for text in seen[1:]:
        for hidden in (secret, wrong, CANARY):
            assert hidden not in text
