"""Who may call: every tenant and key as of one moment, and the answer to "who is this?".

A snapshot. When a tenant or a key changes, a new one takes its place; nothing here is ever changed.
"""

import math
import re
from collections.abc import Iterable, Mapping
from hmac import compare_digest

from inferry.domain.callers import ANYBODY, Caller
from inferry.domain.errors import InvalidApiKey, InvalidRequest
from inferry.domain.keys import hash_of, parts_of
from inferry.domain.tenants import ApiKey, Tenant

_NOT_KNOWN = "the API key is not known here, or no longer valid"
_NO_KEY = "an API key is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
_ANOTHERS = "the API key is not one of the tenant in `x-inferry-tenant`; leave that out, keys say whose they are"
_DISABLED = "the tenant is disabled"
_ENDED = "the API key was revoked or has expired while the call was in flight"
_HEADER = "x-inferry-tenant"
_TENANT = re.compile(rb"[\x21-\x7e]{1,256}")


class _Entry:
    """One key, ready to be asked for."""

    __slots__ = ("caller", "header", "secret_hash", "until")

    def __init__(self, key: ApiKey, tenant: Tenant) -> None:
        self.caller = Caller(tenant, key)
        self.header = tenant.name.encode()
        self.secret_hash = key.secret_hash
        expires, revoked = key.expires_at, key.revoked_at
        self.until = math.inf if expires is None else expires
        if revoked is not None and revoked < self.until:
            self.until = revoked
        if tenant.disabled:
            self.until = -math.inf


# Nobody knows a secret that hashes to this, and comparing with it takes as long as with any other.
_NOBODY = _Entry(ApiKey(key_id="", tenant="", secret_hash=bytes(32)), Tenant(name=""))


class Directory:
    """Callers by what they send.

    Where `is_required`, that is a key that is known, current and of a tenant that is known and not disabled; else the
    tenant is whoever the client says it is. A key whose tenant nobody has configured opens nothing: taking a tenant
    out of the configuration must not take its limits off.
    """

    __slots__ = ("_callers", "_keys", "is_required", "tenants")

    def __init__(self, tenants: Iterable[Tenant] = (), keys: Iterable[ApiKey] = (), *, is_required: bool) -> None:
        self.is_required = is_required
        self.tenants: Mapping[str, Tenant] = {tenant.name: tenant for tenant in tenants}
        self._callers = {name.encode(): Caller(tenant) for name, tenant in self.tenants.items()}
        self._callers.setdefault(ANYBODY.tenant.name.encode(), ANYBODY)
        self._keys = {
            key.key_id.encode(): _Entry(key, tenant)
            for key in keys
            if key.key_id and (tenant := self.tenants.get(key.tenant)) is not None
        }

    def caller(
        self, authorization: bytes | None, x_api_key: bytes | None, tenant_header: bytes | None, wall: float
    ) -> Caller:
        """Who sent this. Raises InvalidApiKey, with a message that repeats nothing of what was sent.

        A key that does not exist takes the same path as one whose secret is wrong, so that neither the answer nor its
        time says which ids there are.
        """
        if not self.is_required:
            return self._anybody(tenant_header)
        given = _bearer(authorization) or x_api_key
        if not given:
            raise InvalidApiKey(_NO_KEY)
        key_id, secret = parts_of(given)
        entry = self._keys.get(key_id, _NOBODY)
        if not compare_digest(hash_of(secret), entry.secret_hash) or wall >= entry.until:
            raise InvalidApiKey(_NOT_KNOWN)
        if tenant_header and tenant_header != entry.header:
            raise InvalidApiKey(_ANOTHERS, param=_HEADER)
        return entry.caller

    def problem(self, tenant: str, key_id: str | None, wall: float) -> InvalidApiKey | None:
        """Why a call that was let in may not go on: its key is no longer valid, or its tenant is disabled."""
        if key_id is None:
            known = self.tenants.get(tenant)
            return InvalidApiKey(_DISABLED) if known is not None and known.disabled else None
        entry = self._keys.get(key_id.encode())
        return InvalidApiKey(_ENDED) if entry is None or wall >= entry.until else None

    def next_end(self, wall: float) -> float:
        """When the next key ends by itself; infinity where none does."""
        return min((entry.until for entry in self._keys.values() if entry.until > wall), default=math.inf)

    def _anybody(self, named: bytes | None) -> Caller:
        name = named or b"default"
        found = self._callers.get(name)
        if found is None:
            if _TENANT.fullmatch(name) is None:
                raise InvalidRequest(
                    f"`{_HEADER}` must be 1 to 256 printable ASCII characters without spaces", param=_HEADER
                )
            return Caller(Tenant(name=name.decode("ascii")))
        if found.tenant.disabled:
            raise InvalidApiKey(_DISABLED)
        return found


def _bearer(authorization: bytes | None) -> bytes | None:
    if authorization is None:
        return None
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None
