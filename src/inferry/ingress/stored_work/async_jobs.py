"""`/v1/jobs…`: any API's request, stored and executed later. A job of another tenant is reported as unknown."""

import hashlib
from typing import Any

import msgspec
from msgspec import Raw, Struct

from inferry.domain.async_jobs import AsyncJob, AsyncJobDetail
from inferry.domain.callers import Caller
from inferry.domain.errors import InvalidRequest
from inferry.domain.lanes import Lane
from inferry.durable.async_job_object import job_object
from inferry.durable.async_jobs import AsyncJobs, NewJob
from inferry.durable.ids import new_id
from inferry.ingress.headers import identifier, int_header, lane_of
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.idempotency import IDEMPOTENCY_KEY
from inferry.ingress.openai.decode import decode_body
from inferry.ingress.router import JSON, Fail, Refuse, Router
from inferry.ingress.run_identity import identity
from inferry.ingress.stored_work.files import first_and_last
from inferry.ingress.stored_work.method_dispatch import Operations, begin
from inferry.ingress.stored_work.openai_batches import check_metadata
from inferry.ingress.stored_work.queries import is_newest_first, limit_of, parse_query

MAX_LISTED = 100
_PREFIX = "/v1/jobs"
_LANE = b"x-inferry-lane"
_KEPT_HEADERS = (
    *(b"x-inferry-max-wait-ms", b"x-inferry-template-id", b"x-inferry-expected-output-tokens"),
    *(
        b"x-inferry-ttft-ms-per-1k-tokens",
        b"x-inferry-replay",
        b"x-inferry-linger-ms",
        b"x-inferry-history",
        b"anthropic-version",
        b"anthropic-beta",
        b"traceparent",
        b"tracestate",
    ),
)
"""Headers that the call has when it is executed, besides lane, run, step, parent run and deadline."""
_COUNTS = (
    *(b"x-inferry-max-wait-ms", b"x-inferry-ttft-ms-per-1k-tokens"),
    *(b"x-inferry-expected-output-tokens", b"x-inferry-linger-ms"),
)


class CreateJobBody(Struct, forbid_unknown_fields=True):
    """The job to create. `body` is the request that `endpoint` gets."""

    endpoint: str
    body: Raw
    callback_url: str | None = None
    metadata: dict[str, str] | None = None


class _Body(Struct):
    stream: bool | None = None
    background: bool | None = None


_decoder = msgspec.json.Decoder(CreateJobBody)
_body_decoder = msgspec.json.Decoder(_Body)


class AsyncJobsRouter(Router):
    prefix = _PREFIX
    paths = (
        *("POST /v1/jobs", "GET /v1/jobs", "GET /v1/jobs/{id}", "DELETE /v1/jobs/{id}"),
        *("POST /v1/jobs/{id}/cancel", "GET /v1/jobs/{id}/deliveries"),
    )

    def __init__(self, refuse: Refuse, fail: Fail, jobs: AsyncJobs) -> None:
        super().__init__(refuse, fail)
        self._jobs = jobs

    def serve(self, path: str, query: str, request: Request, reply: Reply, caller: Caller) -> None:
        self._jobs.require_enabled()
        tenant = caller.tenant.name
        operations: Operations = {
            "": {"GET": lambda _: self._list(tenant, query), "POST": lambda _: self._create(request, reply, caller)},
            "{id}": {"GET": lambda id: self._show(tenant, id), "DELETE": lambda id: self._delete(tenant, id)},
            "{id}/cancel": {"POST": lambda id: self._cancel(tenant, id)},
            "{id}/deliveries": {"GET": lambda id: self._deliveries(tenant, id)},
        }
        self.respond_later(begin(self.prefix, path, request.method, operations), request, reply)

    async def _create(self, request: Request, reply: Reply, caller: Caller) -> None:
        job = await self._jobs.create(self._new_job(request, caller))
        headers = JSON + b"location: %b/%b\r\n" % (_PREFIX.encode(), job.id.encode())
        reply.respond(202, headers, msgspec.json.encode(job_object(job, None)))

    def _new_job(self, request: Request, caller: Caller) -> NewJob:
        body: CreateJobBody = decode_body(_decoder, request.body)
        known = self._jobs.endpoints()
        if body.endpoint not in known:
            raise InvalidRequest(f"`endpoint` must be one of {', '.join(known)}", param="endpoint")
        check_metadata(body.metadata)
        inner = bytes(body.body)
        _check_body(inner)
        headers = request.headers
        id = new_id("job_")
        run = identity(headers, id)
        for name in _COUNTS:
            int_header(headers, name)
        identifier(headers, b"x-inferry-template-id")
        kept = {name.decode(): headers[name].decode("latin-1") for name in _KEPT_HEADERS if name in headers}
        if run.parent_run is not None:
            kept["x-inferry-parent-run-id"] = run.parent_run
        deadline_ms = int_header(headers, b"x-inferry-deadline-ms")
        lane = lane_of(headers, None, caller) if _LANE in headers else Lane.P2
        return NewJob(
            id=id,
            tenant=caller.tenant.name,
            key_id=None if caller.key is None else caller.key.key_id,
            endpoint=body.endpoint,
            lane=lane.name,
            body=inner,
            detail=AsyncJobDetail(
                run_id=run.run_id,
                step_id=run.step_id,
                headers=kept,
                has_deadline=deadline_ms is not None,
                metadata=body.metadata,
                callback_url=body.callback_url,
            ),
            deadline_ms=deadline_ms,
            idempotency_key=identifier(headers, IDEMPOTENCY_KEY),
            request_hash=hashlib.sha256(request.body).digest(),
        )

    async def _list(self, tenant: str, query: str) -> dict[str, Any]:
        given = parse_query(query, "after", "limit", "order")
        limit, newest_first = limit_of(given, 20, MAX_LISTED), is_newest_first(given)
        page = await self._jobs.list(tenant, after=given.get("after"), limit=limit, newest_first=newest_first)
        data = [job_object(job, None) for job in page.rows]
        return {"object": "list", "data": data, **first_and_last(data), "has_more": page.has_more}

    async def _show(self, tenant: str, id: str) -> dict[str, Any]:
        return await self._object(await self._jobs.get(tenant, id))

    async def _cancel(self, tenant: str, id: str) -> dict[str, Any]:
        return await self._object(await self._jobs.cancel(tenant, id))

    async def _delete(self, tenant: str, id: str) -> dict[str, Any]:
        await self._jobs.delete(tenant, id)
        return {"id": id, "object": "job", "deleted": True}

    async def _deliveries(self, tenant: str, id: str) -> dict[str, Any]:
        job = await self._jobs.get(tenant, id)
        log = await self._jobs.deliveries(job)
        return {"object": "list", "data": [msgspec.structs.asdict(one) for one in log]}

    async def _object(self, job: AsyncJob) -> dict[str, Any]:
        return job_object(job, None if job.answer_status is None else await self._jobs.answer(job))


def _check_body(body: bytes) -> None:
    """The endpoint itself checks the rest when the job runs."""
    try:
        found = _body_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        message = "`body` must be a JSON object, and its `stream` and `background` booleans"
        raise InvalidRequest(message, param="body") from None
    if found.stream:
        raise InvalidRequest("`stream` is not supported in jobs", param="body.stream")
    if found.background:  # the job would end before its work
        raise InvalidRequest("`background` is not supported in jobs", param="body.background")
