"""Sessions of browsers: signed, expiring, bound to the admin key, and powerless without their token."""

import pytest

from inferry.domain.errors import AdminOnly, RateLimited
from inferry.ingress.dashboard.sessions import (
    CSRF_HEADER,
    FAILURE_WINDOW_S,
    LIFETIME_S,
    MAX_ADDRESSES,
    MAX_FAILURES,
    FailureLimiter,
    Sessions,
    check_request,
)
from inferry.ingress.http.request import Request

NOW = 1_800_000_000.0
HOST = b"gateway.example"


def sessions(key: bytes | None = b"the-key", wall: float = NOW) -> Sessions:
    return Sessions(key, lambda: wall)


def request(method: bytes = b"GET", target: bytes = b"/admin/overview", **headers: bytes) -> Request:
    return Request(method, target, {name.replace("_", "-").encode(): value for name, value in headers.items()})


def with_cookie(one: Sessions, value: str) -> Request:
    return request(cookie=f"theme=dark; {one.cookie}={value}".encode())


def test_a_session_is_found_until_it_expires() -> None:
    value, made = sessions().create()
    assert sessions().find(with_cookie(sessions(), value)) == made
    assert made.expires_at == NOW + LIFETIME_S
    assert sessions(wall=NOW + LIFETIME_S - 1).find(with_cookie(sessions(), value)) == made
    assert sessions(wall=NOW + LIFETIME_S).find(with_cookie(sessions(), value)) is None


def test_a_session_that_was_signed_out_is_not_found_again() -> None:
    one = sessions()
    (value, ended), (other_value, other) = one.create(), one.create()
    one.end(ended)
    assert one.find(with_cookie(one, value)) is None
    assert one.find(with_cookie(one, other_value)) == other


def test_ended_sessions_are_remembered_until_they_expire() -> None:
    wall = [NOW]
    one = Sessions(b"the-key", lambda: wall[0])
    one.end(one.create()[1])
    wall[0] += LIFETIME_S
    one.end(one.create()[1])
    assert len(one._ended) == 1


def test_a_session_survives_a_restart_and_ends_with_its_admin_key() -> None:
    value, _ = sessions().create()
    other = sessions(b"another-key")
    assert other.cookie != sessions().cookie
    assert other.find(request(cookie=f"{other.cookie}={value}".encode())) is None


def test_a_cookie_that_was_changed_is_no_session() -> None:
    one = sessions()
    value, _ = one.create()
    expiry, number, signature = value.split(".")
    later = f"{int(expiry, 16) + 1:x}"
    unsigned = (f"{expiry}.{number}.", f"{expiry}.{number}", "", ".", "é.é.é", "x" * 9999)
    for wrong in (f"{later}.{number}.{signature}", *unsigned):
        assert one.find(request(cookie=f"{one.cookie}={wrong}".encode("latin-1"))) is None
    assert one.find(request()) is None


def test_two_sessions_have_different_tokens() -> None:
    one = sessions()
    assert one.create()[1].csrf != one.create()[1].csrf


def test_without_an_admin_key_only_the_gateways_own_page_has_a_session() -> None:
    one = sessions(None)
    found = one.find(request(sec_fetch_site=b"same-origin"))
    assert found is not None
    assert found.expires_at is None
    for site in (b"same-site", b"cross-site", b"none"):
        assert one.find(request(sec_fetch_site=site)) is None
    assert one.find(request()) is None
    assert sessions(None).find(request(sec_fetch_site=b"same-origin")) != found, "another process has another token"


def test_reading_needs_no_token() -> None:
    check_request(sessions().create()[1], request(b"GET"))
    check_request(sessions().create()[1], request(b"HEAD"))


CANCEL = b"/admin/runs/a?tenant=t"


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": b"same-origin", "origin": b"https://gateway.example"},
        {"origin": b"http://gateway.example", "host": HOST},
    ],
)
def test_an_action_needs_the_token_and_the_gateways_origin(headers: dict[str, bytes]) -> None:
    session = sessions().create()[1]
    token = {CSRF_HEADER.decode().replace("-", "_"): session.csrf.encode()}
    check_request(session, request(b"DELETE", CANCEL, **headers, **token))
    check_request(session, request(b"POST", b"/admin/workers/w/drain", **headers, **token))
    with pytest.raises(AdminOnly, match="token"):
        check_request(session, request(b"DELETE", CANCEL, **headers))
    other = {name: b"x" + value[1:] for name, value in token.items()}
    with pytest.raises(AdminOnly, match="token"):
        check_request(session, request(b"DELETE", CANCEL, **headers, **other))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": HOST},
        {"origin": b"http://evil.example", "host": HOST},
        {"origin": b"null", "host": HOST},
        {"sec_fetch_site": b"same-site", "origin": b"http://gateway.example", "host": HOST},
        {"sec_fetch_site": b"cross-site", "host": HOST},
    ],
)
def test_an_action_from_elsewhere_is_refused(headers: dict[str, bytes]) -> None:
    session = sessions().create()[1]
    token = {CSRF_HEADER.decode().replace("-", "_"): session.csrf.encode()}
    with pytest.raises(AdminOnly, match="own page"):
        check_request(session, request(b"DELETE", CANCEL, **headers, **token))


@pytest.mark.parametrize("target", [b"/admin/keys", b"/admin/tenants/a", b"/admin/tenants/a/data", b"/admin/runs"])
def test_a_session_changes_runs_and_workers_only(target: bytes) -> None:
    session = sessions().create()[1]
    asked = request(b"POST", target, sec_fetch_site=b"same-origin", x_inferry_csrf=session.csrf.encode())
    with pytest.raises(AdminOnly, match="use the admin key"):
        check_request(session, asked)


def test_wrong_keys_of_an_address_are_limited_for_a_while() -> None:
    limiter = FailureLimiter()
    for number in range(MAX_FAILURES):
        limiter.check("10.0.0.1", float(number))
        limiter.failed("10.0.0.1", float(number))
    with pytest.raises(RateLimited) as refused:
        limiter.check("10.0.0.1", 10.0)
    assert refused.value.retry_after_s == FAILURE_WINDOW_S - 10.0
    limiter.check("10.0.0.2", 10.0)
    limiter.check("10.0.0.1", FAILURE_WINDOW_S)
    limiter.failed("10.0.0.1", FAILURE_WINDOW_S)
    limiter.check("10.0.0.1", FAILURE_WINDOW_S + 1)


def test_the_memory_of_wrong_keys_is_bounded() -> None:
    limiter = FailureLimiter()
    for number in range(MAX_ADDRESSES + 10):
        limiter.failed(str(number), 0.0)
    assert len(limiter._failures) == MAX_ADDRESSES
