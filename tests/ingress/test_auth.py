"""From a request's headers and its sender's address to a caller."""

import pytest

from inferry.admission.caller_directory import Directory
from inferry.domain.errors import InvalidApiKey
from inferry.domain.keys import format_key, hash_secret
from inferry.domain.tenants import ApiKey, Tenant
from inferry.ingress.auth import Auth

SECRET = "s" * 43
KEY = ApiKey(key_id="k1", tenant="acme", secret_hash=hash_secret(SECRET.encode()), expires_at=100.0)
SENT = format_key("k1", SECRET).encode()


def an_auth(*, required: bool, allow_remote: bool = False, wall: float = 0.0) -> Auth:
    directory = Directory([Tenant(name="acme")], [KEY], is_auth_required=required)
    return Auth(directory, allow_remote=allow_remote, wall=lambda: wall)


@pytest.mark.parametrize("headers", [{b"authorization": b"Bearer " + SENT}, {b"x-api-key": SENT}])
@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.7", "2001:db8::1", ""])
def test_a_valid_key_is_accepted_from_any_address(headers: dict[bytes, bytes], peer: str) -> None:
    assert an_auth(required=True).caller(headers, peer).key == KEY


def test_an_expired_key_is_rejected() -> None:
    with pytest.raises(InvalidApiKey):
        an_auth(required=True, wall=100.0).caller({b"x-api-key": SENT}, "127.0.0.1")


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_without_keys_loopback_clients_are_served(peer: str) -> None:
    assert an_auth(required=False).caller({b"x-inferry-tenant": b"b"}, peer).tenant.name == "b"


@pytest.mark.parametrize("peer", ["10.0.0.7", "::ffff:10.0.0.7", "1.127.0.0", "::12", "2001:db8::1", "", "localhost"])
def test_without_keys_remote_clients_are_refused_unless_allowed(peer: str) -> None:
    with pytest.raises(InvalidApiKey):
        an_auth(required=False).caller({}, peer)
    assert an_auth(required=False, allow_remote=True).caller({}, peer).tenant.name == "default"
