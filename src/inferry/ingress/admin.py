"""`/admin/…`: what an operator sees of the workers, and does to them; and the door to what is said of tenants.

Whoever may drain a worker may stop the service, so this is not for everybody: with `server.admin_key` for those who
bring it, without one for clients on this machine alone. A browser on this machine is not one of them: any page may
make it send a request.
"""

import hmac
import ipaddress
from collections.abc import Callable

import msgspec

from inferry.dispatch.gateway import Gateway
from inferry.domain.errors import AdminOnly, MethodNotAllowed, NotFound
from inferry.ingress.admin_tenants import PATHS as TENANT_PATHS
from inferry.ingress.admin_tenants import AdminTenants
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request

PATHS = (
    *("GET /admin/workers", "POST /admin/workers/{name}/drain", "POST /admin/workers/{name}/readmit"),
    *TENANT_PATHS,
)
_WORKERS = "/admin/workers"
_UNTRUSTED_HEADERS = (
    *(b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode"),
    *(b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip", b"via"),
    b"cf-connecting-ip",
)
"""What a browser says of the page that sent it, and a proxy of the client behind it."""


class Admin:
    """The endpoints under `/admin/`."""

    def __init__(self, gateway: Gateway, key: str | None, tenants: AdminTenants | None = None) -> None:
        self._gateway = gateway
        self._tenants = tenants
        self._key = None if key is None else key.encode()
        self._actions: dict[str, Callable[[str], None]] = {
            "drain": gateway.fleet.drain,
            "readmit": gateway.fleet.readmit,
        }

    def serve(self, path: str, request: Request, reply: Reply) -> None:
        """Answer, or raise the GatewayError that says why not. `path` is decoded and without its query."""
        self.authorize(request, reply.peer)
        if self._tenants is not None and self._tenants.serve(path, request, reply):
            return
        if path == _WORKERS:
            if request.method not in (b"GET", b"HEAD"):
                raise MethodNotAllowed(f"{_WORKERS} takes GET")
        else:
            name, _, action = path.removeprefix(f"{_WORKERS}/").rpartition("/")
            act = self._actions.get(action) if path.startswith(f"{_WORKERS}/") else None
            if act is None:
                raise NotFound("there is nothing at this path; under /admin/ there is " + ", ".join(PATHS))
            if request.method != b"POST":
                raise MethodNotAllowed(f"{_WORKERS}/{{name}}/{action} takes POST")
            act(name)
        body = msgspec.json.encode({"workers": self._gateway.fleet.report()})
        reply.respond(200, b"content-type: application/json\r\n", body)

    def authorize(self, request: Request, peer: str) -> None:
        """Raise AdminOnly unless the request, from this address, may administer."""
        headers = request.headers
        if self._key is not None:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
                raise AdminOnly("this needs the admin key as a bearer token")
        elif not _is_loopback(peer):
            raise AdminOnly("this is for clients on the gateway's own machine; elsewhere set server.admin_key")
        elif any(name in headers for name in _UNTRUSTED_HEADERS) or not _is_loopback_host(headers.get(b"host", b"")):
            raise AdminOnly("this is neither for browsers nor behind proxies; there set server.admin_key")


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _is_loopback_host(host: bytes) -> bool:
    """Whether a Host header means this machine: a page whose own name was pointed here says that name."""
    name = host.decode("latin-1")
    if name.startswith("["):
        name, _, rest = name[1:].partition("]")
        if rest and not rest.startswith(":"):
            return False
    else:
        name = name.partition(":")[0]
    return name.lower() == "localhost" or _is_loopback(name)
