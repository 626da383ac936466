"""Secrets that sign callbacks, in the ledger's database. Methods block."""

import secrets
from typing import Any

from sqlalchemy import ColumnElement, insert, select, update

from inferry.domain.async_jobs import CallbackSecret
from inferry.domain.storage import Database
from inferry.ledger.storage_schema import callback_secrets

_c = callback_secrets.c
_COLUMNS = [_c[name] for name in CallbackSecret.__struct_fields__]
KEY_BYTES = 32


class CallbackSecretStore:
    """A tenant has one secret, and during a rotation also earlier ones."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def rotate(self, tenant: str, now: float, grace_s: float) -> CallbackSecret:
        """Create a secret; earlier ones of the tenant end after the grace period, or as they would have ended."""
        secret = CallbackSecret(
            id=f"cbs_{secrets.token_hex(6)}", tenant=tenant, key=secrets.token_bytes(KEY_BYTES), created_at=now
        )
        ends = now + grace_s
        with self._database.writing() as connection:
            is_longer = (_c.tenant == tenant) & (_c.expires_at.is_(None) | (_c.expires_at > ends))
            connection.execute(update(callback_secrets).where(is_longer).values(expires_at=ends))
            row = {name: getattr(secret, name) for name in CallbackSecret.__struct_fields__}
            connection.execute(insert(callback_secrets).values(**row))
        return secret

    def valid(self, tenant: str, now: float) -> list[CallbackSecret]:
        """The secrets that sign callbacks of a tenant now, the newest first."""
        return self._select((_c.tenant == tenant) & (_c.expires_at.is_(None) | (_c.expires_at > now)))

    def all(self, tenant: str | None = None) -> list[CallbackSecret]:
        """The secrets of a tenant or of all, the newest first."""
        return self._select(_c.id.is_not(None) if tenant is None else _c.tenant == tenant)

    def _select(self, is_wanted: ColumnElement[bool]) -> list[CallbackSecret]:
        query = select(*_COLUMNS).where(is_wanted).order_by(_c.created_at.desc(), _c.id)
        with self._database.reading() as connection:
            return [_secret(row) for row in connection.execute(query).mappings()]


def _secret(row: Any) -> CallbackSecret:
    return CallbackSecret(**row)
