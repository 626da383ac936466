"""Tenants and keys of the configuration and the database, and the directory that authenticates callers.

`TenantManager` holds the rules for changes; its methods block on a disk. `TenantWatcher` owns the current `Directory`
on the event loop. It replaces the directory after each of its own changes, and polls the database every
`POLL_INTERVAL_S`, in a thread, for changes by other processes.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from inferry.admission.caller_directory import Directory
from inferry.dispatch.periodic_task import PeriodicTask
from inferry.domain.callers import Caller
from inferry.domain.errors import Conflict, GatewayError, InvalidRequest, LedgerUnavailable, NotFound
from inferry.domain.keys import NewKey, TenantSnapshot, is_valid_tenant_name, key_as_dict, key_status, unknown_key
from inferry.domain.ledger import LedgerFileLost, LedgerUnusable
from inferry.domain.tenant_settings import tenant_as_dict
from inferry.domain.tenants import ApiKey, Limits, Tenant

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
POLL_TIMEOUT_S = 5.0
"""A database that has not answered a poll for this long is reported as down."""
RETRY_AFTER_S = 2.0
_DATABASE_GONE_MESSAGE = "the gateway's database is unavailable, so callers cannot be authenticated"
AuthMode = Literal["auto", "on", "off"]

T = TypeVar("T")


class TenantStore(Protocol):
    """Stores tenants and keys. Methods block on a disk and may be called from any thread."""

    @property
    def generation(self) -> int: ...
    def version(self) -> int: ...
    def snapshot(self) -> TenantSnapshot: ...
    def put_tenant(self, tenant: Tenant) -> None: ...
    def remove_tenant(self, name: str, now: float) -> int: ...
    def create_key(
        self,
        tenant: str,
        *,
        now: float,
        label: str = "",
        limits: Limits | None = None,
        expires_at: float | None = None,
        with_tenant: bool = False,
    ) -> NewKey: ...
    def revoke_key(self, key_id: str, now: float) -> ApiKey: ...
    def rotate_key(self, key_id: str, now: float, grace_s: float) -> NewKey: ...
    def close(self) -> None: ...


class TenantManager:
    """All tenants and keys, and the rules for changing them.

    A tenant of the configuration can be changed only there, and overrides a tenant of the same name in the database.
    Keys are always in the database.
    """

    def __init__(self, store: TenantStore, configured: Mapping[str, Tenant]) -> None:
        self.configured = configured
        self._store = store
        self._overridden: list[str] = []

    @property
    def generation(self) -> int:
        return self._store.generation

    def version(self) -> int:
        return self._store.version()

    def snapshot(self) -> TenantSnapshot:
        """Tenants of configuration and database, in this order, and all keys."""
        found = self._store.snapshot()
        others = [tenant for tenant in found.tenants if tenant.name not in self.configured]
        self._warn_of_overridden(found.tenants)
        return TenantSnapshot(found.version, (*self.configured.values(), *others), found.keys)

    def _warn_of_overridden(self, stored: Sequence[Tenant]) -> None:
        """Name the tenants whose limits were set in the database and have no effect, when these have changed."""
        overridden = [one.name for one in stored if one.name in self.configured and one != Tenant(name=one.name)]
        for name in overridden:
            if name not in self._overridden:
                log.warning("tenants.%s of the configuration overrides what the database has of this tenant", name)
        self._overridden = overridden

    def tenants(self, wall: float) -> list[dict[str, Any]]:
        """All tenants as operators see them."""
        found = self.snapshot()
        valid = Counter(key.tenant for key in found.keys if key_status(key, wall) == "valid")
        return [
            {
                "name": tenant.name,
                "source": "config" if tenant.name in self.configured else "database",
                "valid_keys": valid[tenant.name],
                **tenant_as_dict(tenant),
            }
            for tenant in found.tenants
        ]

    def tenant(self, name: str, wall: float) -> dict[str, Any]:
        """Raises NotFound."""
        for tenant in self.tenants(wall):
            if tenant["name"] == name:
                return tenant
        raise NotFound("no such tenant")

    def keys(self, wall: float) -> list[dict[str, Any]]:
        """All keys as operators see them, the oldest first."""
        return [key_as_dict(key, wall) for key in self.snapshot().keys]

    def key(self, key_id: str, wall: float) -> dict[str, Any]:
        """Raises NotFound."""
        for key in self.keys(wall):
            if key["id"] == key_id:
                return key
        raise NotFound(unknown_key(key_id))

    def put_tenant(self, tenant: Tenant) -> None:
        self._check_editable(tenant.name)
        _check_name(tenant.name)
        self._store.put_tenant(tenant)

    def remove_tenant(self, name: str, now: float) -> int:
        """Remove the tenant and revoke its keys; return their number."""
        self._check_editable(name)
        return self._store.remove_tenant(name, now)

    def create_key(
        self, tenant: str, *, now: float, label: str = "", limits: Limits | None = None, expires_at: float | None = None
    ) -> NewKey:
        """Create a key. A tenant that does not exist yet is created too, without limits."""
        _check_name(tenant)
        if len(label) > 200 or not label.isprintable():
            raise InvalidRequest("a label has at most 200 printable characters", param="label")
        if expires_at is not None and expires_at <= now:
            raise InvalidRequest("the key would already be expired", param="expires_at")
        return self._store.create_key(
            tenant,
            now=now,
            label=label,
            limits=limits,
            expires_at=expires_at,
            with_tenant=tenant not in self.configured,
        )

    def revoke_key(self, key_id: str, now: float) -> ApiKey:
        return self._store.revoke_key(key_id, now)

    def rotate_key(self, key_id: str, now: float, grace_s: float) -> NewKey:
        return self._store.rotate_key(key_id, now, grace_s)

    def close(self) -> None:
        self._store.close()

    def _check_editable(self, name: str) -> None:
        if name in self.configured:
            raise Conflict(f"this tenant is defined in the configuration: change it there, at tenants.{name}")


class TenantWatcher:
    """Owns the current directory. It belongs to the event loop it is started on; its constructor reads the store.

    In mode `auto`, keys are required once the first key exists. This never reverts: a gateway whose last key was
    revoked refuses every call.

    Callbacks run on the event loop: `on_change` after the directory was replaced, `on_keys_ended` when keys may have
    become invalid (after a change, or when one expires), `on_replaced` when the database file was replaced.

    While the database does not answer, everything stays as it was read last. While its file is missing, known keys stay
    valid and calls without a key are refused, because authentication may have been turned on in the file that cannot be
    read. A file that was replaced is used from then on.
    """

    def __init__(
        self, manager: TenantManager, mode: AuthMode = "auto", *, wall: Callable[[], float] = time.time
    ) -> None:
        self.manager = manager
        self._mode = mode
        self._wall = wall
        self._last_error = ""
        self.on_change: Callable[[], None] | None = None
        self.on_keys_ended: Callable[[], None] | None = None
        self.on_replaced: Callable[[], None] | None = None
        self._next_expiry_at = math.inf
        self._generation = manager.generation
        self.ledger_error: str | None = None
        self._asked_at: float | None = None
        self._polling = PeriodicTask(self._poll_and_expire, POLL_INTERVAL_S, "tenants and keys")
        # Serialises refreshes, so that an older directory never replaces a newer one.
        self._refresh_lock = asyncio.Lock()
        self.directory = Directory(is_auth_required=mode == "on")
        self._version, self.directory = self._read()
        self._next_expiry_at = self.directory.next_expiry_at(wall())
        log.info("authentication is %s", self._auth_status())

    @property
    def is_auth_required(self) -> bool:
        return self.directory.is_auth_required

    @property
    def is_ledger_up(self) -> bool:
        """Whether the database answered the last poll."""
        is_overdue = self._asked_at is not None and time.monotonic() - self._asked_at > POLL_TIMEOUT_S
        return not (is_overdue or self._last_error or self.ledger_error is not None)

    def caller(
        self, authorization: bytes | None, x_api_key: bytes | None, tenant_header: bytes | None, wall: float
    ) -> Caller:
        if self.ledger_error is not None and self._mode == "auto" and not self.directory.is_auth_required:
            raise LedgerUnavailable(_DATABASE_GONE_MESSAGE, retry_after_s=RETRY_AFTER_S)
        return self.directory.caller(authorization, x_api_key, tenant_header, wall)

    def start(self) -> None:
        self._polling.start()

    async def close(self) -> None:
        await self._polling.close()
        await asyncio.to_thread(self.manager.close)

    def revocation_error(self, tenant: str, key_id: str | None) -> GatewayError | None:
        """The error that ends a call in flight whose key or tenant is no longer valid; else None."""
        return self.directory.revocation_error(tenant, key_id, self._wall())

    def stored_caller(self, tenant: str, key_id: str | None) -> Caller:
        """The caller of a call that was accepted earlier. Raises InvalidApiKey where it may not go on."""
        return self.directory.stored_caller(tenant, key_id, self._wall())

    def weight_of(self, tenant: str) -> float:
        found = self.directory.tenants.get(tenant)
        return 1.0 if found is None else found.weight

    async def ask(self, operation: Callable[[TenantManager, float], T]) -> T:
        """Run a read-only operation in a thread. Raises LedgerUnavailable."""
        with _as_client_errors():
            return await asyncio.to_thread(operation, self.manager, self._wall())

    async def change(self, operation: Callable[[TenantManager, float], T]) -> T:
        """Run a change in a thread. Once this returns, every call sees the change. Raises LedgerUnavailable."""
        async with self._refresh_lock:
            with _as_client_errors():
                result, found = await asyncio.to_thread(self._run_and_read, operation)
            self._apply(found)
        return result

    async def poll(self) -> None:
        """Read tenants and keys again if another process has changed them."""
        async with self._refresh_lock:
            self._asked_at = time.monotonic()
            try:
                found = await asyncio.to_thread(self._read_if_new)
            except LedgerFileLost as error:
                if self.ledger_error is None:
                    log.error("the ledger's database file is missing: %s", error)
                self.ledger_error = str(error)
                return
            except (OSError, RuntimeError) as error:
                if str(error) != self._last_error:
                    log.error("cannot read tenants and keys; keeping the current ones: %s", error)
                    self._last_error = str(error) or type(error).__name__
                return
            finally:
                self._asked_at = None
            if self.ledger_error is not None or self._last_error:
                log.warning("the ledger is available again")
                self.ledger_error, self._last_error = None, ""
            if found is not None:
                self._apply(found)

    async def _poll_and_expire(self) -> None:
        try:
            await self.poll()
        finally:
            self.notify_expired()

    def notify_expired(self) -> None:
        """Call `on_keys_ended` if a key has expired since the last call."""
        wall = self._wall()
        if wall >= self._next_expiry_at:
            self._next_expiry_at = self.directory.next_expiry_at(wall)
            if self.on_keys_ended is not None:
                self.on_keys_ended()

    def _run_and_read(self, operation: Callable[[TenantManager, float], T]) -> tuple[T, tuple[int, Directory]]:
        result = operation(self.manager, self._wall())
        return result, self._read()

    def _read_if_new(self) -> tuple[int, Directory] | None:
        return None if self.manager.version() == self._version else self._read()

    def _read(self) -> tuple[int, Directory]:
        found = self.manager.snapshot()
        required = self._mode == "on" or (self._mode == "auto" and bool(found.keys or self.directory.is_auth_required))
        return found.version, Directory(found.tenants, found.keys, is_auth_required=required)

    def _apply(self, found: tuple[int, Directory]) -> None:
        was_required = self.is_auth_required
        self._version, self.directory = found
        if self.manager.generation != self._generation:
            self._generation = self.manager.generation
            log.error(
                "the ledger's database was replaced by another file: keys, tenants and rows are now those of the new "
                "file; spending that was already counted against budgets is kept"
            )
            if self.on_replaced is not None:
                self.on_replaced()
        self._next_expiry_at = self.directory.next_expiry_at(self._wall())
        if self.on_keys_ended is not None:
            self.on_keys_ended()
        if self.on_change is not None:
            self.on_change()
        if self.is_auth_required and not was_required:
            log.warning("authentication is now on: a key was created, and calls without one are refused")

    def _auth_status(self) -> str:
        if self._mode == "off":
            return "off by configuration: keys are not checked"
        if self.is_auth_required:
            return "on"
        return "off until the first key is created: any local client may call"


@contextlib.contextmanager
def _as_client_errors() -> Iterator[None]:
    try:
        yield
    except (LedgerFileLost, LedgerUnusable):
        raise LedgerUnavailable("the gateway's database is unavailable", retry_after_s=RETRY_AFTER_S) from None


def _check_name(name: str) -> None:
    if not is_valid_tenant_name(name):
        raise InvalidRequest("a tenant's name is 1 to 64 letters, digits, dots, dashes and underscores", param="tenant")
