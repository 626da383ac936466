"""`/v1/batches…`: batches as OpenAI's clients use them. A batch of another tenant is reported as unknown."""

import re
from typing import Any

import msgspec
from msgspec import Struct

from inferry.domain.callers import Caller
from inferry.domain.errors import InvalidRequest
from inferry.domain.storage import Batch, BatchDetail
from inferry.durable.batches import Batches, NewBatch
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.openai.decode import decode_body
from inferry.ingress.router import Fail, Refuse, Router
from inferry.ingress.stored_work.files import first_and_last
from inferry.ingress.stored_work.method_dispatch import Operations, begin
from inferry.ingress.stored_work.queries import limit_of, parse_query
from inferry.ingress.stored_work.upload import MAX_TTL_S, MIN_TTL_S

MAX_LISTED = 100
MAX_WINDOW_S = 7 * 86_400.0
MAX_METADATA = 16
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_TIMES = {
    "in_progress_at": "in_progress",
    "finalizing_at": "finalizing",
    "completed_at": "completed",
    "failed_at": "failed",
    "expired_at": "expired",
    "cancelling_at": "cancelling",
    "cancelled_at": "cancelled",
}


class ExpiresAfter(Struct, forbid_unknown_fields=True):
    """When the output expires."""

    anchor: str
    seconds: int


class CreateBatchBody(Struct, forbid_unknown_fields=True):
    """The batch to create."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


_decoder = msgspec.json.Decoder(CreateBatchBody)


class OpenAIBatchesRouter(Router):
    prefix = "/v1/batches"
    paths = ("POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{id}", "POST /v1/batches/{id}/cancel")

    def __init__(self, refuse: Refuse, fail: Fail, batches: Batches) -> None:
        super().__init__(refuse, fail)
        self._batches = batches

    def serve(self, path: str, query: str, request: Request, reply: Reply, caller: Caller) -> None:
        self._batches.require_enabled()
        tenant = caller.tenant.name
        operations: Operations = {
            "": {"GET": lambda _: self._list(tenant, query), "POST": lambda _: self._create(request, caller)},
            "{id}": {"GET": lambda id: self._show(tenant, id)},
            "{id}/cancel": {"POST": lambda id: self._cancel(tenant, id)},
        }
        self.respond_later(begin(self.prefix, path, request.method, operations), request, reply)

    async def _create(self, request: Request, caller: Caller) -> dict[str, Any]:
        body: CreateBatchBody = decode_body(_decoder, request.body)
        known = self._batches.endpoints()
        if body.endpoint not in known:
            raise InvalidRequest(f"`endpoint` must be one of {', '.join(known)}", param="endpoint")
        check_metadata(body.metadata)
        detail = BatchDetail(
            completion_window=body.completion_window,
            metadata=body.metadata,
            output_ttl_s=_output_ttl_s(body.output_expires_after, self._batches.limits.file_ttl_s),
        )
        new = NewBatch(
            tenant=caller.tenant.name,
            key_id=None if caller.key is None else caller.key.key_id,
            api="openai",
            endpoint=body.endpoint,
            window_s=_window_s(body.completion_window),
            detail=detail,
            input_file=body.input_file_id,
        )
        return batch_object(await self._batches.create(new))

    async def _list(self, tenant: str, query: str) -> dict[str, Any]:
        given = parse_query(query, "after", "limit")
        limit = limit_of(given, 20, MAX_LISTED)
        page = await self._batches.list(tenant, "openai", after=given.get("after"), limit=limit)
        data = [batch_object(batch) for batch in page.rows]
        return {"object": "list", "data": data, **first_and_last(data), "has_more": page.has_more}

    async def _show(self, tenant: str, id: str) -> dict[str, Any]:
        return batch_object(await self._batches.get(tenant, "openai", id))

    async def _cancel(self, tenant: str, id: str) -> dict[str, Any]:
        return batch_object(await self._batches.cancel(tenant, "openai", id))


def batch_object(batch: Batch) -> dict[str, Any]:
    detail = batch.detail
    errors = [msgspec.structs.asdict(error) for error in detail.errors]
    times = {name: detail.times.get(status) for name, status in _TIMES.items()}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file,
        "completion_window": detail.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.deadline),
        **{name: None if time is None else int(time) for name, time in times.items()},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": detail.metadata,
    }


def _window_s(text: str) -> float:
    found = _WINDOW.fullmatch(text)
    seconds = 0.0 if found is None else int(found[1]) * (3600.0 if found[2] == "h" else 86_400.0)
    if not 0 < seconds <= MAX_WINDOW_S:
        raise InvalidRequest(
            "`completion_window` must be a number of hours or days, such as 24h, up to 7d", param="completion_window"
        )
    return seconds


def _output_ttl_s(given: ExpiresAfter | None, default_s: float | None) -> float | None:
    if given is None:
        return default_s
    if given.anchor != "created_at":
        raise InvalidRequest("`output_expires_after.anchor` must be created_at", param="output_expires_after.anchor")
    if not MIN_TTL_S <= given.seconds <= MAX_TTL_S:
        param = "output_expires_after.seconds"
        raise InvalidRequest(f"`{param}` must be between {MIN_TTL_S} and {MAX_TTL_S}", param=param)
    return float(given.seconds)


def check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is not None and (
        len(metadata) > MAX_METADATA or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items())
    ):
        raise InvalidRequest(
            f"`metadata` may have {MAX_METADATA} pairs, with keys up to 64 and values up to 512 characters",
            param="metadata",
        )
