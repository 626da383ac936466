"""The endpoints of the dashboard under `/admin/`: its data, the runs of all tenants, and the sessions of browsers."""

import re
from collections.abc import Callable
from urllib.parse import parse_qsl, urlencode

import msgspec

from inferry.dispatch.gateway import Gateway
from inferry.domain.errors import AdminOnly, InvalidRequest, NotFound, RunNotFound
from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.dashboard.data import MAX_RUNS, DashboardData
from inferry.ingress.dashboard.feed import OverviewFeed
from inferry.ingress.dashboard.sessions import LIFETIME_S, AdminKeyCheck, Session, Sessions
from inferry.ingress.dashboard.values import RunStates, SessionState, Timeline
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.router import Fail, Refuse, Router
from inferry.ingress.runs import MAX_TIMELINE_CALLS, RunEndpoints, run_identifier
from inferry.ingress.runs import PREFIX as TENANT_RUNS

SESSION = "/admin/session"
OVERVIEW = "/admin/overview"
STREAM = "/admin/overview/stream"
RUNS = "/admin/runs"
_TIMELINE = "/timeline"
_PERFETTO = "format=perfetto"
SESSION_PATHS = (f"GET {SESSION}", f"POST {SESSION}", f"DELETE {SESSION}")
PATHS = (
    *(f"GET {OVERVIEW}", f"GET {STREAM}", f"GET {RUNS}", f"GET {RUNS}/{{id}}", f"DELETE {RUNS}/{{id}}"),
    f"GET {RUNS}/{{id}}{_TIMELINE}",
)
_GETS = (b"GET", b"HEAD")
_JSON = b"content-type: application/json\r\ncache-control: no-store\r\n"
_TENANT = re.compile(r"[\x21-\x7e]{1,256}")


class SessionEndpoint:
    """Sign-in and sign-out of browsers. Serves requests that nothing has authorized yet."""

    def __init__(self, key_check: AdminKeyCheck | None, sessions: Sessions) -> None:
        self._key_check = key_check
        self._sessions = sessions

    def serve(self, request: Request, reply: Reply, is_local: Callable[[], bool]) -> None:
        """Answer the request or raise a GatewayError. `is_local`: whether a gateway without a key admits it."""
        if request.method == b"POST":
            self._sign_in(request, reply)
        elif request.method == b"DELETE":
            session = self._sessions.find(request)
            if session is not None:
                self._sessions.end(session)
            self._answer(reply, None, f"{self._sessions.cookie}=; Path=/admin; Max-Age=0")
        elif request.method in _GETS:
            is_admitted = self._key_check is not None or is_local()
            self._answer(reply, self._sessions.find(request) if is_admitted else None)
        else:
            raise WrongMethod(SESSION, "GET, HEAD, POST, DELETE")

    def _sign_in(self, request: Request, reply: Reply) -> None:
        """Exchange the admin key, sent as a bearer token, for a cookie."""
        if self._key_check is None:
            raise AdminOnly("this gateway has no admin key to sign in with; set server.admin_key")
        if not self._key_check.accepts_sign_in(request, reply.peer):
            raise AdminOnly("wrong admin key")
        value, session = self._sessions.create()
        # A proxy that ends TLS says so; over plain HTTP a Secure cookie would not be sent back.
        secure = "; Secure" if request.headers.get(b"x-forwarded-proto") == b"https" else ""
        self._answer(reply, session, f"{self._sessions.cookie}={value}; Path=/admin; Max-Age={LIFETIME_S}{secure}")

    def _answer(self, reply: Reply, session: Session | None, cookie: str | None = None) -> None:
        state = SessionState(
            needs_key=self._key_check is not None,
            signed_in=session is not None,
            csrf=None if session is None else session.csrf,
            expires_at=None if session is None else session.expires_at,
        )
        headers = _JSON if cookie is None else _JSON + f"set-cookie: {cookie}; HttpOnly; SameSite=Strict\r\n".encode()
        reply.respond(200, headers, msgspec.json.encode(state))


class DashboardEndpoints(Router):
    """Data and actions of the dashboard. `Admin` has authorized the request."""

    prefix = OVERVIEW
    paths = PATHS

    def __init__(
        self,
        refuse: Refuse,
        fail: Fail,
        data: DashboardData,
        gateway: Gateway,
        runs: RunEndpoints,
        sessions: Sessions,
    ) -> None:
        super().__init__(refuse, fail)
        self._data = data
        self._feed = OverviewFeed(data, sessions.is_current, lambda: gateway.is_draining)
        self._runs = runs
        self._sessions = sessions

    def answer(self, path: str, request: Request, reply: Reply) -> bool:
        """Answer the request, at once or later, and return True; return False for other paths. Raises GatewayError."""
        if path in (OVERVIEW, STREAM, RUNS):
            if request.method not in _GETS:
                raise WrongMethod(path, "GET, HEAD")
            if path == STREAM:
                self._feed.add(reply, None if b"authorization" in request.headers else self._sessions.find(request))
            elif path == OVERVIEW:
                reply.respond(200, _JSON, self._data.overview())
            else:
                reply.respond(200, _JSON, msgspec.json.encode(RunStates(runs=self._data.runs(MAX_RUNS))))
            return True
        if not path.startswith(f"{RUNS}/"):
            return False
        self._serve_run(request, reply)
        return True

    async def close(self) -> None:
        """End the streams, and wait for what is under way."""
        self._feed.close()
        await self._data.close()
        await super().close()

    def _serve_run(self, request: Request, reply: Reply) -> None:
        target, _, query = request.target.decode("latin-1").partition("?")
        rest = target.removeprefix(f"{RUNS}/")
        is_timeline = rest.endswith(_TIMELINE)
        encoded_id = rest.removesuffix(_TIMELINE)
        if "/" in encoded_id:  # an id with a slash is sent percent-encoded
            raise NotFound("unknown path")
        if is_timeline and request.method not in _GETS:
            raise WrongMethod(f"{RUNS}/{{id}}{_TIMELINE}", "GET, HEAD")
        if request.method not in (*_GETS, b"DELETE"):
            raise WrongMethod(f"{RUNS}/{{id}}", "GET, HEAD, DELETE")
        tenant, others = _split_tenant(query)
        if is_timeline and others == _PERFETTO:
            trace = f"{_PERFETTO}&limit={MAX_TIMELINE_CALLS}"
            self._runs.serve_tenant(tenant, f"{TENANT_RUNS}/{rest}", trace, request, reply)
        elif is_timeline:
            if others:
                raise InvalidRequest("unknown query parameter; supported are tenant and format=perfetto", param="query")
            self.respond_later(self._timeline(tenant, run_identifier(encoded_id)), request, reply)
        else:
            self._runs.serve_tenant(tenant, f"{TENANT_RUNS}/{encoded_id}", others, request, reply)

    async def _timeline(self, tenant: str, run_id: str) -> Timeline:
        found = await self._data.timeline(tenant, run_id)
        if found is None:
            raise RunNotFound(f"unknown run `{run_id}`")
        return found


def _split_tenant(query: str) -> tuple[str, str]:
    """The tenant that a query names, and the rest of the query."""
    pairs = parse_qsl(query, keep_blank_values=True, encoding="latin-1")
    tenants = [value for name, value in pairs if name == "tenant"]
    if len(tenants) != 1 or _TENANT.fullmatch(tenants[0]) is None:
        raise InvalidRequest("`tenant` must name the run's tenant", param="tenant")
    others = [(name, value) for name, value in pairs if name != "tenant"]
    return tenants[0], urlencode(others, encoding="latin-1")
