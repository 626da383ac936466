"""The ASGI application: routes, bodies, and the two hot endpoints. Raw ASGI, since this runs for every call."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct

from inferry._version import __version__
from inferry.dispatch.gateway import Gateway
from inferry.domain.errors import (
    BodyTooLarge,
    ClientClosed,
    GatewayError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
)
from inferry.domain.plans import Phase
from inferry.ingress.parse import Api, new_job_id, parse
from inferry.ingress.problems import Headers, error_body, error_headers
from inferry.ingress.respond import Message, Receive, Send, respond, send_whole
from inferry.observe.metrics import Metrics

log = logging.getLogger(__name__)

Scope = Message
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]

_JSON: Headers = [(b"content-type", b"application/json")]
MOST_DISCARDED = 8
"""A body this many times over the limit is not read to its end before it is refused."""


class Limits(Struct, frozen=True, kw_only=True):
    """What one request may ask of the HTTP surface."""

    max_body_bytes: int
    body_timeout_s: float
    heartbeat_s: float


class App:
    """One gateway over HTTP."""

    def __init__(self, gateway: Gateway, metrics: Metrics, limits: Limits) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._limits = limits
        self._answering = 0
        self._all_answered = asyncio.Event()
        self._all_answered.set()
        self._posts: dict[str, Api] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
        self._gets: dict[str, Handler] = {
            "/": self._index,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._expose,
            "/v1/models": self._models,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # lifespan belongs to the server that was wired; there are no websockets
        try:
            api = self._posts.get(scope["path"])
            if api is not None and scope["method"] == "POST":
                await self._generate(api, scope, receive, send)
            else:
                await self._other(scope, receive, send)
        except ClientClosed:
            pass
        except GatewayError as error:
            await self._refuse(error, scope, send)
        except Exception as error:
            if isinstance(error, RuntimeError) and "handler is closed" in str(error):
                return  # uvloop's word for a client that left while it was being written to
            log.exception("a request failed")
            try:
                await self._refuse(InternalError("the gateway failed to handle the request"), scope, send)
            except RuntimeError:
                pass  # the answer had begun: the server cuts the connection, which cannot be taken for a good end

    # -- the calls ---------------------------------------------------------------------------------------------------

    async def _generate(self, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            body = await self._body(headers, receive)
            job = await parse(api, body, headers, self._gateway)
        except GatewayError as error:
            self._metrics.refused(error.code)
            raise
        stream = self._gateway.submit(job)
        self._answering += 1
        self._all_answered.clear()
        try:
            await respond(stream, job, self._gateway, receive, send, self._limits.heartbeat_s)
        finally:
            self._answering -= 1
            if not self._answering:
                self._all_answered.set()

    async def wait_until_answered(self) -> None:
        """Until every accepted call has been answered to its last byte, or its client has gone."""
        await self._all_answered.wait()

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._limits.max_body_bytes
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientClosed("the client left before its request was complete")
        body: bytes = message.get("body", b"")
        if not message.get("more_body"):
            if len(body) > limit:
                raise self._too_large()
            return body
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                return await self._rest_of_body(body, int(headers.get(b"content-length", b"0") or b"0"), receive)
        except TimeoutError:
            raise InvalidRequest(f"the body did not arrive within {self._limits.body_timeout_s:g} s") from None

    async def _rest_of_body(self, first: bytes, announced: int, receive: Receive) -> bytes:
        limit = self._limits.max_body_bytes
        parts, size, more = [first], len(first), True
        if announced > limit * MOST_DISCARDED:
            raise self._too_large()
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientClosed("the client left before its request was complete")
            part = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(part)
            if size > limit:
                # Keep reading for a while, without keeping it: a client that is still sending when its connection
                # closes would see a reset instead of the answer.
                parts.clear()
                if size > limit * MOST_DISCARDED:
                    break
            else:
                parts.append(part)
        if size > limit:
            raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._limits.max_body_bytes} bytes")

    # -- the rest ----------------------------------------------------------------------------------------------------

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        handler = self._gets.get(path)
        if handler is None and path.startswith("/v1/models/"):
            handler = self._model
        if handler is None and path not in self._posts:
            raise NotFound(f"there is nothing at this path; see GET / for what there is: {_printable(path)}")
        if handler is None or method not in ("GET", "HEAD"):
            raise MethodNotAllowed(f"{_printable(path)} takes {'POST' if path in self._posts else 'GET'}")
        await handler(scope, receive, send)

    async def _index(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoints = [*(f"POST {path}" for path in self._posts), *(f"GET {path}" for path in self._gets if path != "/")]
        await _send_json(send, 200, {"name": "inferry", "version": __version__, "endpoints": endpoints})

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Alive: the process answers."""
        await _send_json(send, 200, {"status": "ok"})

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ready: some worker has really generated, and new work is welcome."""
        ready = self._gateway.is_ready
        status = "draining" if self._gateway.is_draining else "ready" if ready else "starting"
        workers = {view.worker: view.phase.value for view in self._gateway.views()}
        await _send_json(send, 200 if ready else 503, {"status": status, "workers": workers})

    async def _expose(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, content_type = self._metrics.render()
        await send_whole(send, 200, [(b"content-type", content_type.encode())], body)

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_json(send, 200, {"object": "list", "data": list(self._model_objects().values())})

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"].removeprefix("/v1/models/")
        found = self._model_objects().get(name)
        if found is None:
            raise ModelNotFound(f"the model `{_printable(name)}` is not served here", param="model")
        await _send_json(send, 200, found)

    def _model_objects(self) -> dict[str, dict[str, Any]]:
        up = {model for view in self._gateway.views() if view.phase is Phase.READY for model in view.models}
        return {
            name: {
                "id": name,
                "object": "model",
                "created": card.created,
                "owned_by": "inferry",
                "max_model_len": card.context_tokens,
                "ready": name in up,
            }
            for name, card in self._gateway.cards().items()
        }

    async def _refuse(self, error: GatewayError, scope: Scope, send: Send) -> None:
        headers = error_headers(error)
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        printable = given if 0 < len(given) <= 256 and all(0x21 <= byte <= 0x7E for byte in given) else b""
        headers.append((b"x-request-id", printable or new_job_id().encode()))
        if isinstance(error, BodyTooLarge | InvalidRequest) and error.param is None:
            headers.append((b"connection", b"close"))  # what is left of the body is not worth reading
        await send_whole(send, error.status, headers, error_body(error))


async def _send_json(send: Send, status: int, value: Any) -> None:
    await send_whole(send, status, _JSON, msgspec.json.encode(value))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:100])
