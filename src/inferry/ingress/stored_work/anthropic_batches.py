"""`/v1/messages/batches…`: message batches as Anthropic's clients use them. One of another tenant is unknown."""

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Raw, Struct

from inferry.domain.callers import Caller
from inferry.domain.errors import BodyTooLarge, InvalidRequest, NotFound
from inferry.domain.storage import UNFINISHED, Batch, BatchDetail, BatchItem
from inferry.durable.batch_input import body_error
from inferry.durable.batches import Batches, NewBatch
from inferry.ingress.anthropic.format import MessagesFormat
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.openai.decode import decode_body
from inferry.ingress.router import Fail, Refuse, Router
from inferry.ingress.stored_work.download import send_stream
from inferry.ingress.stored_work.files import first_and_last
from inferry.ingress.stored_work.method_dispatch import Operations, begin
from inferry.ingress.stored_work.queries import limit_of, parse_query

MESSAGES = "/v1/messages"
WINDOW_S = 86_400.0
MAX_LISTED = 1000
MAX_CUSTOM_ID_CHARS = 64


class BatchRequest(Struct, forbid_unknown_fields=True):
    """One request of a message batch."""

    custom_id: str
    params: Raw


class CreateMessageBatchBody(Struct, forbid_unknown_fields=True):
    """The requests of a message batch."""

    requests: list[BatchRequest]


_decoder = msgspec.json.Decoder(CreateMessageBatchBody)


class MessageBatchesRouter(Router):
    prefix = f"{MESSAGES}/batches"
    paths = (
        *("POST /v1/messages/batches", "GET /v1/messages/batches", "GET /v1/messages/batches/{id}"),
        *("GET /v1/messages/batches/{id}/results", "POST /v1/messages/batches/{id}/cancel"),
        "DELETE /v1/messages/batches/{id}",
    )

    format = MessagesFormat()

    def __init__(self, refuse: Refuse, fail: Fail, batches: Batches) -> None:
        super().__init__(refuse, fail)
        self._batches = batches

    def serve(self, path: str, query: str, request: Request, reply: Reply, caller: Caller) -> None:
        self._batches.require_enabled()
        tenant = caller.tenant.name
        operations: Operations = {
            "": {"GET": lambda _: self._list(tenant, query, request), "POST": lambda _: self._create(request, caller)},
            "{id}": {
                "GET": lambda id: self._show(tenant, id, request),
                "DELETE": lambda id: self._delete(tenant, id),
            },
            "{id}/cancel": {"POST": lambda id: self._cancel(tenant, id, request)},
            "{id}/results": {"GET": lambda id: self._send_results(tenant, id, reply)},
        }
        self.respond_later(begin(self.prefix, path, request.method, operations), request, reply)

    async def _create(self, request: Request, caller: Caller) -> dict[str, Any]:
        limits = self._batches.limits
        # Off the event loop: there may be a hundred thousand.
        items = await asyncio.to_thread(_items, request.body, limits.max_batch_items)
        new = NewBatch(
            tenant=caller.tenant.name,
            key_id=None if caller.key is None else caller.key.key_id,
            api="anthropic",
            endpoint=MESSAGES,
            window_s=WINDOW_S,
            detail=BatchDetail(output_ttl_s=limits.file_ttl_s),
            items=items,
        )
        return await self._object(await self._batches.create(new), request)

    async def _list(self, tenant: str, query: str, request: Request) -> dict[str, Any]:
        given = parse_query(query, "after_id", "before_id", "limit")
        limit = limit_of(given, 20, MAX_LISTED)
        before = given.get("before_id")
        if before is not None and "after_id" in given:
            raise InvalidRequest("`after_id` and `before_id` are mutually exclusive", param="before_id")
        after = given.get("after_id") if before is None else before
        page = await self._batches.list(tenant, "anthropic", after=after, limit=limit, newest_first=before is None)
        rows = page.rows if before is None else page.rows[::-1]
        data = [await self._object(batch, request) for batch in rows]
        return {"data": data, **first_and_last(data), "has_more": page.has_more}

    async def _show(self, tenant: str, id: str, request: Request) -> dict[str, Any]:
        return await self._object(await self._batches.get(tenant, "anthropic", id), request)

    async def _cancel(self, tenant: str, id: str, request: Request) -> dict[str, Any]:
        return await self._object(await self._batches.cancel(tenant, "anthropic", id), request)

    async def _delete(self, tenant: str, id: str) -> dict[str, Any]:
        await self._batches.delete(tenant, "anthropic", id)
        return {"id": id, "type": "message_batch_deleted"}

    async def _send_results(self, tenant: str, id: str, reply: Reply) -> None:
        batch = await self._batches.get(tenant, "anthropic", id)
        if batch.status in UNFINISHED:
            raise NotFound("the results are available once the batch has ended", param="message_batch_id")
        await send_stream(reply, b"content-type: application/x-jsonl\r\n", self._batches.result_lines(batch))

    async def _object(self, batch: Batch, request: Request) -> dict[str, Any]:
        counts = Counter(await self._batches.outcome_counts(batch))
        names = ("succeeded", "errored", "canceled", "expired")
        ended = {name: counts[name] for name in names}  # type: ignore[index]
        times = batch.detail.times
        is_ended = batch.status not in UNFINISHED
        return {
            "id": batch.id,
            "type": "message_batch",
            "processing_status": _status(batch),
            "request_counts": {"processing": batch.total - sum(ended.values()), **ended},
            "created_at": _text(batch.created_at),
            "expires_at": _text(batch.deadline),
            "ended_at": _text(times.get(batch.status)) if is_ended else None,
            "cancel_initiated_at": _text(times.get("cancelling")),
            "archived_at": None,
            "results_url": _origin(request) + f"{self.prefix}/{batch.id}/results" if is_ended else None,
        }


def _origin(request: Request) -> str:
    """The scheme and host that the client used, also through a proxy that terminates TLS."""
    proto = request.headers.get(b"x-forwarded-proto")
    return f"{'https' if proto == b'https' else 'http'}://{request.headers.get(b'host', b'').decode('latin-1')}"


def _status(batch: Batch) -> str:
    if batch.status == "cancelling":
        return "canceling"
    return "in_progress" if batch.status in UNFINISHED else "ended"


def _items(content: bytes, most: int) -> list[BatchItem]:
    """The items of a request body. Raises InvalidRequest, BodyTooLarge."""
    body: CreateMessageBatchBody = decode_body(_decoder, content)
    _check(body.requests, most)
    return [BatchItem(number, one.custom_id, bytes(one.params)) for number, one in enumerate(body.requests, 1)]


def _check(requests: list[BatchRequest], most: int) -> None:
    if not requests:
        raise InvalidRequest("`requests` must not be empty", param="requests")
    if len(requests) > most:
        raise BodyTooLarge(f"a batch may have at most {most} requests", param="requests")
    seen: set[str] = set()
    for index, one in enumerate(requests):
        where = f"requests.{index}"
        if not 1 <= len(one.custom_id) <= MAX_CUSTOM_ID_CHARS:
            raise InvalidRequest(f"`{where}.custom_id` must have 1 to {MAX_CUSTOM_ID_CHARS} characters", param=where)
        if one.custom_id in seen:
            raise InvalidRequest(f"`{where}.custom_id` is used by an earlier request", param=where)
        seen.add(one.custom_id)
        if (problem := body_error(bytes(one.params))) is not None:
            raise InvalidRequest(f"`{where}`: {problem.replace('`body`', '`params`')}", param=where)


def _text(time: float | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time, UTC).isoformat().replace("+00:00", "Z")
