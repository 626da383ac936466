"""`/v1/responses/…`: stored responses. A response of another tenant is reported as unknown."""

from typing import Any
from urllib.parse import unquote

from msgspec import Raw

from inferry.domain.callers import Caller
from inferry.domain.errors import InvalidRequest, NotFound
from inferry.durable.background import BackgroundResponses
from inferry.durable.event_log import split_events
from inferry.durable.responses import StoredResponses
from inferry.ingress.admin_tenants import WrongMethod
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.responses.follow import SSE, follow
from inferry.ingress.responses.response_object import SEALED_REASONING
from inferry.ingress.responses.stored_items import context_of, id_of
from inferry.ingress.router import Fail, Refuse, Router
from inferry.ingress.stored_work.queries import is_newest_first, limit_of, parse_query

MAX_LISTED = 100
_CANCEL, _INPUT_ITEMS = "cancel", "input_items"


class ResponsesRouter(Router):
    prefix = "/v1/responses"
    paths = (
        "GET /v1/responses/{id}",
        "DELETE /v1/responses/{id}",
        "POST /v1/responses/{id}/cancel",
        "GET /v1/responses/{id}/input_items",
    )

    def __init__(self, refuse: Refuse, fail: Fail, responses: StoredResponses, background: BackgroundResponses) -> None:
        super().__init__(refuse, fail)
        self._responses = responses
        self._background = background

    def serve(self, path: str, query: str, request: Request, reply: Reply, caller: Caller) -> None:
        tenant, method = caller.tenant.name, request.method
        is_get = method in (b"GET", b"HEAD")
        id, _, rest = path.removeprefix(self.prefix).removeprefix("/").partition("/")
        id = unquote(id)
        if not id:
            raise WrongMethod(self.prefix, "POST")
        if rest not in ("", _CANCEL, _INPUT_ITEMS):
            raise NotFound("unknown path")
        self._responses.require_enabled()
        place = f"{self.prefix}/{{id}}"
        if rest == _CANCEL:
            if method != b"POST":
                raise WrongMethod(f"{place}/{_CANCEL}", "POST")
            self.respond_later(self._cancel(tenant, id), request, reply)
        elif rest == _INPUT_ITEMS:
            if not is_get:
                raise WrongMethod(f"{place}/{_INPUT_ITEMS}", "GET, HEAD")
            self.respond_later(self._input_items(tenant, id, query), request, reply)
        elif method == b"DELETE":
            self.respond_later(self._delete(tenant, id), request, reply)
        elif is_get:
            self.respond_later(self._show(tenant, id, query, reply), request, reply)
        else:
            raise WrongMethod(place, "GET, HEAD, DELETE")

    async def _show(self, tenant: str, id: str, query: str, reply: Reply) -> Raw | None:
        given = _query(query)
        start = _starting_after(given)
        if _is_streamed(given):
            await self._stream(tenant, id, start, reply)
            return None
        stored = await self._responses.get(tenant, id)
        return self._shown(tenant, id, stored.response)

    async def _stream(self, tenant: str, id: str, start: int, reply: Reply) -> None:
        event_log = self._background.event_log(tenant, id)
        if event_log is not None:
            follow(event_log, start, reply, b"")
            return
        events = await self._responses.events(tenant, id)
        if events is None:
            await self._responses.get(tenant, id)
            raise InvalidRequest(
                "only background responses created with `stream` can be streamed, until an hour after their end",
                param="stream",
            )
        reply.respond(200, SSE, b"".join(split_events(events)[start:]))

    async def _cancel(self, tenant: str, id: str) -> Raw:
        stored = await self._responses.get(tenant, id)
        if not stored.state.background:
            raise InvalidRequest("only responses created with `background` can be cancelled")
        return (await self._background.cancel(tenant, id)).response

    async def _delete(self, tenant: str, id: str) -> dict[str, Any]:
        stored = await self._responses.get(tenant, id)
        if stored.state.background:
            await self._background.cancel(tenant, id)
        await self._responses.delete(tenant, id)
        return {"id": id, "object": "response", "deleted": True}

    async def _input_items(self, tenant: str, id: str, query: str) -> dict[str, Any]:
        given = _query(query)
        limit = limit_of(given, 20, MAX_LISTED)
        stored = await self._responses.get(tenant, id)
        chain = [] if stored.previous is None else await self._responses.chain(tenant, stored.previous)
        by_id = {id_of(item): item for item in (*context_of(chain), *stored.input)}
        ids, items = list(by_id), list(by_id.values())
        if is_newest_first(given):
            ids.reverse()
            items.reverse()
        after = given.get("after")
        if after is not None and after not in ids:
            raise InvalidRequest("`after` must be the id of an item", param="after")
        start = 0 if after is None else ids.index(after) + 1
        data, shown = items[start : start + limit], ids[start : start + limit]
        ends = {"first_id": shown[0] if shown else None, "last_id": shown[-1] if shown else None}
        return {"object": "list", "data": data, **ends, "has_more": start + limit < len(items)}

    def _shown(self, tenant: str, id: str, response: Raw) -> Raw:
        if not self._background.is_running(tenant, id):
            return response
        return Raw(bytes(response).replace(b'"status":"queued"', b'"status":"in_progress"', 1))


def _query(text: str) -> dict[str, str]:
    given = parse_query(
        text, "stream", "starting_after", "include", "include[]", "include_obfuscation", "after", "limit", "order"
    )
    for name in ("include", "include[]"):
        if given.get(name, SEALED_REASONING) != SEALED_REASONING:
            raise InvalidRequest(f"`include`: only {SEALED_REASONING} is supported", param="include")
    return given


def _is_streamed(query: dict[str, str]) -> bool:
    wanted = query.get("stream", "false")
    if wanted not in ("true", "false"):
        raise InvalidRequest("`stream` must be true or false", param="stream")
    return wanted == "true"


def _starting_after(query: dict[str, str]) -> int:
    """The number of the first event that is wanted."""
    text = query.get("starting_after")
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise InvalidRequest("`starting_after` must be the number of an event", param="starting_after")
    return int(text) + 1
