"""Tenants and keys in the ledger's database."""

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inferry.domain.errors import Conflict, NotFound
from inferry.domain.keys import hash_secret, key_status, parse_key
from inferry.domain.lanes import Lane
from inferry.domain.ledger import LedgerUnusable
from inferry.domain.tenants import ApiKey, Limits, Tenant
from inferry.ledger.stores.attempts import AttemptStore
from inferry.ledger.stores.tenants import TenantStore
from support.old_schemas import undo_upgrades

LIMITS = Limits(
    models=("tiny*", "big"),
    max_lane=Lane.P1,
    default_lane=Lane.P2,
    requests_per_minute=60,
    tokens_per_minute=100_000,
    max_concurrent=4,
    run_token_ceiling=50_000,
    run_money_ceiling=1.5,
    day_token_ceiling=1_000_000,
    month_token_ceiling=10_000_000,
    day_money_ceiling=10.0,
    month_money_ceiling=0.1,
)
ACME = Tenant(name="acme", limits=LIMITS, isolation="pool", shadow=True, disabled=True)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def store(ledger_url: str) -> Iterator[TenantStore]:
    opened = TenantStore(ledger_url)
    yield opened
    opened.close()


def the_key(store: TenantStore, key_id: str) -> ApiKey:
    return next(key for key in store.snapshot().keys if key.key_id == key_id)


def test_tenants_and_keys_are_read_back_unchanged(store: TenantStore) -> None:
    store.put_tenant(ACME)
    made = store.create_key("acme", now=100.0, label="ci", limits=LIMITS, expires_at=200.0)
    found = store.snapshot()
    assert found.tenants == (ACME,)
    assert found.keys == (made.key,)
    assert (made.key.label, made.key.limits, made.key.created_at, made.key.expires_at) == ("ci", LIMITS, 100.0, 200.0)


def test_a_tenant_that_is_put_again_is_replaced(store: TenantStore) -> None:
    store.put_tenant(ACME)
    store.put_tenant(Tenant(name="acme"))
    assert store.snapshot().tenants == (Tenant(name="acme"),)


def test_keys_have_the_documented_form_and_are_unique(store: TenantStore) -> None:
    texts = [store.create_key("acme", now=1.0).text for _ in range(20)]
    for text in texts:
        key_id, secret = parse_key(text.encode())
        assert text.startswith("ifk_")
        assert (len(key_id), len(secret)) == (10, 43)
        assert text.replace("_", "").isalnum()
    assert len({parse_key(text.encode())[0] for text in texts}) == 20
    assert len({parse_key(text.encode())[1] for text in texts}) == 20


def test_only_a_hash_of_the_secret_is_kept_anywhere(tmp_path: Path, url: str) -> None:
    store = TenantStore(url)
    made = store.create_key("acme", now=1.0, with_tenant=True)
    _, secret = parse_key(made.text.encode())
    assert made.key.secret_hash == hash_secret(secret)
    assert secret.decode() not in repr(made)
    store.rotate_key(made.key.key_id, 2.0, 0.0)
    for file in tmp_path.iterdir():
        assert secret not in file.read_bytes(), file
    store.close()


def test_a_revoked_key_stays_revoked_from_its_first_moment(store: TenantStore) -> None:
    made = store.create_key("acme", now=1.0)
    assert store.revoke_key(made.key.key_id, 5.0).revoked_at == 5.0
    assert store.revoke_key(made.key.key_id, 9.0).revoked_at == 5.0
    assert key_status(the_key(store, made.key.key_id), 5.0) == "revoked"


def test_a_rotated_key_has_a_successor_with_its_rights_and_ends_after_the_grace(store: TenantStore) -> None:
    old = store.create_key("acme", now=100.0, label="ci", limits=LIMITS)
    new = store.rotate_key(old.key.key_id, 1000.0, 60.0)
    assert (new.key.tenant, new.key.label, new.key.limits, new.key.expires_at) == ("acme", "ci", LIMITS, None)
    assert new.key.key_id != old.key.key_id
    ending = the_key(store, old.key.key_id)
    assert (key_status(ending, 1059.0), key_status(ending, 1060.0)) == ("valid", "expired")


def test_rotating_neither_lengthens_the_old_keys_life_nor_shortens_the_new_ones(store: TenantStore) -> None:
    old = store.create_key("acme", now=0.0, expires_at=1000.0)
    new = store.rotate_key(old.key.key_id, 990.0, 60.0)
    assert the_key(store, old.key.key_id).expires_at == 1000.0
    assert new.key.expires_at == 1990.0


def test_an_invalid_key_cannot_be_rotated(store: TenantStore) -> None:
    revoked = store.create_key("acme", now=0.0).key.key_id
    store.revoke_key(revoked, 1.0)
    expired = store.create_key("acme", now=0.0, expires_at=10.0).key.key_id
    before = store.snapshot()
    for key_id in (revoked, expired):
        with pytest.raises(Conflict):
            store.rotate_key(key_id, 10.0, 60.0)
    assert store.snapshot() == before


def test_unknown_names_are_not_found_and_change_nothing(store: TenantStore) -> None:
    for act in (
        lambda: store.revoke_key("nobody", 1.0),
        lambda: store.rotate_key("nobody", 1.0, 0.0),
        lambda: store.remove_tenant("nobody", 1.0),
    ):
        with pytest.raises(NotFound):
            act()
    assert store.version() == 0


def test_a_removed_tenants_keys_stay_revoked_when_its_name_is_reused(store: TenantStore) -> None:
    made = store.create_key("acme", now=1.0, with_tenant=True)
    other = store.create_key("globex", now=1.0, with_tenant=True)
    assert store.remove_tenant("acme", 5.0) == 1
    store.put_tenant(Tenant(name="acme"))
    assert key_status(the_key(store, made.key.key_id), 6.0) == "revoked"
    assert key_status(the_key(store, other.key.key_id), 6.0) == "valid"


def test_a_key_made_with_its_tenant_leaves_one_that_exists_as_it_is(store: TenantStore) -> None:
    store.put_tenant(ACME)
    store.create_key("acme", now=1.0, with_tenant=True)
    assert store.snapshot().tenants == (ACME,)


def test_every_change_counts_and_is_seen_by_another_store(ledger_url: str, store: TenantStore) -> None:
    other = TenantStore(ledger_url)
    versions = [other.version()]
    store.put_tenant(Tenant(name="acme"))
    versions.append(other.version())
    key_id = store.create_key("acme", now=1.0).key.key_id
    versions.append(other.version())
    store.revoke_key(key_id, 2.0)
    versions.append(other.version())
    assert versions == [0, 1, 2, 3]
    assert other.snapshot() == store.snapshot()
    other.close()


def test_it_shares_the_database_with_the_ledger_in_either_order(ledger_url: str) -> None:
    store = TenantStore(ledger_url)
    ledger = AttemptStore(ledger_url)
    store.create_key("acme", now=1.0)
    ledger.close()
    store.close()


def test_a_ledger_of_the_first_schema_gets_the_tables(tmp_path: Path, url: str) -> None:
    AttemptStore(url).close()
    with sqlite3.connect(tmp_path / "ledger.db") as raw:
        undo_upgrades(raw, 1)
        for name in ("keys", "tenants", "changes"):
            raw.execute(f"DROP TABLE {name}")
    raw.close()
    store = TenantStore(url)
    store.create_key("acme", now=1.0)
    assert len(store.snapshot().keys) == 1
    store.close()


def test_a_failing_database_is_reported_in_words(store: TenantStore) -> None:
    with store._connector.writing() as connection:
        connection.exec_driver_sql("DROP TABLE keys")
    with pytest.raises(LedgerUnusable, match="tenant and key database is unusable"):
        store.snapshot()
    store.put_tenant(Tenant(name="acme"))  # the connection is still good


def test_changes_by_several_processes_at_once_are_all_kept(ledger_url: str) -> None:
    stores = [TenantStore(ledger_url) for _ in range(4)]

    def change(store: TenantStore) -> None:
        for number in range(5):
            store.put_tenant(Tenant(name="shared"))
            store.create_key("shared", now=float(number))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(change, stores))
    assert {store.version() for store in stores} == {40}
    assert len(stores[0].snapshot().keys) == 20
    for store in stores:
        store.close()
