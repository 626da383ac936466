"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them. `Admin` has authorized the request."""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from msgspec import Struct

from inferry.dispatch.gateway import FleetAdapters
from inferry.domain.errors import GatewayError, InternalError, InvalidRequest
from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.openai.decode import decode_body

log = logging.getLogger(__name__)

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PATHS = (f"POST {LOAD}", f"POST {UNLOAD}")
_NAME = re.compile(r"[\x21-\x7e]{1,256}")
_JSON = b"content-type: application/json\r\n"


class LoadAdapterBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter to load: its name as a model, its PEFT directory on the gateway's machine, and the base model where
    workers have several."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None


class UnloadAdapterBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter to unload."""

    lora_name: str


_load_decoder = msgspec.json.Decoder(LoadAdapterBody)
_unload_decoder = msgspec.json.Decoder(UnloadAdapterBody)


class AdminAdapters:
    """The endpoints. `refuse` sends an error response."""

    def __init__(self, adapters: FleetAdapters, refuse: Callable[[GatewayError, Request, Reply], None]) -> None:
        self._adapters = adapters
        self._refuse = refuse
        self._pending: set[asyncio.Task[None]] = set()

    def serve(self, path: str, request: Request, reply: Reply) -> bool:
        """Answer the request later and return True; return False for other paths. Raises GatewayError."""
        if path not in (LOAD, UNLOAD):
            return False
        if request.method != b"POST":
            raise WrongMethod(path, "POST")
        work = self._load(request.body) if path == LOAD else self._unload(request.body)
        task = asyncio.get_running_loop().create_task(self._answer(work, request, reply))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        return True

    async def close(self) -> None:
        """Cancel what is left and wait for it."""
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)

    async def _load(self, raw: bytes) -> dict[str, Any]:
        body = decode_body(_load_decoder, raw)
        if _NAME.fullmatch(body.lora_name) is None:
            raise InvalidRequest(
                "`lora_name` must be 1 to 256 printable ASCII characters without spaces", param="lora_name"
            )
        workers = await self._adapters.load(body.lora_name, body.lora_path, body.base_model_name)
        return {"object": "lora_adapter", "id": body.lora_name, "loaded": True, "workers": workers}

    async def _unload(self, raw: bytes) -> dict[str, Any]:
        body = decode_body(_unload_decoder, raw)
        workers = await self._adapters.unload(body.lora_name)
        return {"object": "lora_adapter", "id": body.lora_name, "loaded": False, "workers": workers}

    async def _answer(self, work: Coroutine[None, None, dict[str, Any]], request: Request, reply: Reply) -> None:
        try:
            reply.respond(200, _JSON, msgspec.json.encode(await work))
        except GatewayError as error:
            self._refuse(error, request, reply)
        except Exception:
            log.exception("an adapter could not be changed")
            self._refuse(InternalError("the adapter could not be changed"), request, reply)
