"""`/admin/tenants` and `/admin/keys`: changes while the gateway runs, for operators only."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from inferry.dispatch.gateway import Gateway
from inferry.dispatch.tenants import TenantManager, TenantWatcher
from inferry.domain.errors import GatewayError, InvalidApiKey, NotFound
from inferry.domain.keys import hash_secret
from inferry.domain.tenants import Limits, Tenant
from inferry.ingress.admin import Admin
from inferry.ingress.admin_tenants import PATHS, AdminTenants, WrongMethod
from inferry.ingress.errors import error_body, error_headers
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ledger.stores.tenants import TenantStore

ADMIN_KEY = "correct-horse-battery-staple"
CONFIGURED = {"acme": Tenant(name="acme", limits=Limits(max_concurrent=3))}


class _View:
    isolation = "own"


class _Gateway:
    """A gateway with one worker, kept for the tenant `own`."""

    drain_worker = readmit_worker = staticmethod(lambda name: None)
    wall = now = staticmethod(lambda: 1_000.0)

    def views(self) -> list[_View]:
        return [_View()]


class _Reply:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.answer: asyncio.Future[tuple[int, bytes, bytes]] = asyncio.get_running_loop().create_future()

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self.answer.set_result((status, headers, body))


class QueueLimiter:
    """Everything from the admin's endpoints to the database on the disk."""

    def __init__(self, directory: Path) -> None:
        self.store = TenantStore(f"sqlite:///{directory / 'ledger.db'}")
        self.watch = TenantWatcher(TenantManager(self.store, CONFIGURED))
        gateway = cast(Gateway, _Gateway())
        self._admin = Admin(gateway, ADMIN_KEY, AdminTenants(self.watch, gateway, self._refuse))

    async def ask(
        self, method: str, path: str, body: Any = None, key: str = ADMIN_KEY, peer: str = "10.1.2.3"
    ) -> tuple[int, Any]:
        request = Request(method.encode(), path.encode(), {b"authorization": f"Bearer {key}".encode()})
        request.body = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        reply = _Reply(peer)
        try:
            self._admin.serve(path.partition("?")[0], request, cast(Reply, reply))
        except GatewayError as error:
            self._refuse(error, request, cast(Reply, reply))
        async with asyncio.timeout(120):
            status, headers, answered = await reply.answer
        if b"ifk_" in answered:
            assert b"cache-control: no-store" in headers
        return status, msgspec.json.decode(answered)

    def _refuse(self, error: GatewayError, request: Request, reply: Reply) -> None:
        reply.respond(error.status, error_headers(error), error_body(error))


def at_the_door(directory: Path, body: Callable[[QueueLimiter], Awaitable[None]]) -> None:
    async def main() -> None:
        door = QueueLimiter(directory)
        try:
            await body(door)
        finally:
            await door.watch.close()

    asyncio.run(main())


def test_a_created_key_works_at_once_and_is_shown_in_full_only_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def body(door: QueueLimiter) -> None:
        asked = {"tenant": "acme", "label": "ci", "expires_in_s": 3600, "limits": {"max_lane": "P1"}}
        status, made = await door.ask("POST", "/admin/keys", asked)
        assert status == 201
        text = made.pop("key")
        secret = text.rpartition("_")[2]
        found = door.watch.caller(None, text.encode(), None, time.time())
        assert found.key is not None
        assert (found.tenant.name, found.key.key_id) == ("acme", made["id"])
        assert made.items() >= {"label": "ci", "status": "valid", "limits": {"max_lane": "P1"}}.items()
        assert made["expires_at"] == pytest.approx(made["created_at"] + 3600)
        assert await door.ask("GET", f"/admin/keys/{made['id']}") == (200, made)
        status, listed = await door.ask("GET", "/admin/keys")
        assert listed == {"keys": [made]}
        for hidden in (secret, hash_secret(secret.encode()).hex(), "hash"):
            assert hidden not in str(listed)
            assert hidden not in caplog.text

    at_the_door(tmp_path, body)


def test_a_revoked_key_is_refused_once_the_revocation_is_answered(tmp_path: Path) -> None:
    async def body(door: QueueLimiter) -> None:
        _, made = await door.ask("POST", "/admin/keys", {"tenant": "acme"})
        status, revoked = await door.ask("DELETE", f"/admin/keys/{made['id']}")
        assert (status, revoked["status"]) == (200, "revoked")
        with pytest.raises(InvalidApiKey):
            door.watch.caller(None, made["key"].encode(), None, time.time())

    at_the_door(tmp_path, body)


def test_a_rotated_key_and_its_successor_both_work_for_the_grace(tmp_path: Path) -> None:
    async def body(door: QueueLimiter) -> None:
        _, old = await door.ask("POST", "/admin/keys", {"tenant": "acme", "limits": {"max_concurrent": 2}})
        status, new = await door.ask("POST", f"/admin/keys/{old['id']}/rotate", {"grace_s": 100})
        assert (status, new["limits"]) == (201, {"max_concurrent": 2})
        now = time.time()
        for key, wall in ((old, now), (new, now), (new, now + 1000)):
            assert door.watch.caller(None, key["key"].encode(), None, wall).tenant.name == "acme"
        with pytest.raises(InvalidApiKey):
            door.watch.caller(None, old["key"].encode(), None, now + 1000)
        status, _ = await door.ask("POST", f"/admin/keys/{new['id']}/rotate")
        assert status == 201, "the grace has a default, and a body is not needed"

    at_the_door(tmp_path, body)


def test_keys_are_listed_by_tenant_and_status(tmp_path: Path) -> None:
    async def body(door: QueueLimiter) -> None:
        _, first = await door.ask("POST", "/admin/keys", {"tenant": "acme"})
        _, second = await door.ask("POST", "/admin/keys", {"tenant": "globex"})
        await door.ask("DELETE", f"/admin/keys/{second['id']}")
        for query, ids in (
            ("tenant=acme", [first["id"]]),
            ("status=revoked", [second["id"]]),
            ("tenant=acme&status=revoked", []),
        ):
            _, listed = await door.ask("GET", f"/admin/keys?{query}")
            assert [key["id"] for key in listed["keys"]] == ids
        status, refused = await door.ask("GET", "/admin/keys?tenantt=acme")
        assert (status, refused["error"]["code"]) == (400, "invalid_request")

    at_the_door(tmp_path, body)


def test_a_tenant_is_put_shown_listed_and_removed(tmp_path: Path) -> None:
    async def body(door: QueueLimiter) -> None:
        settings = {"max_lane": "P1", "models": ["tiny*"], "month_money_ceiling": 20.0}
        status, put = await door.ask("PUT", "/admin/tenants/globex", settings)
        rest = {"isolation": "salt", "shadow": False, "disabled": False}
        assert (status, put) == (200, {"name": "globex", "source": "database", "valid_keys": 0, **settings, **rest})
        assert await door.ask("GET", "/admin/tenants/globex") == (200, put)
        _, listed = await door.ask("GET", "/admin/tenants")
        assert [(one["name"], one["source"]) for one in listed["tenants"]] == [
            ("acme", "config"),
            ("globex", "database"),
        ]
        _, made = await door.ask("POST", "/admin/keys", {"tenant": "globex"})
        assert door.watch.caller(None, made["key"].encode(), None, time.time()).max_lane.name == "P1"
        _, put = await door.ask("PUT", "/admin/tenants/globex", {})
        assert "max_lane" not in put, "what is put is the whole of it"
        assert await door.ask("DELETE", "/admin/tenants/globex") == (200, {"name": "globex", "revoked_keys": 1})
        assert (await door.ask("GET", "/admin/tenants/globex"))[0] == 404

    at_the_door(tmp_path, body)


def test_a_tenant_with_an_own_pool_needs_a_worker_in_it(tmp_path: Path) -> None:
    async def body(door: QueueLimiter) -> None:
        status, refused = await door.ask("PUT", "/admin/tenants/globex", {"isolation": "pool"})
        assert (status, refused["error"]["param"]) == (409, "isolation")
        assert (await door.ask("PUT", "/admin/tenants/own", {"isolation": "pool"}))[0] == 200

    at_the_door(tmp_path, body)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("PUT", "/admin/tenants/acme", {}, 409, None),
        ("DELETE", "/admin/tenants/acme", None, 409, None),
        ("DELETE", "/admin/tenants/nobody", None, 404, None),
        ("PUT", "/admin/tenants/a%2Fb", {}, 400, "tenant"),
        ("PUT", "/admin/tenants/x", {"max_lane": "P9"}, 400, "max_lane"),
        ("PUT", "/admin/tenants/x", {"max_concurrent": -1}, 400, "max_concurrent"),
        ("PUT", "/admin/tenants/x", {"max_concurrent": 2**70}, 400, "max_concurrent"),
        ("PUT", "/admin/tenants/x", {"maxlane": "P1"}, 400, None),
        ("PUT", "/admin/tenants/x", b"[" * 100_000, 400, None),
        ("PUT", "/admin/tenants/x", b"\xff", 400, None),
        ("PUT", "/admin/tenants/x", None, 400, None),
        ("POST", "/admin/keys", {}, 400, None),
        ("POST", "/admin/keys", {"tenant": ""}, 400, "tenant"),
        ("POST", "/admin/keys", {"tenant": "x", "label": "a\nb"}, 400, "label"),
        ("POST", "/admin/keys", {"tenant": "x", "expires_in_s": 0}, 400, "expires_in_s"),
        ("POST", "/admin/keys", {"tenant": "x", "expires_in_s": 1e300}, 400, "expires_in_s"),
        ("POST", "/admin/keys", {"tenant": "x", "limits": {"max_lane": 0}}, 400, "limits.max_lane"),
        ("POST", "/admin/keys/nobody/rotate", {}, 404, None),
        ("POST", "/admin/keys/nobody/rotate", {"grace_s": -1}, 400, "grace_s"),
        ("DELETE", "/admin/keys/nobody", None, 404, None),
        ("GET", "/admin/keys/nobody", None, 404, None),
        ("GET", "/admin/keys/nobody/hash", None, 404, None),
        ("GET", "/admin/keysx", None, 404, None),
        ("POST", "/admin/tenants", {}, 405, None),
        ("PATCH", "/admin/tenants/x", {}, 405, None),
        ("GET", "/admin/keys/x/rotate", None, 405, None),
    ],
)
def test_invalid_changes_are_refused(
    tmp_path: Path, method: str, path: str, body: Any, status: int, param: str | None
) -> None:
    async def ask(door: QueueLimiter) -> None:
        answered, told = await door.ask(method, path, body)
        assert (answered, told["error"]["param"]) == (status, param), told
        assert door.store.version() == 0

    at_the_door(tmp_path, ask)


def test_nothing_is_shown_or_changed_without_the_admin_key(tmp_path: Path) -> None:
    async def body(door: QueueLimiter) -> None:
        for number, path in enumerate(PATHS):
            method, _, target = path.partition(" ")
            for key in ("", "wrong", ADMIN_KEY[:-1]):
                # Wrong keys are limited per address.
                status, told = await door.ask(method, target, {"tenant": "acme"}, key=key, peer=f"10.1.2.{number}")
                assert (status, told["error"]["code"]) == (403, "admin_only")
        assert door.store.version() == 0

    at_the_door(tmp_path, body)


def test_a_method_that_a_path_does_not_take_is_answered_with_those_it_does() -> None:
    error = WrongMethod("/admin/tenants/{name}", "GET, HEAD, PUT, DELETE")
    assert (error.status, error.allow) == (405, "GET, HEAD, PUT, DELETE")


def test_a_database_that_fails_is_an_error_that_names_no_file(tmp_path: Path) -> None:
    async def body(door: QueueLimiter) -> None:
        with door.store._connector.writing() as connection:
            connection.exec_driver_sql("DROP TABLE keys")
        status, told = await door.ask("GET", "/admin/keys")
        assert (status, told["error"]["code"]) == (503, "ledger_unavailable")
        assert str(tmp_path) not in str(told)

    at_the_door(tmp_path, body)


def test_the_store_finds_by_name_and_by_id(tmp_path: Path) -> None:
    async def body(door: QueueLimiter) -> None:
        manager = door.watch.manager
        assert manager.tenant("acme", 0.0)["max_concurrent"] == 3
        with pytest.raises(NotFound):
            manager.key("nobody", 0.0)

    at_the_door(tmp_path, body)
