"""Sessions of browsers, and the requests that the dashboard's page may make. Pure, except for random numbers.

With an admin key, the page exchanges the key for a cookie. The cookie has its expiry and a random number, signed with a
key derived from the admin key: it stays valid when the gateway restarts, and another admin key ends all sessions. A
session that was signed out is remembered as ended until it expires, in the memory of this process. The cookie is
HttpOnly and SameSite=Strict, so that scripts cannot read it and other sites cannot send it. Without an admin key there
is no cookie: the page of a browser on the gateway's own machine is admitted by `Sec-Fetch-Site`, which scripts cannot
set.

A request that changes something needs the token of its session in `x-inferry-csrf` too, and must come from the
gateway's own origin. It may cancel runs and drain workers, and nothing else: tenants and keys need the admin key.
"""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from inferry.domain.errors import AdminOnly, RateLimited
from inferry.ingress.http.request import Request

LIFETIME_S = 12 * 3600
CSRF_HEADER = b"x-inferry-csrf"
MAX_FAILURES = 5
"""Wrong admin keys of one address within `FAILURE_WINDOW_S`; further keys are refused unchecked."""
FAILURE_WINDOW_S = 60.0
MAX_ADDRESSES = 4096

_SAFE = (b"GET", b"HEAD")
_ACTIONS = (b"/admin/runs/", b"/admin/workers/")


class Session(NamedTuple):
    """A signed-in browser. `expires_at` is in Unix seconds; None does not expire."""

    csrf: str
    expires_at: float | None


class Sessions:
    """Signs and verifies sessions. `admin_key` is None where the gateway has none."""

    def __init__(self, admin_key: bytes | None, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._secret = hmac.digest(admin_key or secrets.token_bytes(32), b"inferry dashboard session 1", "sha256")
        # Browsers send a cookie to every port of its host: gateways with different keys use different names.
        self.cookie = f"inferry_session_{self._sign('name')[:8]}"
        self._local = None if admin_key is not None else Session(self._sign("csrf local"), None)
        self._ended: dict[str, float] = {}
        """Until when the sessions that were signed out would have lasted, by their token."""

    def create(self) -> tuple[str, Session]:
        """The value of a new cookie, and its session."""
        payload = f"{int(self._wall()) + LIFETIME_S:x}.{secrets.token_hex(16)}"
        return f"{payload}.{self._sign('session ' + payload)}", self._session(payload)

    def find(self, request: Request) -> Session | None:
        """The session of a request from a browser; None without a valid one."""
        if self._local is not None:
            return self._local if request.headers.get(b"sec-fetch-site") == b"same-origin" else None
        for part in request.headers.get(b"cookie", b"").decode("latin-1").split(";"):
            name, _, value = part.strip().partition("=")
            if name == self.cookie:
                payload, _, signature = value.rpartition(".")
                if hmac.compare_digest(signature.encode("latin-1"), self._sign("session " + payload).encode()):
                    session = self._session(payload)
                    if self.is_current(session):
                        return session
        return None

    def end(self, session: Session) -> None:
        """Make the session invalid. A session without a cookie does not end."""
        now = self._wall()
        self._ended = {csrf: until for csrf, until in self._ended.items() if now < until}
        if session.expires_at is not None:
            self._ended[session.csrf] = session.expires_at

    def is_current(self, session: Session) -> bool:
        """Whether the session has neither expired nor been signed out."""
        return session.csrf not in self._ended and (session.expires_at is None or self._wall() < session.expires_at)

    def _session(self, payload: str) -> Session:
        return Session(self._sign("csrf " + payload), float(int(payload.partition(".")[0], 16)))

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, text.encode("latin-1"), hashlib.sha256).hexdigest()


def check_request(session: Session, request: Request) -> None:
    """Raise AdminOnly unless a request of this session may do what it asks for."""
    if request.method in _SAFE:
        return
    headers = request.headers
    if not is_same_origin(request):
        raise AdminOnly("the request does not come from the gateway's own page")
    if not hmac.compare_digest(headers.get(CSRF_HEADER, b""), session.csrf.encode()):
        raise AdminOnly("the request lacks the token of its session in x-inferry-csrf")
    if not request.target.startswith(_ACTIONS):
        raise AdminOnly("a browser's session cannot change this; use the admin key")


def is_same_origin(request: Request) -> bool:
    """Whether a browser sent the request for a page of the gateway itself.

    Browsers send `Sec-Fetch-Site` over HTTPS and to loopback addresses, and `Origin` with every request that is not a
    GET.
    """
    headers = request.headers
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site == b"same-origin"
    return headers.get(b"origin", b"").partition(b"://")[2] == headers.get(b"host", b"-")


class AdminKeyCheck:
    """Compares bearer tokens with the admin key, and limits the wrong ones of an address."""

    def __init__(self, key: bytes, now: Callable[[], float]) -> None:
        self._key = key
        self._now = now
        self._limiter = FailureLimiter()

    def accepts(self, request: Request, address: str) -> bool:
        """Whether the bearer token is the admin key. Raises RateLimited after too many wrong ones, without a look."""
        now = self._now()
        self._limiter.check(address, now)
        scheme, _, given = request.headers.get(b"authorization", b"").partition(b" ")
        is_right = scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key)
        if not is_right:
            self._limiter.failed(address, now)
        return is_right


class FailureLimiter:
    """Counts wrong admin keys per address. The oldest addresses are forgotten first."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def check(self, address: str, now: float) -> None:
        """Raise RateLimited if the address has failed too often."""
        since, count = self._failures.get(address, (now, 0))
        if count >= MAX_FAILURES and now < since + FAILURE_WINDOW_S:
            raise RateLimited(
                "too many wrong admin keys from this address", retry_after_s=since + FAILURE_WINDOW_S - now
            )

    def failed(self, address: str, now: float) -> None:
        since, count = self._failures.pop(address, (now, 0))
        self._failures[address] = (since, count + 1) if now < since + FAILURE_WINDOW_S else (now, 1)
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)
