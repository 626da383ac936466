"""Tenants and keys at runtime: changes apply soon, and no failure turns authentication off."""

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from inferry.dispatch import tenants as module
from inferry.dispatch.tenants import AuthMode, TenantManager, TenantWatcher
from inferry.domain.callers import Caller
from inferry.domain.errors import Conflict, GatewayError, InvalidApiKey, InvalidRequest
from inferry.domain.keys import NewKey
from inferry.domain.tenants import Limits, Tenant
from inferry.ledger.stores.tenants import TenantStore
from support.waiting import async_until

CONFIGURED = {"acme": Tenant(name="acme", limits=Limits(max_concurrent=3))}


class Counted(TenantStore):
    """Knows how often it was looked at."""

    looks = 0

    def version(self) -> int:
        self.looks += 1
        return super().version()


def a_watch(directory: Path, mode: AuthMode = "auto", store: TenantStore | None = None) -> TenantWatcher:
    store = store or TenantStore(f"sqlite:///{directory / 'ledger.db'}")
    return TenantWatcher(TenantManager(store, CONFIGURED), mode)


def caller(watch: TenantWatcher, key: str | None = None, tenant: bytes | None = None) -> Caller:
    sent = None if key is None else f"Bearer {key}".encode()
    return watch.caller(sent, None, tenant, time.time())


def run(
    directory: Path,
    body: Callable[[TenantWatcher], Awaitable[None]],
    mode: AuthMode = "auto",
    store: TenantStore | None = None,
) -> None:
    async def main() -> None:
        watch = a_watch(directory, mode, store)
        watch.start()
        try:
            await body(watch)
        finally:
            await watch.close()

    asyncio.run(main())


async def create(watch: TenantWatcher, tenant: str = "acme", **more: float) -> NewKey:
    return await watch.change(lambda manager, now: manager.create_key(tenant, now=now, **more))  # type: ignore[arg-type]


def test_a_change_through_the_gateway_applies_at_once(tmp_path: Path) -> None:
    async def body(watch: TenantWatcher) -> None:
        made = await create(watch)
        assert caller(watch, made.text).tenant is CONFIGURED["acme"]
        await watch.change(lambda manager, now: manager.revoke_key(made.key.key_id, now))
        with pytest.raises(InvalidApiKey):
            caller(watch, made.text)

    run(tmp_path, body)


def test_a_change_by_another_process_applies_within_two_seconds(tmp_path: Path) -> None:
    ledger = f"sqlite:///{tmp_path / 'ledger.db'}"

    def cli(*arguments: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "inferry", "keys", *arguments, "--ledger", ledger],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return ran.stdout.strip()

    async def body(watch: TenantWatcher) -> None:
        assert caller(watch).tenant.name == "default"
        key = await asyncio.to_thread(cli, "create", "--tenant", "globex", "--quiet")
        written = store.looks
        await async_until(lambda: watch.is_auth_required)
        # One look may have begun before it was written; the one after it must see it.
        assert store.looks - written <= 2
        assert 2 * module.POLL_INTERVAL_S < 2
        assert caller(watch, key).tenant.name == "globex"
        await asyncio.to_thread(cli, "revoke", key.split("_")[1])
        await async_until(lambda: not _opens(watch, key))

    store = Counted(ledger)
    run(tmp_path, body, store=store)


def _opens(watch: TenantWatcher, key: str) -> bool:
    try:
        caller(watch, key)
    except InvalidApiKey:
        return False
    return True


def test_the_first_key_switches_authentication_on_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def body(watch: TenantWatcher) -> None:
        assert caller(watch, None, b"anybody").tenant.name == "anybody"
        assert "off until the first key" in caplog.text
        made = await create(watch)
        assert "authentication is now on" in caplog.text
        with pytest.raises(InvalidApiKey):
            caller(watch, None, b"anybody")
        assert made.text not in caplog.text
        assert made.text.rpartition("_")[2] not in caplog.text

    run(tmp_path, body)


def test_a_gateway_whose_last_key_is_revoked_admits_no_call(tmp_path: Path) -> None:
    async def body(watch: TenantWatcher) -> None:
        made = await create(watch)
        await watch.change(lambda manager, now: manager.revoke_key(made.key.key_id, now))
        for key in (None, made.text):
            with pytest.raises(InvalidApiKey):
                caller(watch, key)

    run(tmp_path, body)
    assert a_watch(tmp_path).is_auth_required, "nor after a restart"


def test_mode_on_requires_keys_before_the_first_exists_and_off_never_does(tmp_path: Path) -> None:
    async def when_on(watch: TenantWatcher) -> None:
        with pytest.raises(InvalidApiKey):
            caller(watch)
        assert caller(watch, (await create(watch)).text).tenant.name == "acme"

    async def when_off(watch: TenantWatcher) -> None:
        await create(watch)
        assert caller(watch, None, b"anybody").tenant.name == "anybody"
        assert caller(watch, None, b"acme").tenant is CONFIGURED["acme"]

    run(tmp_path, when_on, "on")
    run(tmp_path, when_off, "off")


def test_tenants_of_the_configuration_cannot_be_changed_at_runtime(tmp_path: Path) -> None:
    manager = a_watch(tmp_path).manager
    for act in (lambda: manager.put_tenant(Tenant(name="acme")), lambda: manager.remove_tenant("acme", 1.0)):
        with pytest.raises(Conflict, match=r"tenants\.acme"):
            act()
    assert manager.create_key("acme", now=1.0).key.tenant == "acme"
    assert manager.snapshot().tenants == (CONFIGURED["acme"],), "a key of it makes no second one"


def test_the_configuration_overrides_tenants_of_the_database_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = TenantStore(f"sqlite:///{tmp_path / 'ledger.db'}")
    store.put_tenant(Tenant(name="acme", limits=Limits(max_concurrent=1000)))
    store.close()
    watch = a_watch(tmp_path)
    assert watch.directory.tenants == CONFIGURED
    watch.manager.snapshot()
    assert [record.getMessage() for record in caplog.records if "overrides" in record.msg] == [
        "tenants.acme of the configuration overrides what the database has of this tenant"
    ]


def test_a_key_of_a_tenant_removed_from_the_configuration_is_refused(tmp_path: Path) -> None:
    key = a_watch(tmp_path).manager.create_key("acme", now=1.0).text
    store = TenantStore(f"sqlite:///{tmp_path / 'ledger.db'}")
    with pytest.raises(InvalidApiKey):
        caller(TenantWatcher(TenantManager(store, {})), key)


@pytest.mark.parametrize("name", ["", "two words", "a/b", "x" * 65, "é"])
def test_an_invalid_tenant_name_is_refused_before_any_write(tmp_path: Path, name: str) -> None:
    manager = a_watch(tmp_path).manager
    with pytest.raises(InvalidRequest):
        manager.put_tenant(Tenant(name=name))
    with pytest.raises(InvalidRequest):
        manager.create_key(name, now=1.0)
    assert manager.version() == 0


def test_a_key_is_not_made_with_a_bad_label_nor_expired(tmp_path: Path) -> None:
    manager = a_watch(tmp_path).manager
    for more in ({"label": "x" * 201}, {"label": "a\nb"}, {"expires_at": 1.0}):
        with pytest.raises(GatewayError):
            manager.create_key("acme", now=1.0, **more)
    assert manager.version() == 0


def test_an_unreadable_database_keeps_the_current_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.01)

    class Broken(Counted):
        is_broken = False

        def version(self) -> int:
            version = super().version()
            if self.is_broken:
                raise RuntimeError("the disk is gone")
            return version

    async def main() -> None:
        store = Broken(f"sqlite:///{tmp_path / 'ledger.db'}")
        watch = TenantWatcher(TenantManager(store, CONFIGURED))
        made = await create(watch)
        store.is_broken = True
        watch.start()
        await async_until(lambda: "the disk is gone" in caplog.text)
        assert caller(watch, made.text).tenant.name == "acme"
        looks = store.looks
        await async_until(lambda: store.looks >= looks + 3)
        assert caplog.text.count("the disk is gone") == 1, "said once, not at every look"
        assert not watch.is_ledger_up
        store.is_broken = False
        await async_until(lambda: watch.is_ledger_up)
        assert "the ledger is available again" in caplog.text
        await watch.close()

    asyncio.run(main())


def test_a_database_that_does_not_answer_is_reported_as_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "POLL_TIMEOUT_S", 0.0)
    answers = threading.Event()

    class Hanging(Counted):
        def version(self) -> int:
            found = super().version()
            assert answers.wait(120)
            return found

    async def body(watch: TenantWatcher) -> None:
        await async_until(lambda: not watch.is_ledger_up)
        assert caller(watch).tenant.name == "default"
        answers.set()
        await async_until(lambda: watch.is_ledger_up)

    run(tmp_path, body, store=Hanging(f"sqlite:///{tmp_path / 'ledger.db'}"))
