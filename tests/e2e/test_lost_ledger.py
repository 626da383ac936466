"""The database is deleted, moved or replaced at runtime: the gateway notices and never turns authentication off."""

import time
from pathlib import Path

import pytest

from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.opening import open_queries
from inferry.ledger.stores.tenants import TenantStore
from support.scripted_gateway import ScriptedGateway
from support.serving import get, post
from support.waiting import until

CHAT = "/v1/chat/completions"
CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}


def status_of(gateway: ScriptedGateway, key: str | None = None) -> tuple[int, str | None]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    status, _, body = post(gateway.url, CHAT, CALL, headers)
    return status, body["error"]["code"] if "error" in body else None


def is_ready(gateway: ScriptedGateway) -> bool:
    return get(gateway.url, "/ready")[0] == 200


def delete(directory: Path) -> None:
    for file in directory.glob("ledger.db*"):
        file.unlink()


def new_key(url: str) -> str:
    """What `inferry keys create` does, in a database of its own making where there is none."""
    store = TenantStore(url)
    made = store.create_key("acme", now=time.time(), with_tenant=True)
    store.close()
    return made.text


def keys_in(url: str) -> list[str]:
    """The keys of the calls that the ledger has."""
    with open_queries(url) as ledger:
        return [row.key_id for row in ledger.jobs(limit=1000) if row.key_id]


def test_a_gateway_without_keys_refuses_calls_when_its_database_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        url = gateway.config.ledger
        assert status_of(gateway) == (200, None)
        delete(tmp_path)
        until(lambda: not is_ready(gateway))
        status, headers, body = post(gateway.url, CHAT, CALL)
        assert (status, body["error"]["code"]) == (503, "ledger_unavailable")
        assert int({name.lower(): value for name, value in headers.items()}["retry-after"]) >= 1
        assert str(tmp_path) not in str(body)
        ready = get(gateway.url, "/ready")[2]
        assert (ready["status"], "deleted" in ready["reason"]) == ("ledger_unavailable", True)
        assert "inferry_ledger_up 0.0" in get(gateway.url, "/metrics")[2]
        assert get(gateway.url, "/health")[0] == 200
        assert get(gateway.url, "/admin/keys")[0] == 503
        key = new_key(url)
        until(lambda: is_ready(gateway))
        assert status_of(gateway) == (401, "invalid_api_key")
        assert status_of(gateway, key) == (200, None)
        assert "inferry_ledger_up 1.0" in get(gateway.url, "/metrics")[2]
    assert caplog.text.count("the ledger's database file is missing") == 1
    assert caplog.text.count("replaced by another file") == 1
    assert keys_in(url) == [key.split("_")[1]]


def test_a_replacement_database_with_keys_turns_authentication_on(
    tmp_path: Path,
) -> None:
    key = new_key(f"sqlite:///{tmp_path / 'other.db'}")
    with ScriptedGateway(tmp_path) as gateway:
        assert status_of(gateway) == (200, None)
        (tmp_path / "other.db").replace(tmp_path / "ledger.db")
        until(lambda: status_of(gateway)[0] == 401)
        assert status_of(gateway, key) == (200, None)
    assert keys_in(gateway.config.ledger) == [key.split("_")[1]]


def test_known_keys_stay_valid_while_the_database_is_missing_and_no_row_is_lost(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        key = new_key(gateway.config.ledger)
        until(lambda: status_of(gateway)[0] == 401)
        away = tmp_path / "away"
        away.mkdir()
        for file in tmp_path.glob("ledger.db*"):
            file.replace(away / file.name)
        until(lambda: not is_ready(gateway))
        assert status_of(gateway, key) == (200, None)
        assert status_of(gateway) == (401, "invalid_api_key")
        for file in away.iterdir():
            file.replace(tmp_path / file.name)
        until(lambda: is_ready(gateway))
        assert status_of(gateway, key) == (200, None)
    assert keys_in(gateway.config.ledger) == [key.split("_")[1]] * 2


def test_keys_of_a_replaced_database_are_refused(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        key = new_key(gateway.config.ledger)
        until(lambda: status_of(gateway)[0] == 401)
        AttemptStore(f"sqlite:///{tmp_path / 'other.db'}").close()
        (tmp_path / "other.db").replace(tmp_path / "ledger.db")
        until(lambda: status_of(gateway, key)[0] == 401)
        assert status_of(gateway)[0] == 401


def test_an_invalid_file_in_place_of_the_ledger_counts_as_missing(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path) as gateway:
        (tmp_path / "junk").write_bytes(b"no database" * 1000)
        (tmp_path / "junk").replace(tmp_path / "ledger.db")
        until(lambda: not is_ready(gateway))
        assert status_of(gateway) == (503, "ledger_unavailable")
        delete(tmp_path)
        AttemptStore(gateway.config.ledger).close()
        until(lambda: is_ready(gateway))
        assert status_of(gateway) == (200, None)


def test_auth_off_stays_off_without_a_database(tmp_path: Path) -> None:
    with ScriptedGateway(tmp_path, {"auth": {"mode": "off"}}) as gateway:
        delete(tmp_path)
        until(lambda: not is_ready(gateway))
        assert status_of(gateway) == (200, None)
        AttemptStore(gateway.config.ledger).close()
        until(lambda: is_ready(gateway))
    with open_queries(gateway.config.ledger) as ledger:
        assert len(ledger.jobs()) == 1


def test_spending_survives_a_replaced_database_and_a_restart(tmp_path: Path) -> None:
    config = {"tenants": {"default": {"day_token_ceiling": 200}}}
    with ScriptedGateway(tmp_path, config) as gateway:
        answers = 0
        while status_of(gateway) == (200, None):
            answers += 1
        assert answers >= 1
        AttemptStore(f"sqlite:///{tmp_path / 'other.db'}").close()
        (tmp_path / "other.db").replace(tmp_path / "ledger.db")
        until(lambda: gateway.service.tenants.manager.generation == 1)
        assert status_of(gateway) == (402, "tenant_budget_exhausted")
    with ScriptedGateway(tmp_path, config) as gateway:
        assert status_of(gateway) == (402, "tenant_budget_exhausted")
