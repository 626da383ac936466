"""`DELETE /admin/tenants/{name}/data`: deletes what is stored for a tenant. `Admin` has authorized the request."""

import asyncio
import logging
import re
from collections.abc import Callable

import msgspec

from inferry.domain.errors import GatewayError, InternalError, InvalidRequest
from inferry.durable.tenant_data import TenantData
from inferry.ingress.admin_tenants import TENANTS, WrongMethod
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request

log = logging.getLogger(__name__)

PATHS = (f"DELETE {TENANTS}/{{name}}/data",)
_PATH = re.compile(rf"{TENANTS}/([^/]+)/data")
_TENANT = re.compile(r"[\x21-\x7e]{1,256}")  # also tenants that clients name while authentication is off
_JSON = b"content-type: application/json\r\n"


class AdminStorage:
    """The endpoint. `refuse` sends an error response."""

    def __init__(self, data: TenantData, refuse: Callable[[GatewayError, Request, Reply], None]) -> None:
        self._data = data
        self._refuse = refuse
        self._pending: set[asyncio.Task[None]] = set()

    def serve(self, path: str, request: Request, reply: Reply) -> bool:
        """Answer the request later and return True; return False for other paths. Raises GatewayError."""
        found = _PATH.fullmatch(path)
        if found is None:
            return False
        if request.method != b"DELETE":
            raise WrongMethod(f"{TENANTS}/{{name}}/data", "DELETE")
        if _TENANT.fullmatch(found[1]) is None:
            raise InvalidRequest("a tenant's name is 1 to 256 printable ASCII characters without spaces", param="name")
        task = asyncio.get_running_loop().create_task(self._delete(found[1], request, reply))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        return True

    async def _delete(self, tenant: str, request: Request, reply: Reply) -> None:
        try:
            deleted = await self._data.delete(tenant)
            answer = {"name": tenant, **msgspec.structs.asdict(deleted)}
            reply.respond(200, _JSON, msgspec.json.encode(answer))
        except GatewayError as error:
            self._refuse(error, request, reply)
        except Exception:
            log.exception("stored content could not be deleted")
            self._refuse(InternalError("stored content could not be deleted"), request, reply)
