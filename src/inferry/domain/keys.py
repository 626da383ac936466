"""The text of an API key: `ifk_<key id>_<secret>`. The id is public and says where to look; the secret is the proof.

Letters and digits only, so that a key is one word to a terminal, a shell and a URL, and the two underscores say where
its parts are. Of the secret only the SHA-256 is kept: 43 drawn characters are 256 bits, which no dictionary holds and
nobody can try out, so the slow hashes that passwords need would cost every call milliseconds and buy nothing.
"""

import hashlib
import re
import string
from typing import Any, Literal

from msgspec import Struct

from inferry.domain.settings import limits_as_dict
from inferry.domain.tenants import ApiKey, Tenant

PREFIX = "ifk_"
ID_CHARACTERS = 10
SECRET_CHARACTERS = 43
ALPHABET = string.ascii_letters + string.digits

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def format_key(key_id: str, secret: str) -> str:
    """The whole key, as its owner gets it, once."""
    return f"{PREFIX}{key_id}_{secret}"


def parse_key(text: bytes) -> tuple[bytes, bytes]:
    """Key id and secret of what somebody sent. Where that is no key, the id is one that no key has: empty."""
    prefix, _, rest = text.partition(b"_")
    key_id, _, secret = rest.partition(b"_")
    return (key_id if prefix == b"ifk" else b""), secret


def hash_secret(secret: bytes) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(secret).digest()


def is_valid_tenant_name(name: str) -> bool:
    """Whether a tenant can be called so: 1 to 64 letters, digits, dots, dashes and underscores."""
    return _NAME.fullmatch(name) is not None


def key_status(key: ApiKey, wall: float) -> Literal["valid", "expired", "revoked"]:
    if key.revoked_at is not None and key.revoked_at <= wall:
        return "revoked"
    return "valid" if key.expires_at is None or wall < key.expires_at else "expired"


def key_as_dict(key: ApiKey, wall: float) -> dict[str, Any]:
    """What operators may see of a key: nothing that helps to use it."""
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
    """A key that was just made, with its whole text: for its owner's eyes, this once."""

    key: ApiKey
    text: str

    def __repr__(self) -> str:
        return f"NewKey({self.key!r})"


class TenantSnapshot(Struct, frozen=True):
    """All tenants and keys of a store as of one version of it, revoked and expired keys included."""

    version: int
    tenants: tuple[Tenant, ...] = ()
    keys: tuple[ApiKey, ...] = ()
