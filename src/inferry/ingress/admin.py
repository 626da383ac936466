"""`/admin/…`: authorization of operators, and the endpoints for workers. `admin_tenants` has those for tenants and
keys.

With `server.admin_key` the endpoints need that key, or the session of a browser that has signed in with it. Without one
they serve only clients on the gateway's own machine. Browsers are refused there, because any web page can make a
browser send a request, except for requests of the dashboard's own page (`dashboard.sessions`).
"""

import ipaddress
from collections.abc import Callable
from posixpath import normpath
from urllib.parse import unquote_to_bytes

import msgspec

from inferry.dispatch.gateway import Gateway
from inferry.domain.errors import AdminOnly, MethodNotAllowed, NotFound
from inferry.ingress.admin_adapters import LOAD, UNLOAD, AdminAdapters
from inferry.ingress.admin_adapters import PATHS as ADAPTER_PATHS
from inferry.ingress.admin_alerts import PATHS as ALERT_PATHS
from inferry.ingress.admin_alerts import AdminAlerts
from inferry.ingress.admin_callbacks import PATHS as CALLBACK_PATHS
from inferry.ingress.admin_callbacks import AdminCallbacks
from inferry.ingress.admin_diagnosis import PATHS as DIAGNOSIS_PATHS
from inferry.ingress.admin_endpoint import AdminEndpoint
from inferry.ingress.admin_reports import PATHS as REPORT_PATHS
from inferry.ingress.admin_scale import PATH as SCALE
from inferry.ingress.admin_scale import PATHS as SCALE_PATHS
from inferry.ingress.admin_settings import PATHS as SETTINGS_PATHS
from inferry.ingress.admin_storage import PATHS as STORAGE_PATHS
from inferry.ingress.admin_storage import AdminStorage
from inferry.ingress.admin_tenants import PATHS as TENANT_PATHS
from inferry.ingress.admin_tenants import AdminTenants
from inferry.ingress.admin_work import PATHS as WORK_PATHS
from inferry.ingress.dashboard.endpoints import PATHS as DASHBOARD_PATHS
from inferry.ingress.dashboard.endpoints import SESSION, SESSION_PATHS, DashboardEndpoints, SessionEndpoint
from inferry.ingress.dashboard.sessions import AdminKeyCheck, Session, Sessions, check_request
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request

PATHS = (
    *("GET /admin/workers", "POST /admin/workers/{name}/drain", "POST /admin/workers/{name}/readmit"),
    *TENANT_PATHS,
    *STORAGE_PATHS,
    *CALLBACK_PATHS,
    *REPORT_PATHS,
    *DIAGNOSIS_PATHS,
    *SCALE_PATHS,
    *WORK_PATHS,
    *SETTINGS_PATHS,
    *ALERT_PATHS,
    *DASHBOARD_PATHS,
    *SESSION_PATHS,
    *ADAPTER_PATHS,
)
_WORKERS = "/admin/workers"
PREFIXES = ("/admin", LOAD, UNLOAD)
"""Where the endpoints are; metrics count requests by them."""
_BROWSER_HEADERS = (b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode")
_PROXY_HEADERS = (
    *(b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip", b"via"),
    b"cf-connecting-ip",
)


def is_admin_path(path: str) -> bool:
    """Whether a path needs an operator's key, decoded and without a query."""
    return path.startswith("/admin/") or path in (LOAD, UNLOAD)


def is_admin_target(target: bytes) -> bool:
    """Whether a request target means such a path for any server, however it is written."""
    path = unquote_to_bytes(target.partition(b"?")[0]).decode("latin-1").lower()
    path = normpath("/" + path.lstrip("/"))
    return path == "/admin" or is_admin_path(path)


def is_worker_path(path: str) -> bool:
    """Whether requests to a path are about workers or their adapters."""
    return path in (SCALE, _WORKERS, LOAD, UNLOAD) or path.startswith(f"{_WORKERS}/")


class Admin:
    """The endpoints for operators."""

    def __init__(self, gateway: Gateway, key: str | None, tenants: AdminTenants | None = None) -> None:
        self._gateway = gateway
        self._tenants = tenants
        self.adapters: AdminAdapters | None = None
        self.storage: AdminStorage | None = None
        self.callbacks: AdminCallbacks | None = None
        self.endpoints: list[AdminEndpoint] = []
        self.alerts: AdminAlerts | None = None
        self.dashboard: DashboardEndpoints | None = None
        raw_key = None if key is None else key.encode()
        self._key_check = None if raw_key is None else AdminKeyCheck(raw_key, gateway.now)
        self.sessions = Sessions(raw_key, gateway.wall)
        self._sign_in = SessionEndpoint(self._key_check, self.sessions)
        self._actions: dict[str, Callable[[str], None]] = {
            "drain": gateway.drain_worker,
            "readmit": gateway.readmit_worker,
        }

    def serve(self, path: str, request: Request, reply: Reply) -> None:
        """Answer the request or raise a GatewayError. `path` is decoded and has no query."""
        if path == SESSION:
            self._sign_in.serve(request, reply, lambda: _is_local(request, reply.peer))
            return
        self.authorize(request, reply.peer)
        if self.dashboard is not None and self.dashboard.answer(path, request, reply):
            return
        if self.adapters is not None and self.adapters.serve(path, request, reply):
            return
        if self.storage is not None and self.storage.serve(path, request, reply):
            return
        if self.callbacks is not None and self.callbacks.serve(path, request, reply):
            return
        if self.alerts is not None and self.alerts.serve(path, request, reply):
            return
        if self._tenants is not None and self._tenants.serve(path, request, reply):
            return
        if any(endpoint.serve(path, request, reply) for endpoint in self.endpoints):
            return
        if path == _WORKERS:
            if request.method not in (b"GET", b"HEAD"):
                raise MethodNotAllowed(f"{_WORKERS} supports only GET")
        else:
            name, _, action = path.removeprefix(f"{_WORKERS}/").rpartition("/")
            act = self._actions.get(action) if path.startswith(f"{_WORKERS}/") else None
            if act is None:
                raise NotFound("unknown path; the endpoints under /admin/ are " + ", ".join(PATHS))
            if request.method != b"POST":
                raise MethodNotAllowed(f"{_WORKERS}/{{name}}/{action} supports only POST")
            act(name)
        body = msgspec.json.encode({"workers": self._gateway.worker_reports()})
        reply.respond(200, b"content-type: application/json\r\n", body)

    async def close(self) -> None:
        """End what the endpoints have under way."""
        if self.dashboard is not None:
            await self.dashboard.close()
        if self.adapters is not None:
            await self.adapters.close()
        for endpoint in self.endpoints:
            await endpoint.close()

    def authorize(self, request: Request, peer: str) -> None:
        """Raise AdminOnly unless a request from this address may use the admin endpoints."""
        headers = request.headers
        if any(endpoint.accepts_key(request) for endpoint in self.endpoints):
            return
        session: Session | None = None
        if self._key_check is not None:
            has_key = bool(headers.get(b"authorization"))
            if has_key and self._key_check.accepts(request):
                return
            session = None if has_key else self.sessions.find(request)
            if session is None:
                raise AdminOnly("the admin endpoints need the admin key as a bearer token")
        elif not _is_loopback(peer):
            raise AdminOnly("without server.admin_key the admin endpoints serve only clients on the gateway's machine")
        elif not _is_local(request, peer):
            raise AdminOnly("without server.admin_key the admin endpoints serve no proxies")
        elif any(name in headers for name in _BROWSER_HEADERS):
            session = self.sessions.find(request)
            if session is None:
                raise AdminOnly("without server.admin_key the admin endpoints serve no web page but the dashboard")
        if session is not None:
            check_request(session, request)


def _is_local(request: Request, peer: str) -> bool:
    """Whether a client on the gateway's own machine sent the request itself, to a name of this machine."""
    headers = request.headers
    is_direct = _is_loopback(peer) and not any(name in headers for name in _PROXY_HEADERS)
    return is_direct and _is_loopback_host(headers.get(b"host", b""))


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _is_loopback_host(host: bytes) -> bool:
    """Whether a Host header names this machine. DNS rebinding would show another name."""
    name = host.decode("latin-1")
    if name.startswith("["):
        name, _, rest = name[1:].partition("]")
        if rest and not rest.startswith(":"):
            return False
    else:
        name = name.partition(":")[0]
    return name.lower() == "localhost" or _is_loopback(name)
