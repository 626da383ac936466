"""`/admin/alerts`: pending and firing alerts. `Admin` has authorized the request."""

from collections.abc import Callable

import msgspec

from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request

PATHS = ("GET /admin/alerts",)
_PATH = "/admin/alerts"
_JSON = b"content-type: application/json\r\ncache-control: no-store\r\n"


class AdminAlerts:
    """The endpoint. `report` returns the alerts of the moment."""

    def __init__(self, report: Callable[[], list[dict[str, object]]]) -> None:
        self._report = report

    def serve(self, path: str, request: Request, reply: Reply) -> bool:
        """Answer the request and return True; return False for other paths. Raises GatewayError."""
        if path != _PATH:
            return False
        if request.method not in (b"GET", b"HEAD"):
            raise WrongMethod(_PATH, "GET, HEAD")
        reply.respond(200, _JSON, msgspec.json.encode({"alerts": self._report()}))
        return True
