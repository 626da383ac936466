"""Background responses: accepted, stored, executed once, polled and cancelled.

Belongs to the event loop it is started on. Each unfinished response has one task, and a document with its call, which
is deleted when the response has ended. After a restart the calls that are left run again under the same job ids, so
that the ledger charges them once. A streamed one fails instead: its readers have events that a second run would not
repeat.

Several gateways may share the database. A response then runs at the gateway that accepted it, whichever of them owns
the workers, and that gateway claims it (`claims`). What no gateway claims is continued by the one that polls. It may be
cancelled or deleted at any gateway: without its document it has ended, and the gateway that runs it stops the call.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw, Struct

from inferry.domain.errors import LedgerUnavailable, NotFound, TenantConcurrency
from inferry.domain.storage import Document, try_id
from inferry.durable.background_claims import BackgroundClaims, Place
from inferry.durable.documents import Documents
from inferry.durable.event_log import EventLog, split_events
from inferry.durable.execute import CallAnswer, Execute, StoredCall
from inferry.durable.outages import until_done
from inferry.durable.responses import UNFINISHED, StoredResponse, StoredResponses, failure
from inferry.durable.retries import call_until_final

log = logging.getLogger(__name__)

KIND = "background"
PATH = "/v1/responses"
RESPONSE_ID = b":response-id"
"""Header of the call that executes a background response. No HTTP client can send a name that begins with a colon."""
MAX_UNFINISHED = 1000
"""Most unfinished background responses of one tenant: each of them keeps its request in memory."""
RETRY_AFTER_S = 5.0
MAX_AGE_S = 86_400.0
"""A response that is older than this and has not ended fails. Refused calls are tried again until it ends or fails."""
_TOO_OLD = b'{"error":{"message":"the response did not end within 24 hours"}}'
FIRST_EVENTS = (b"response.created", b"response.queued")
"""Events of a streamed response before its call is made."""
LAST_EVENTS = {
    "completed": b"response.completed",
    "incomplete": b"response.incomplete",
    "cancelled": b"response.incomplete",
    "failed": b"response.failed",
}
"""The last event of a streamed response, by its status."""
WATCH_INTERVAL_S = 1.0
"""Time between two claims, and between two looks at which responses other gateways have ended, while calls run."""

_encode = msgspec.json.encode
_LAST_HEADS = tuple(b"event: %b\n" % name for name in LAST_EVENTS.values())


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
        claims: BackgroundClaims | None = None,
    ) -> None:
        self._claims = claims
        self._unclaimed: Set[Place] = frozenset()
        self._watching: asyncio.Task[None] | None = None
        self._wall = wall
        self._write_ledger = write_ledger
        self._responses = responses
        self._documents = documents
        self._execute = execute
        self._tasks: dict[Place, asyncio.Task[None]] = {}
        self._accepting: set[Place] = set()
        self._cancelling: set[Place] = set()
        self._logs: dict[Place, EventLog] = {}
        self._resuming: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Continue what is not finished. Where gateways share the database this is left to `poll`."""
        self._unclaimed = frozenset()
        if self._claims is None:
            self._resuming = asyncio.get_running_loop().create_task(self._resume())

    async def poll(self) -> None:
        """Continue what no gateway claims, at this look and at the one before it.

        One look does not suffice: a response is claimed up to WATCH_INTERVAL_S after it was accepted.
        """
        if self._claims is None:
            return
        unfinished = await self._documents.ids_of_kind(KIND)
        unclaimed = unfinished - await self._claims.read() - self._held
        left, self._unclaimed = unclaimed & self._unclaimed, unclaimed
        for tenant, id in left:
            document = await self._documents.get(tenant, KIND, id)
            if document is not None:
                await self._resume_one(document)

    async def accept(self, tenant: str, id: str, stored: StoredResponse, call: BackgroundCall) -> None:
        """Store the response and begin it. Raises TenantConcurrency, StorageQuotaExceeded."""
        if sum(one == tenant for one, _ in self._held) >= MAX_UNFINISHED:
            raise TenantConcurrency(
                f"the tenant has {MAX_UNFINISHED} unfinished background responses", retry_after_s=RETRY_AFTER_S
            )
        self._accepting.add((tenant, id))
        try:
            await self._documents.put(tenant, KIND, id, _encode(call), ttl_s=None, is_limited=True)
            await self._responses.put(tenant, id, stored)
            self._begin(tenant, id, call)
        finally:
            self._accepting.remove((tenant, id))
        event_log = self.event_log(tenant, id)
        if event_log is not None:
            for name in FIRST_EVENTS:
                _add_event(event_log, name, stored.response)

    @property
    def _held(self) -> set[Place]:
        """The responses that run here or are being accepted."""
        return self._accepting | self._tasks.keys()

    def is_running(self, tenant: str, id: str) -> bool:
        return (tenant, id) in self._tasks

    def event_log(self, tenant: str, id: str) -> EventLog | None:
        """The events of a streamed response that is not finished."""
        return self._logs.get((tenant, id))

    async def cancel(self, tenant: str, id: str) -> StoredResponse:
        """End the response, with its call at the engine and its stream. A finished one stays as it is. Raises
        NotFound.
        """
        place = tenant, id
        task = self._tasks.get(place)
        self._cancelling.add(place)
        try:
            if task is not None:
                await _stop([task])
            stored = await self._responses.end(tenant, id, partial(_ended, status="cancelled", error=None))
            await self._documents.delete(tenant, KIND, id)
            await self._keep_events(tenant, id, stored)
        finally:
            self._cancelling.discard(place)
            self._end_log(place)
        return stored

    async def stop_tenant(self, tenant: str) -> None:
        """Stop the calls of a tenant, so that nothing more of them is stored. To be called before its content is
        deleted: other gateways stop theirs when they find that the documents are gone.
        """
        await _stop([task for (one, _), task in self._tasks.items() if one == tenant])

    async def close(self) -> None:
        """Stop. Calls in flight run again when the gateway starts again, or at another gateway."""
        others = (self._resuming, self._watching)
        await _stop([*self._tasks.values(), *(task for task in others if task is not None)])
        if self._claims is not None:
            with suppress(LedgerUnavailable):  # the claim ends by itself
                await self._claims.clear()
        await self._responses.close()

    def _begin(self, tenant: str, id: str, call: BackgroundCall, is_charged: bool = False) -> None:
        place = tenant, id
        if call.is_streamed:
            self._logs[place] = EventLog()
        loop = asyncio.get_running_loop()
        task = self._tasks[place] = loop.create_task(self._run(tenant, id, call, is_charged))
        task.add_done_callback(lambda _: self._forget(place))
        if self._claims is not None and (self._watching is None or self._watching.done()):
            self._watching = loop.create_task(self._watch(self._claims))

    def _forget(self, place: Place) -> None:
        del self._tasks[place]
        if place not in self._cancelling:  # else its last event is still to come
            self._end_log(place)

    def _end_log(self, place: Place) -> None:
        event_log = self._logs.pop(place, None)
        if event_log is not None:
            event_log.end()

    async def _watch(self, claims: BackgroundClaims) -> None:
        """While there are calls, claim them and stop those of responses that other gateways have ended."""
        while self._tasks:
            try:
                await claims.write(self._held)
                await self._stop_ended_elsewhere()
            except Exception as error:
                log.error("cannot claim background responses: %s", type(error).__name__)
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _stop_ended_elsewhere(self) -> None:
        """Stop the calls of responses that another gateway has cancelled or deleted."""
        running = list(self._tasks)
        unfinished = await self._documents.ids_of_kind(KIND)
        for place in running:
            if place not in unfinished and place in self._tasks:
                with suppress(NotFound):  # it was deleted
                    await self.cancel(*place)

    async def _resume(self) -> None:
        found = await until_done(partial(self._documents.of_kind, KIND), "read unfinished background responses")
        if found:
            log.info("continuing %d unfinished background responses", len(found))
        for document in found:
            await until_done(partial(self._resume_one, document), "continue a background response")

    async def _resume_one(self, document: Document) -> None:
        tenant, id = document.tenant, document.id
        if (tenant, id) in self._held:
            return
        try:
            call = msgspec.json.decode(document.content, type=BackgroundCall)
            is_unfinished = (await self._responses.get(tenant, id)).state.status in UNFINISHED
        except NotFound:  # it expired, or the gateway was killed before it was accepted
            is_unfinished = False
        except ValueError as error:
            log.error("background response %s cannot be read and fails: %s", id, type(error).__name__)
            await self._fail(tenant, id, "the stored request cannot be read")
            return
        if not is_unfinished:
            await self._documents.delete(tenant, KIND, id)
        elif call.is_streamed:
            await self._fail(tenant, id, "the gateway was restarted while the response was streamed")
        else:
            job_id = try_id(_job_id(id), call.tries)
            self._begin(tenant, id, call, is_charged=bool(await self._documents.charged_jobs([job_id])))

    async def _fail(self, tenant: str, id: str, message: str) -> None:
        ended = partial(_ended, status="failed", error=failure(500, None, message))
        with suppress(NotFound, ValueError):  # ValueError: the response cannot be read either
            await self._end(tenant, id, ended)
        await self._documents.delete(tenant, KIND, id)

    async def _run(self, tenant: str, id: str, call: BackgroundCall, is_charged: bool) -> None:
        try:
            async with asyncio.timeout(max(0.0, call.created_at + MAX_AGE_S - self._wall())):
                answer = await self._call(tenant, id, call, is_charged)
        except TimeoutError:
            answer = CallAnswer(status=504, body=_TOO_OLD)
        await until_done(partial(self._record, tenant, id, answer), "store a background response")

    async def _record(self, tenant: str, id: str, answer: CallAnswer) -> None:
        with suppress(NotFound):  # it was deleted, or has expired
            await self._store_end(tenant, id, answer)
        await self._documents.delete(tenant, KIND, id)  # last: a call without it is stopped

    async def _store_end(self, tenant: str, id: str, answer: CallAnswer) -> None:
        if answer.status == 200:
            response = _response_in(answer.body)
            stored = await self._end(tenant, id, lambda _: response)
        else:
            error = failure(answer.status, answer.code, _message(answer))
            stored = await self._end(tenant, id, partial(_ended, status="failed", error=error))
        await self._keep_events(tenant, id, stored)

    async def _keep_events(self, tenant: str, id: str, stored: StoredResponse) -> None:
        """Store the events of a streamed response that has ended. It gets a last event unless its call wrote one."""
        event_log = self._logs.get((tenant, id))
        if event_log is None:
            return
        if not event_log.events or not event_log.events[-1].startswith(_LAST_HEADS):
            _add_event(event_log, LAST_EVENTS[stored.state.status], stored.response)
        await self._responses.put_events(tenant, id, event_log.events)

    async def _call(self, tenant: str, id: str, call: BackgroundCall, is_charged: bool) -> CallAnswer:
        headers = {name.encode("latin-1"): value.encode("latin-1") for name, value in call.headers.items()}
        event_log = self._logs.get((tenant, id))

        async def record_try(tries: int) -> None:
            before, call.tries = _encode(call), tries
            # Not stored again where another gateway has ended the response.
            await self._documents.swap(tenant, KIND, id, before, _encode(call), ttl_s=None)

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

    async def _end(self, tenant: str, id: str, ended: Callable[[Raw], Raw]) -> StoredResponse:
        """Store how the response ended, once the ledger has the rows of its call: what is answered is charged."""
        await self._write_ledger()
        return await self._responses.end(tenant, id, ended)


async def _stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
