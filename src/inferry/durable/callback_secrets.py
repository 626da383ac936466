"""Secrets that sign callbacks, managed on the event loop. The text of a secret is shown when it is created only."""

from typing import Any, Protocol

from inferry.domain.async_jobs import CallbackSecret
from inferry.domain.clock import Clock
from inferry.durable.executor import StoreExecutor


class SecretStore(Protocol):
    """Where secrets are kept. Its methods block."""

    def rotate(self, tenant: str, now: float, grace_s: float) -> CallbackSecret: ...
    def valid(self, tenant: str, now: float) -> list[CallbackSecret]: ...
    def all(self, tenant: str | None = None) -> list[CallbackSecret]: ...


class CallbackSecrets:
    """Belongs to one event loop."""

    def __init__(self, store: SecretStore, executor: StoreExecutor, clock: Clock) -> None:
        self._store = store
        self._executor = executor
        self._clock = clock

    async def rotate(self, tenant: str, grace_s: float) -> CallbackSecret:
        """Create a secret; earlier ones of the tenant sign for `grace_s` seconds more."""
        return await self._executor.run(self._store.rotate, tenant, self._clock.wall(), grace_s)

    async def list(self, tenant: str) -> list[dict[str, Any]]:
        now = self._clock.wall()
        return [secret_object(one, now) for one in await self._executor.run(self._store.all, tenant)]


def secret_object(secret: CallbackSecret, now: float) -> dict[str, Any]:
    """What may be shown of a secret."""
    is_valid = secret.expires_at is None or secret.expires_at > now
    return {
        "id": secret.id,
        "tenant": secret.tenant,
        "status": "valid" if is_valid else "expired",
        "created_at": secret.created_at,
        "expires_at": secret.expires_at,
    }
