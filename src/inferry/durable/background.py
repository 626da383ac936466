"""Background responses: accepted, stored, executed once, polled and cancelled.

Belongs to the event loop it is started on. Each unfinished response has one task, and a document with its call, which
is deleted when the response has ended. After a restart the calls that are left run again under the same job ids, so
that the ledger charges them once. A streamed one fails instead: its readers have events that a second run would not
repeat.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from inferry.domain.errors import GatewayError, NotFound, TenantConcurrency
from inferry.domain.storage import Document, try_id
from inferry.durable.documents import Documents
from inferry.durable.event_log import EventLog, split_events
from inferry.durable.execute import CallAnswer, Execute, StoredCall
from inferry.durable.responses import StoredResponse, StoredResponses, failure
from inferry.durable.retries import call_until_final

log = logging.getLogger(__name__)

KIND = "background"
PATH = "/v1/responses"
RESPONSE_ID = b":response-id"
"""Header of the call that executes a background response. No HTTP client can send a name that begins with a colon."""
MAX_UNFINISHED = 1000
"""Most unfinished background responses of one tenant: each of them keeps its request in memory."""
RETRY_AFTER_S = 5.0
INITIAL_RETRY_S, MAX_RETRY_S = 0.5, 30.0
MAX_AGE_S = 86_400.0
"""A response that is older than this and has not ended fails. Refused calls are tried again until it ends or fails."""
_TOO_OLD = b'{"error":{"message":"the response did not end within 24 hours"}}'
FIRST_EVENTS = (b"response.created", b"response.queued")
"""Events of a streamed response before its call is made."""
UNFINISHED = ("queued", "in_progress")

_encode = msgspec.json.encode


class BackgroundCall(Struct, kw_only=True):
    """What is executed: the client's body, and the headers that choose run and lane. `tries` counts earlier tries."""

    key_id: str | None
    body: Raw
    headers: dict[str, str]
    created_at: float
    is_streamed: bool
    tries: int = 0


class BackgroundResponses:
    """The background responses of all tenants."""

    def __init__(
        self,
        responses: StoredResponses,
        documents: Documents,
        execute: Execute,
        wall: Callable[[], float],
        *,
        write_ledger: Callable[[], Awaitable[object]],
    ) -> None:
        self._wall = wall
        self._write_ledger = write_ledger
        self._responses = responses
        self._documents = documents
        self._execute = execute
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._logs: dict[tuple[str, str], EventLog] = {}
        self._resuming: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Continue what is not finished."""
        self._resuming = asyncio.get_running_loop().create_task(self._resume())

    async def accept(self, tenant: str, id: str, stored: StoredResponse, call: BackgroundCall) -> None:
        """Store the response and begin it. Raises TenantConcurrency, StorageQuotaExceeded."""
        if sum(one == tenant for one, _ in self._tasks) >= MAX_UNFINISHED:
            raise TenantConcurrency(
                f"the tenant has {MAX_UNFINISHED} unfinished background responses", retry_after_s=RETRY_AFTER_S
            )
        await self._documents.put(tenant, KIND, id, _encode(call), ttl_s=None, is_limited=True)
        await self._responses.put(tenant, id, stored)
        self._begin(tenant, id, call)
        event_log = self.event_log(tenant, id)
        if event_log is not None:
            for name in FIRST_EVENTS:
                _add_event(event_log, name, stored.response)

    def is_running(self, tenant: str, id: str) -> bool:
        return (tenant, id) in self._tasks

    def event_log(self, tenant: str, id: str) -> EventLog | None:
        """The events of a streamed response that is not finished."""
        return self._logs.get((tenant, id))

    async def cancel(self, tenant: str, id: str) -> StoredResponse:
        """End the response, with its call at the engine. A finished one stays as it is. Raises NotFound."""
        task = self._tasks.get((tenant, id))
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        stored = await self._responses.get(tenant, id)
        if stored.state.status in UNFINISHED:
            stored.response = _ended(stored.response, "cancelled", None)
            await self._responses.put(tenant, id, stored)
            await self._documents.delete(tenant, KIND, id)
        return stored

    async def close(self) -> None:
        """Stop. Calls in flight run again when the gateway starts again."""
        tasks = [*self._tasks.values(), *([] if self._resuming is None else [self._resuming])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._responses.close()

    def _begin(self, tenant: str, id: str, call: BackgroundCall, is_charged: bool = False) -> None:
        place = tenant, id
        if call.is_streamed:
            self._logs[place] = EventLog()
        task = self._tasks[place] = asyncio.get_running_loop().create_task(self._run(tenant, id, call, is_charged))
        task.add_done_callback(lambda _: self._forget(place))

    def _forget(self, place: tuple[str, str]) -> None:
        del self._tasks[place]
        event_log = self._logs.pop(place, None)
        if event_log is not None:
            event_log.end()

    async def _resume(self) -> None:
        found = await self._documents.of_kind(KIND)
        if found:
            log.info("continuing %d unfinished background responses", len(found))
        for document in found:
            await self._resume_one(document)

    async def _resume_one(self, document: Document) -> None:
        tenant, id = document.tenant, document.id
        call = msgspec.json.decode(document.content, type=BackgroundCall)
        try:
            stored = await self._responses.get(tenant, id)
        except GatewayError:  # it expired, or the gateway was killed before it was accepted
            stored = None
        if stored is None or stored.state.status not in UNFINISHED:
            await self._documents.delete(tenant, KIND, id)
        elif call.is_streamed:
            await self._fail(tenant, id, 500, None, "the gateway was restarted while the response was streamed")
        elif not self.is_running(tenant, id):
            job_id = try_id(_job_id(id), call.tries)
            self._begin(tenant, id, call, is_charged=bool(await self._documents.charged_jobs([job_id])))

    async def _run(self, tenant: str, id: str, call: BackgroundCall, is_charged: bool) -> None:
        try:
            async with asyncio.timeout(max(0.0, call.created_at + MAX_AGE_S - self._wall())):
                answer = await self._call(tenant, id, call, is_charged)
        except TimeoutError:
            answer = CallAnswer(status=504, body=_TOO_OLD)
        delay_s = INITIAL_RETRY_S
        while True:
            try:
                await self._record(tenant, id, answer)
                return
            except NotFound:  # it was deleted, or has expired
                await self._documents.delete(tenant, KIND, id)
                return
            except Exception as error:
                log.error("cannot store a background response (retry in %.1f s): %s", delay_s, type(error).__name__)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_RETRY_S)

    async def _record(self, tenant: str, id: str, answer: CallAnswer) -> None:
        if answer.status == 200:
            await self._finish(tenant, id, _response_in(answer.body))
        else:
            await self._fail(tenant, id, answer.status, answer.code, _message(answer))
        event_log = self._logs.get((tenant, id))
        if event_log is not None:
            await self._responses.put_events(tenant, id, event_log.events)

    async def _call(self, tenant: str, id: str, call: BackgroundCall, is_charged: bool) -> CallAnswer:
        headers = {name.encode("latin-1"): value.encode("latin-1") for name, value in call.headers.items()}
        event_log = self._logs.get((tenant, id))

        async def record_try(tries: int) -> None:
            call.tries = tries
            await self._documents.put(tenant, KIND, id, _encode(call), ttl_s=None)

        stored_call = StoredCall(
            tenant=tenant,
            key_id=call.key_id,
            path=PATH,
            body=bytes(call.body),
            job_id=_job_id(id),
            run_id=None,
            step_id=None,
            lane=None,
            headers={**headers, RESPONSE_ID: f"{id} {call.created_at}".encode()},
            on_piece=None if event_log is None else event_log.add,
        )
        return await call_until_final(self._execute, stored_call, call.tries, record_try, is_charged=is_charged)

    async def _finish(self, tenant: str, id: str, response: Raw) -> None:
        """Store how the response ended, once the ledger has the rows of its call: what is answered is charged."""
        await self._write_ledger()
        stored = await self._responses.get(tenant, id)
        stored.response = response
        await self._responses.put(tenant, id, stored)
        await self._documents.delete(tenant, KIND, id)

    async def _fail(self, tenant: str, id: str, status: int, code: str | None, message: str) -> None:
        stored = await self._responses.get(tenant, id)
        stored.response = _ended(stored.response, "failed", failure(status, code, message))
        await self._finish(tenant, id, stored.response)
        event_log = self._logs.get((tenant, id))
        if event_log is not None:
            _add_event(event_log, b"response.failed", stored.response)


def _job_id(id: str) -> str:
    return id.partition("_")[2]


def _add_event(event_log: EventLog, name: bytes, response: Raw) -> None:
    event_log.add(
        b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":%b}\n\n'
        % (name, name, len(event_log.events), bytes(response))
    )


def _ended(response: Raw, status: str, error: dict[str, Any] | None) -> Raw:
    fields: dict[str, Raw] = msgspec.json.decode(response, type=dict[str, Raw])
    return Raw(_encode({**fields, "status": status, "error": error}))


def _response_in(body: bytes) -> Raw:
    """The response object: the body itself, or that of the last event."""
    if body.startswith(b"{"):
        return Raw(body)
    last = split_events(body)[-1].partition(b"\ndata: ")[2]
    return msgspec.json.decode(last, type=_LastEvent).response


class _LastEvent(Struct):
    response: Raw


def _message(answer: CallAnswer) -> str:
    try:
        return str(msgspec.json.decode(answer.body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "the call failed"
