"""`/admin/tenants/{name}/callback-secrets`: secrets that sign callbacks. `Admin` has authorized the request.

The text of a secret is in the response that creates it and nowhere else.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec

from inferry.domain.errors import GatewayError, InternalError, InvalidRequest
from inferry.domain.keys import MAX_DURATION_S, is_valid_tenant_name
from inferry.durable.callback_secrets import CallbackSecrets, secret_object
from inferry.durable.callback_signature import secret_text
from inferry.ingress.admin_tenants import TENANTS, RotateKeyBody, WrongMethod
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.openai.decode import decode_body

log = logging.getLogger(__name__)

_TEMPLATE = f"{TENANTS}/{{name}}/callback-secrets"
PATHS = (f"GET {_TEMPLATE}", f"POST {_TEMPLATE}")
_PATH = re.compile(rf"{TENANTS}/([^/]+)/callback-secrets")
_JSON = b"content-type: application/json\r\ncache-control: no-store\r\n"
_decoder = msgspec.json.Decoder(RotateKeyBody)


class AdminCallbacks:
    """The endpoints. `refuse` sends an error response."""

    def __init__(self, secrets: CallbackSecrets, refuse: Callable[[GatewayError, Request, Reply], None]) -> None:
        self._secrets = secrets
        self._refuse = refuse
        self._pending: set[asyncio.Task[None]] = set()

    def serve(self, path: str, request: Request, reply: Reply) -> bool:
        """Answer the request later and return True; return False for other paths. Raises GatewayError."""
        found = _PATH.fullmatch(path)
        if found is None:
            return False
        if request.method not in (b"GET", b"HEAD", b"POST"):
            raise WrongMethod(_TEMPLATE, "GET, HEAD, POST")
        if not is_valid_tenant_name(found[1]):
            raise InvalidRequest("invalid name of a tenant", param="name")
        task = asyncio.get_running_loop().create_task(self._answer(found[1], request, reply))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        return True

    async def _answer(self, tenant: str, request: Request, reply: Reply) -> None:
        try:
            is_rotation = request.method == b"POST"
            answer = await self._rotate(tenant, request) if is_rotation else await self._list(tenant)
            reply.respond(201 if is_rotation else 200, _JSON, msgspec.json.encode(answer))
        except GatewayError as error:
            self._refuse(error, request, reply)
        except Exception as error:
            log.error("the database of callback secrets failed: %s", type(error).__name__)
            self._refuse(InternalError("the database of callback secrets failed"), request, reply)

    async def _list(self, tenant: str) -> dict[str, Any]:
        return {"callback_secrets": await self._secrets.list(tenant)}

    async def _rotate(self, tenant: str, request: Request) -> dict[str, Any]:
        body: RotateKeyBody = decode_body(_decoder, request.body) if request.body.strip() else RotateKeyBody()
        if not 0 <= body.grace_s <= MAX_DURATION_S:
            raise InvalidRequest(f"grace_s must be between 0 and {MAX_DURATION_S} seconds", param="grace_s")
        secret = await self._secrets.rotate(tenant, body.grace_s)
        return {**secret_object(secret, secret.created_at), "secret": secret_text(secret.key)}
