"""Authentication: headers to callers; a refusal reveals nothing about other tenants."""

import hmac
import timeit
from typing import Any

import pytest

from inferry.admission import caller_directory as module
from inferry.admission.caller_directory import Directory
from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, InvalidApiKey, InvalidRequest
from inferry.domain.keys import format_key, hash_secret, parse_key
from inferry.domain.lanes import Lane
from inferry.domain.tenants import ApiKey, Limits, Tenant

SECRET = "s" * 43
OTHER_SECRET = "z" * 43
ACME = Tenant(name="acme", limits=Limits(max_lane=Lane.P1, max_concurrent=3))


def a_key(key_id: str = "k1", tenant: str = "acme", secret: str = SECRET, **more: Any) -> ApiKey:
    return ApiKey(key_id=key_id, tenant=tenant, secret_hash=hash_secret(secret.encode()), **more)


def a_directory(*keys: ApiKey, required: bool = True) -> Directory:
    tenants = (ACME, Tenant(name="globex"), Tenant(name="closed", disabled=True))
    return Directory(tenants, keys, is_auth_required=required)


def bearer(key_id: str = "k1", secret: str = SECRET) -> bytes:
    return b"Bearer " + format_key(key_id, secret).encode()


def refusal(directory: Directory, authorization: bytes | None = None, tenant: bytes | None = None) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        directory.caller(authorization, None, tenant, 100.0)
    return caught.value


def test_a_key_identifies_its_tenant_and_its_limits() -> None:
    key = a_key()
    assert a_directory(key).caller(bearer(), None, None, 0.0) == Caller(ACME, key)


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER  "])
def test_the_bearer_scheme_is_case_insensitive(scheme: bytes) -> None:
    text = format_key("k1", SECRET).encode()
    assert a_directory(a_key()).caller(scheme + text, None, None, 0.0).tenant is ACME


def test_a_bearer_token_takes_precedence_over_x_api_key() -> None:
    directory = a_directory(a_key(), a_key("k2", "globex", OTHER_SECRET))
    other = format_key("k2", OTHER_SECRET).encode()
    assert directory.caller(None, other, None, 0.0).tenant.name == "globex"
    assert directory.caller(bearer(), other, None, 0.0).tenant.name == "acme"
    assert directory.caller(b"Basic dTpw", other, None, 0.0).tenant.name == "globex"


@pytest.mark.parametrize(
    "sent",
    [
        bearer(secret=OTHER_SECRET),
        bearer("nobody"),
        bearer("k1", ""),
        b"Bearer ifk_k1",
        b"Bearer sk-something-else",
        b"Bearer ifk__" + SECRET.encode(),
        b"Bearer xxx_k1_" + SECRET.encode(),
        b"Bearer " + b"\xff" * 40,
        b"Bearer " + hash_secret(SECRET.encode()),
        b"Bearer ifk_k1_" + SECRET.encode() + b"x",
    ],
)
def test_every_invalid_key_gets_the_same_error(sent: bytes) -> None:
    error = refusal(a_directory(a_key()), sent)
    assert isinstance(error, InvalidApiKey)
    assert str(error) == str(refusal(a_directory(a_key()), bearer("x")))
    assert SECRET not in str(error)
    assert "k1" not in str(error)


@pytest.mark.parametrize("sent", [None, b"", b"Bearer", b"Bearer  ", b"Basic abc"])
def test_the_error_for_a_missing_key_says_how_to_send_one(sent: bytes | None) -> None:
    error = refusal(a_directory(a_key()), sent)
    assert isinstance(error, InvalidApiKey)
    assert "Authorization: Bearer" in str(error)
    assert "x-api-key" in str(error)


@pytest.mark.parametrize(
    "sent",
    [bearer(secret=OTHER_SECRET), bearer("nobody"), b"Bearer nonsense", bearer("gone"), bearer("late"), bearer("lost")],
)
def test_every_refusal_hashes_and_compares_once(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hash and one comparison of 32 bytes with 32, whether the id is known, unknown, revoked or none at all."""
    did: list[tuple[str, int]] = []

    def hashing(secret: bytes) -> bytes:
        did.append(("hash", 32))
        return hash_secret(secret)

    def comparing(a: bytes, b: bytes) -> bool:
        did.append(("compare", len(a) + len(b)))
        return hmac.compare_digest(a, b)

    directory = a_directory(
        a_key(), a_key("gone", revoked_at=50.0), a_key("late", expires_at=50.0), a_key("lost", "unheard-of")
    )
    monkeypatch.setattr(module, "hash_secret", hashing)
    monkeypatch.setattr(module, "compare_digest", comparing)
    refusal(directory, sent)
    assert did == [("hash", 32), ("compare", 64)]


def test_a_key_expires_exactly_at_its_expiry_time() -> None:
    for key in (a_key(expires_at=100.0), a_key(revoked_at=100.0), a_key(expires_at=200.0, revoked_at=100.0)):
        directory = a_directory(key)
        assert directory.caller(bearer(), None, None, 99.9).key is key
        refusal(directory, bearer())


def test_keys_of_disabled_and_unknown_tenants_are_refused() -> None:
    refusal(a_directory(a_key(tenant="closed")), bearer())
    refusal(a_directory(a_key(tenant="unheard-of")), bearer())
    assert isinstance(refusal(a_directory(required=False), None, b"closed"), InvalidApiKey)


def test_a_tenant_header_of_another_tenant_is_refused() -> None:
    directory = a_directory(a_key())
    assert directory.caller(bearer(), None, b"acme", 0.0).tenant is ACME
    error = refusal(directory, bearer(), b"globex")
    assert isinstance(error, InvalidApiKey)
    assert error.param == "x-inferry-tenant"
    assert str(error) == str(refusal(directory, bearer(), b"who-is-this")), "it does not say which tenants there are"
    assert isinstance(refusal(directory, None, b"globex"), InvalidApiKey)
    assert "globex" not in str(error)


def test_without_authentication_the_tenant_header_selects_tenant_and_limits() -> None:
    directory = a_directory(a_key(), required=False)
    assert directory.caller(None, None, b"acme", 0.0) == Caller(ACME)
    assert directory.caller(b"Bearer anything", b"anything", None, 0.0) == Caller(Tenant(name="default"))
    assert directory.caller(None, None, b"new-one", 0.0) == Caller(Tenant(name="new-one"))
    assert directory.caller(bearer(), None, b"globex", 0.0).key is None


def test_limits_of_the_default_tenant_apply_to_calls_without_a_tenant() -> None:
    default = Tenant(name="default", limits=Limits(max_concurrent=1))
    assert Directory([default], is_auth_required=False).caller(None, None, None, 0.0).tenant is default


@pytest.mark.parametrize("name", [b"two words", b"\xe9", b"x" * 257, b"tab\t"])
def test_without_authentication_an_invalid_tenant_name_is_refused(name: bytes) -> None:
    error = refusal(a_directory(required=False), None, name)
    assert isinstance(error, InvalidRequest)
    assert error.param == "x-inferry-tenant"


def test_an_empty_key_id_is_refused() -> None:
    """The id that what is no key gets, so a row without an id must not become everybody's key."""
    directory = a_directory(a_key(""))
    refusal(directory, b"Bearer ifk__" + SECRET.encode())
    assert parse_key(b"hello_world_" + SECRET.encode()) == (b"", SECRET.encode())


def test_a_lookup_does_not_depend_on_the_number_of_keys() -> None:
    def lookup(count: int) -> float:
        keys = [a_key(f"k{i}", secret=f"{i:043d}") for i in range(count)]
        directory, sent = a_directory(*keys), bearer(f"k{count - 1}", f"{count - 1:043d}")
        return min(timeit.repeat(lambda: directory.caller(sent, None, None, 0.0), number=2000, repeat=7))

    assert lookup(10_000) < 3 * lookup(10)


def test_a_lookup_costs_little_more_than_the_hash_it_needs() -> None:
    directory, sent, secret = a_directory(a_key()), bearer(), SECRET.encode()
    looking = min(timeit.repeat(lambda: directory.caller(sent, None, None, 0.0), number=2000, repeat=7))
    hashing = min(timeit.repeat(lambda: hash_secret(secret), number=2000, repeat=7))
    assert looking < 12 * hashing


def test_keys_and_secrets_stay_out_of_reprs() -> None:
    key = a_key()
    assert SECRET not in repr(Caller(ACME, key))
    assert repr(key.secret_hash) not in repr(Caller(ACME, key))
