"""API keys: `ifk_<key id>_<secret>`. The id is public and used for lookup; the secret authenticates.

Ids and secrets are letters and digits, so a key is one word in terminals, shells and URLs. Only the SHA-256 of the
secret is stored: a random secret of 43 characters (256 bits) needs no slow password hash.
"""

import hashlib
import re
import string
from typing import Any, Literal

from msgspec import Struct

from inferry.domain.tenant_settings import limits_as_dict
from inferry.domain.tenants import ApiKey, Tenant

PREFIX = "ifk_"
ID_CHARACTERS = 10
SECRET_CHARACTERS = 43
ALPHABET = string.ascii_letters + string.digits
MAX_DURATION_S = 100 * 365 * 86_400
"""The longest lifetime or grace period of a key or callback secret."""

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def format_key(key_id: str, secret: str) -> str:
    """The key as shown to its owner once."""
    return f"{PREFIX}{key_id}_{secret}"


def parse_key(text: bytes) -> tuple[bytes, bytes]:
    """Key id and secret of a presented key; an empty id if it is not one."""
    prefix, _, rest = text.partition(b"_")
    key_id, _, secret = rest.partition(b"_")
    return (key_id if prefix == b"ifk" else b""), secret


def hash_secret(secret: bytes) -> bytes:
    """The hash that is stored instead of the secret."""
    return hashlib.sha256(secret).digest()


def is_valid_tenant_name(name: str) -> bool:
    """Whether the name is 1 to 64 letters, digits, dots, dashes and underscores."""
    return _NAME.fullmatch(name) is not None


def unknown_key(key_id: str) -> str:
    """The message that there is no key with this id. What may be a secret in place of an id is not repeated."""
    if len(key_id) <= ID_CHARACTERS and key_id.isalnum():
        return f"there is no key `{key_id}`"
    return "there is no such key; the id of a key is the part between its two underscores"


def key_status(key: ApiKey, wall: float) -> Literal["valid", "expired", "revoked"]:
    if key.revoked_at is not None and key.revoked_at <= wall:
        return "revoked"
    return "valid" if key.expires_at is None or wall < key.expires_at else "expired"


def key_as_dict(key: ApiKey, wall: float) -> dict[str, Any]:
    """A key as shown to operators, without its secret hash."""
    return {
        "id": key.key_id,
        "tenant": key.tenant,
        "label": key.label,
        "status": key_status(key, wall),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "limits": limits_as_dict(key.limits),
    }


class NewKey(Struct, frozen=True):
    """A new key with its text, which is shown once and not stored."""

    key: ApiKey
    text: str

    def __repr__(self) -> str:
        return f"NewKey({self.key!r})"


class TenantSnapshot(Struct, frozen=True):
    """All tenants and keys of a store at one version, revoked and expired keys included."""

    version: int
    tenants: tuple[Tenant, ...] = ()
    keys: tuple[ApiKey, ...] = ()
