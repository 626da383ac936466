"""Tenants and their keys, in the ledger's database.

Any number of processes may write. Each change increments a revision, which the others poll. A store holds one
connection behind a lock: its methods may be called from any thread, and block.
"""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import DBAPIError

from inferry.domain.errors import Conflict, NotFound
from inferry.domain.keys import (
    ALPHABET,
    ID_CHARACTERS,
    SECRET_CHARACTERS,
    NewKey,
    TenantSnapshot,
    format_key,
    hash_secret,
    unknown_key,
)
from inferry.domain.ledger import LedgerUnusable
from inferry.domain.tenants import ApiKey, Isolation, Limits, Tenant, decode_limits
from inferry.ledger.schema import changes, keys, tenants
from inferry.ledger.stores.opening import connect

_TOPIC = "tenants"
_GENERATION_STRIDE = 2**40


class TenantStore:
    """Tenants and keys that are managed at run time, beyond the configuration."""

    def __init__(self, url: str) -> None:
        self._connector = connect(url)
        self._lock = threading.Lock()
        # As text, for plain rows: reading ten thousand keys in Python would delay the event loop.
        dialect = self._connector.dialect
        self._all_keys = str(select(keys).order_by(keys.c.created_at, keys.c.key_id).compile(dialect=dialect))
        version_query = select(changes.c.version).where(changes.c.of == _TOPIC)
        self._select_version = str(version_query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))

    @property
    def generation(self) -> int:
        """Changes when the database was replaced by another."""
        return self._connector.generation

    def version(self) -> int:
        """Changes with every change of tenants or keys."""
        with self._reading() as connection:
            return self._version(connection)

    def snapshot(self) -> TenantSnapshot:
        with self._reading() as connection:
            return TenantSnapshot(
                self._version(connection),
                tuple(_tenant(row) for row in connection.execute(select(tenants).order_by(tenants.c.name))),
                tuple(map(_key, connection.exec_driver_sql(self._all_keys).all())),
            )

    def put_tenant(self, tenant: Tenant) -> None:
        with self._writing() as connection:
            connection.execute(delete(tenants).where(tenants.c.name == tenant.name))
            connection.execute(insert(tenants).values(**_tenant_row(tenant)))

    def remove_tenant(self, name: str, now: float) -> int:
        """Remove the tenant and revoke its keys; return their number. Raises NotFound."""
        with self._writing() as connection:
            if not connection.execute(delete(tenants).where(tenants.c.name == name)).rowcount:
                raise NotFound("unknown tenant in the database")
            live = (keys.c.tenant == name) & keys.c.revoked_at.is_(None)
            return connection.execute(update(keys).where(live).values(revoked_at=now)).rowcount

    def create_key(
        self,
        tenant: str,
        *,
        now: float,
        label: str = "",
        limits: Limits | None = None,
        expires_at: float | None = None,
        with_tenant: bool = False,
    ) -> NewKey:
        """Create a key and store its hash. `with_tenant` also creates a missing tenant."""
        with self._writing() as connection:
            if with_tenant and not connection.execute(select(tenants).where(tenants.c.name == tenant)).first():
                connection.execute(insert(tenants).values(**_tenant_row(Tenant(name=tenant))))
            return _insert_key(connection, tenant, label, limits or Limits(), now, expires_at)

    def revoke_key(self, key_id: str, now: float) -> ApiKey:
        """Revoke the key. Idempotent. Raises NotFound."""
        with self._writing() as connection:
            key = _find(connection, key_id)
            if key.revoked_at is None:
                key = msgspec.structs.replace(key, revoked_at=now)
                connection.execute(update(keys).where(keys.c.key_id == key_id).values(revoked_at=now))
            return key

    def rotate_key(self, key_id: str, now: float, grace_s: float) -> NewKey:
        """Create a key with the same rights; the old one expires after the grace period.

        The new key of one with a lifetime has the same lifetime from now on. Raises NotFound, and Conflict where the
        old key is no longer valid.
        """
        with self._writing() as connection:
            old = _find(connection, key_id)
            if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= now):
                raise Conflict("the key is no longer valid and cannot be rotated; create a new one")
            lifetime = None if old.expires_at is None else old.expires_at - old.created_at
            ends = now + grace_s if old.expires_at is None else min(now + grace_s, old.expires_at)
            connection.execute(update(keys).where(keys.c.key_id == key_id).values(expires_at=ends))
            expires_at = None if lifetime is None else now + lifetime
            return _insert_key(connection, old.tenant, old.label, old.limits, now, expires_at)

    def close(self) -> None:
        with self._lock:
            self._connector.close()

    def _version(self, connection: Connection) -> int:
        # Another file may have the same revision and other keys.
        version: int = connection.exec_driver_sql(self._select_version).scalar() or 0
        return version + self._connector.generation * _GENERATION_STRIDE

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._lock, _wrap_database_errors(), self._connector.reading() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._lock, _wrap_database_errors(), self._connector.writing() as connection:
            yield connection
            bump_version = update(changes).where(changes.c.of == _TOPIC).values(version=changes.c.version + 1)
            if not connection.execute(bump_version).rowcount:
                connection.execute(insert(changes).values(of=_TOPIC, version=1))


@contextmanager
def _wrap_database_errors() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        raise LedgerUnusable(f"the tenant and key database is unusable: {error.orig}") from error


def _find(connection: Connection, key_id: str) -> ApiKey:
    row = connection.execute(select(keys).where(keys.c.key_id == key_id)).first()
    if row is None:
        raise NotFound(unknown_key(key_id))
    return _key(row)


def _insert_key(
    connection: Connection, tenant: str, label: str, limits: Limits, now: float, expires_at: float | None
) -> NewKey:
    secret = _random_text(SECRET_CHARACTERS)
    key = ApiKey(
        key_id=_random_text(ID_CHARACTERS),
        tenant=tenant,
        secret_hash=hash_secret(secret.encode()),
        label=label,
        limits=limits,
        created_at=now,
        expires_at=expires_at,
    )
    row = {name: getattr(key, name) for name in key.__struct_fields__}
    connection.execute(insert(keys).values(**{**row, "limits": msgspec.json.encode(limits)}))
    return NewKey(key, format_key(key.key_id, secret))


def _random_text(characters: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(characters))


def _tenant_row(tenant: Tenant) -> dict[str, Any]:
    row = {name: getattr(tenant, name) for name in tenant.__struct_fields__}
    return {**row, "limits": msgspec.json.encode(tenant.limits)}


def _tenant(row: Any) -> Tenant:
    isolation: Isolation = row.isolation
    return Tenant(
        name=row.name,
        limits=_limits(row.limits),
        isolation=isolation,
        weight=row.weight,
        shadow=bool(row.shadow),
        disabled=bool(row.disabled),
    )


def _key(row: Any) -> ApiKey:
    key_id, tenant, secret_hash, label, limits, created_at, expires_at, revoked_at = row
    return ApiKey(
        key_id=key_id,
        tenant=tenant,
        secret_hash=secret_hash,
        label=label,
        limits=_limits(limits),
        created_at=created_at,
        expires_at=expires_at,
        revoked_at=revoked_at,
    )


# Cached: most keys share the same limits, usually none.
_limits = lru_cache(maxsize=1024)(decode_limits)
