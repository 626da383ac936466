"""Authentication: an immutable snapshot of all tenants and keys. It is replaced when a tenant or key changes."""

import math
import re
from collections.abc import Iterable, Mapping
from hmac import compare_digest
from typing import Final

from inferry.domain.callers import ANONYMOUS, Caller
from inferry.domain.errors import InvalidApiKey, InvalidRequest
from inferry.domain.keys import hash_secret, parse_key
from inferry.domain.tenants import ApiKey, Tenant

_UNKNOWN_KEY_MESSAGE: Final = "unknown or expired API key"
_MISSING_KEY_MESSAGE: Final = "missing API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
_TENANT_MISMATCH_MESSAGE: Final = (
    "the API key does not belong to the tenant in `x-inferry-tenant`; omit the header, the key names the tenant"
)
_DISABLED_MESSAGE: Final = "the tenant is disabled"
_KEY_ENDED_MESSAGE: Final = "the API key was revoked or expired during the call"
_TENANT_HEADER: Final = "x-inferry-tenant"
_TENANT_NAME = re.compile(rb"[\x21-\x7e]{1,256}")


class _KeyEntry:
    """One key, prepared for the look-up of a request."""

    __slots__ = ("caller", "header", "secret_hash", "valid_until")

    def __init__(self, key: ApiKey, tenant: Tenant) -> None:
        self.caller = Caller(tenant, key)
        self.header = tenant.name.encode()
        self.secret_hash = key.secret_hash
        expires, revoked = key.expires_at, key.revoked_at
        self.valid_until = math.inf if expires is None else expires
        if revoked is not None and revoked < self.valid_until:
            self.valid_until = revoked
        if tenant.disabled:
            self.valid_until = -math.inf


# Stands in for an unknown key id, so that the response takes as long as for a wrong secret.
_UNKNOWN_KEY = _KeyEntry(ApiKey(key_id="", tenant="", secret_hash=bytes(32)), Tenant(name=""))


class Directory:
    """Maps request headers to a caller.

    With `is_auth_required`, a call needs a valid key of a known and enabled tenant. Otherwise the tenant is taken from
    the request. A key of an unknown tenant is refused, so that removing a tenant does not lift its limits.
    """

    __slots__ = ("_callers", "_keys", "is_auth_required", "tenants")

    def __init__(self, tenants: Iterable[Tenant] = (), keys: Iterable[ApiKey] = (), *, is_auth_required: bool) -> None:
        self.is_auth_required = is_auth_required
        self.tenants: Mapping[str, Tenant] = {tenant.name: tenant for tenant in tenants}
        self._callers = {name.encode(): Caller(tenant) for name, tenant in self.tenants.items()}
        self._callers.setdefault(ANONYMOUS.tenant.name.encode(), ANONYMOUS)
        self._keys = {
            key.key_id.encode(): _KeyEntry(key, tenant)
            for key in keys
            if key.key_id and (tenant := self.tenants.get(key.tenant)) is not None
        }

    def caller(
        self, authorization: bytes | None, x_api_key: bytes | None, tenant_header: bytes | None, wall: float
    ) -> Caller:
        """The caller of a request. Raises InvalidApiKey; its message never repeats what was sent.

        An unknown key id takes the same path as a wrong secret, so that neither the response nor its duration reveals
        which ids exist.
        """
        if not self.is_auth_required:
            return self._anonymous_caller(tenant_header)
        presented = _bearer(authorization) or x_api_key
        if not presented:
            raise InvalidApiKey(_MISSING_KEY_MESSAGE)
        key_id, secret = parse_key(presented)
        entry = self._keys.get(key_id, _UNKNOWN_KEY)
        if not compare_digest(hash_secret(secret), entry.secret_hash) or wall >= entry.valid_until:
            raise InvalidApiKey(_UNKNOWN_KEY_MESSAGE)
        if tenant_header and tenant_header != entry.header:
            raise InvalidApiKey(_TENANT_MISMATCH_MESSAGE, param=_TENANT_HEADER)
        return entry.caller

    def revocation_error(self, tenant: str, key_id: str | None, wall: float) -> InvalidApiKey | None:
        """The error that ends an admitted call: its key is no longer valid, or its tenant is disabled. Else None."""
        if key_id is None:
            known = self.tenants.get(tenant)
            return InvalidApiKey(_DISABLED_MESSAGE) if known is not None and known.disabled else None
        entry = self._keys.get(key_id.encode())
        return InvalidApiKey(_KEY_ENDED_MESSAGE) if entry is None or wall >= entry.valid_until else None

    def stored_caller(self, tenant: str, key_id: str | None, wall: float) -> Caller:
        """The caller of a call that was accepted earlier. Raises InvalidApiKey where it may not go on."""
        error = self.revocation_error(tenant, key_id, wall)
        if error is not None:
            raise error
        if key_id is not None:
            return self._keys[key_id.encode()].caller
        return self._callers.get(tenant.encode()) or Caller(Tenant(name=tenant))

    def next_expiry_at(self, wall: float) -> float:
        """The Unix time at which the next key expires; infinity if none will."""
        return min((entry.valid_until for entry in self._keys.values() if entry.valid_until > wall), default=math.inf)

    def _anonymous_caller(self, named: bytes | None) -> Caller:
        name = named or b"default"
        found = self._callers.get(name)
        if found is None:
            if _TENANT_NAME.fullmatch(name) is None:
                raise InvalidRequest(
                    f"`{_TENANT_HEADER}` must be 1 to 256 printable ASCII characters without spaces",
                    param=_TENANT_HEADER,
                )
            return Caller(Tenant(name=name.decode("ascii")))
        if found.tenant.disabled:
            raise InvalidApiKey(_DISABLED_MESSAGE)
        return found


def _bearer(authorization: bytes | None) -> bytes | None:
    if authorization is None:
        return None
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None
