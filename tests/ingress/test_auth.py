"""From a request's headers and its sender's address to a caller."""

import pytest

from inferry.admission.directory import Directory
from inferry.domain.errors import InvalidApiKey
from inferry.domain.keys import hash_of, key_text
from inferry.domain.tenants import ApiKey, Tenant
from inferry.ingress.auth import Auth

SECRET = "s" * 43
KEY = ApiKey(key_id="k1", tenant="acme", secret_hash=hash_of(SECRET.encode()), expires_at=100.0)
SENT = key_text("k1", SECRET).encode()


def an_auth(*, required: bool, off_for_all: bool = False, wall: float = 0.0) -> Auth:
    directory = Directory([Tenant(name="acme")], [KEY], is_required=required)
    return Auth(directory, off_for_all=off_for_all, wall=lambda: wall)


@pytest.mark.parametrize("headers", [{b"authorization": b"Bearer " + SENT}, {b"x-api-key": SENT}])
@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.7", "2001:db8::1", ""])
def test_a_key_opens_the_door_from_anywhere(headers: dict[bytes, bytes], peer: str) -> None:
    assert an_auth(required=True).caller(headers, peer).key == KEY


def test_a_key_that_has_expired_meanwhile_does_not() -> None:
    with pytest.raises(InvalidApiKey):
        an_auth(required=True, wall=100.0).caller({b"x-api-key": SENT}, "127.0.0.1")


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_without_keys_this_machine_is_served(peer: str) -> None:
    assert an_auth(required=False).caller({b"x-inferry-tenant": b"b"}, peer).tenant.name == "b"


@pytest.mark.parametrize("peer", ["10.0.0.7", "::ffff:10.0.0.7", "1.127.0.0", "::12", "2001:db8::1", "", "localhost"])
def test_without_keys_nobody_else_is_unless_the_operator_says_so(peer: str) -> None:
    with pytest.raises(InvalidApiKey):
        an_auth(required=False).caller({}, peer)
    assert an_auth(required=False, off_for_all=True).caller({}, peer).tenant.name == "default"
