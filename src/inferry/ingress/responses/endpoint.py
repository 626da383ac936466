"""`POST /v1/responses`: at once, after stored content was read, or in the background."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from msgspec import Raw

from inferry.dispatch.gateway import ModelCatalog
from inferry.domain.callers import Caller
from inferry.domain.errors import InvalidRequest, StorageDisabled
from inferry.domain.jobs import InferenceJob
from inferry.durable.background import RESPONSE_ID, BackgroundCall, BackgroundResponses
from inferry.durable.responses import StoredResponse, StoredResponses
from inferry.ingress.headers import lane_of
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.job_ids import new_job_id
from inferry.ingress.job_parser import parse
from inferry.ingress.responses.decode import Translation, decode_items, decode_request
from inferry.ingress.responses.follow import follow
from inferry.ingress.responses.format import ResponsesErrors
from inferry.ingress.responses.request_schema import InputItem, ResponsesRequest
from inferry.ingress.responses.response_object import ID_PREFIX, Keep, ResponseObject
from inferry.ingress.responses.stored_items import find_item, history_of, input_items, is_reference
from inferry.ingress.wire_format import ClientRequest, DeferredRequest, Endpoint

RESPONSES = b"/v1/responses"
_JSON = b"content-type: application/json\r\n"
_KEPT_HEADERS = frozenset({b"session-id", b"session_id", b"thread-id", b"x-codex-parent-thread-id", b"x-session-id"})
"""Headers besides `x-inferry-*` that a background call is made with: they name its run."""


class ResponsesEndpoint(Endpoint):
    """`responses` and `background` are None until the gateway has storage; nothing is stored then."""

    def __init__(
        self,
        wall: Callable[[], float],
        models: ModelCatalog | None = None,
        reserved_bytes: Callable[[int], AbstractContextManager[None]] = lambda size: nullcontext(),
    ) -> None:
        self.format = ResponsesErrors()
        self.wall = wall
        self.models = models
        self.reserved_bytes = reserved_bytes
        self.responses: StoredResponses | None = None
        self.background: BackgroundResponses | None = None

    def use_storage(self, responses: StoredResponses, background: BackgroundResponses) -> None:
        """Store responses from now on."""
        if responses.is_enabled:
            self.responses, self.background = responses, background

    def decode(self, body: bytes) -> ClientRequest | DeferredRequest:
        request = decode_request(body)
        items = decode_items(request.input)
        if (
            request.previous_response_id is not None
            or request.background
            or any(map(is_reference, items))
            or (request.store is not False and self.responses is not None and self.responses.quota.has_full_tenants)
        ):
            return StoredRequest(self, request, items)
        translation = Translation(request, [], items)
        keep = self.keep(request, {})
        return translation.client_request(self.head(translation, request), keep)

    def head(
        self,
        translation: Translation,
        request: ResponsesRequest,
        id: str | None = None,
        created_at: float | None = None,
    ) -> ResponseObject:
        is_stored = self.responses is not None and request.store is not False
        return ResponseObject(request, translation.tools, self.wall, is_stored=is_stored, id=id, created_at=created_at)

    def keep(self, request: ResponsesRequest, found: dict[int, Raw]) -> Keep | None:
        """Stores the response of a request. `found` are stored items that the request refers to, by their place."""
        if self.responses is None or request.store is False:
            return None
        return partial(_keep, self.responses, request, found)


def _keep(
    responses: StoredResponses,
    request: ResponsesRequest,
    found: dict[int, Raw],
    job: InferenceJob,
    id: str,
    response: bytes,
) -> None:
    items = input_items(request.input, id, found)
    stored = StoredResponse(response=Raw(response), input=items, previous=request.previous_response_id)
    responses.keep(job.tenant, id, stored)


class StoredRequest(DeferredRequest):
    """A request that follows on a stored response, refers to stored items, runs in the background, or may find that
    its tenant has no space left.
    """

    def __init__(self, endpoint: ResponsesEndpoint, request: ResponsesRequest, items: list[InputItem]) -> None:
        self._endpoint = endpoint
        self._request = request
        self._items = items

    async def prepare(self, request: Request, reply: Reply, caller: Caller) -> ClientRequest | None:
        with self._endpoint.reserved_bytes(len(request.body)):
            return await self._translate(request, reply, caller)

    async def _translate(self, request: Request, reply: Reply, caller: Caller) -> ClientRequest | None:
        wanted, endpoint, tenant = self._request, self._endpoint, caller.tenant.name
        responses = endpoint.responses
        if responses is None:
            raise StorageDisabled("this gateway stores no responses", param="store")
        if wanted.background and wanted.store is False:
            raise InvalidRequest("`background` requires `store`", param="store")
        given = request.headers.get(RESPONSE_ID) if request.is_internal else None
        if wanted.background and given is None and request.is_internal:
            # Work that the stored call would not wait for, and a cancellation of it not reach.
            raise InvalidRequest("`background` is not supported in a stored call", param="background")
        if wanted.store is not False and given is None:
            responses.quota.require_space(tenant)
        history: list[InputItem] = []
        if wanted.previous_response_id is not None:
            history = history_of(await responses.chain(tenant, wanted.previous_response_id))
        found: dict[int, Raw] = {}
        for index, item in enumerate(self._items):
            if is_reference(item):
                found[index] = await find_item(responses, tenant, item.id or "", f"input[{index}]")
                self._items[index] = decode_items(b"[%b]" % bytes(found[index]))[0]
        translation = Translation(wanted, history, self._items)
        if wanted.background and given is None:
            await self._accept(translation, found, request, reply, caller)
            return None
        if given is None:
            return translation.client_request(endpoint.head(translation, wanted), endpoint.keep(wanted, found))
        # The call that executes a background response. Its caller stores the answer.
        id, _, created_at = given.decode().partition(" ")
        return translation.client_request(endpoint.head(translation, wanted, id, float(created_at)), None)

    async def _accept(
        self, translation: Translation, found: dict[int, Raw], request: Request, reply: Reply, caller: Caller
    ) -> None:
        wanted, endpoint = self._request, self._endpoint
        assert endpoint.background is not None
        assert endpoint.models is not None
        id, created_at = ID_PREFIX + new_job_id(), endpoint.wall()
        head = endpoint.head(translation, wanted, id, created_at)
        decoded = translation.client_request(head, None)
        parse(decoded, request.headers, endpoint.models, caller)  # refuses at once what cannot be executed
        lane = lane_of(request.headers, wanted.service_tier, caller)
        queued = head.queued(wanted.model, lane)
        stored = StoredResponse(
            response=Raw(queued),
            input=input_items(wanted.input, id, found),
            previous=wanted.previous_response_id,
        )
        call = BackgroundCall(
            key_id=None if caller.key is None else caller.key.key_id,
            body=Raw(request.body),
            headers=_kept_headers(request.headers),
            created_at=created_at,
            is_streamed=bool(wanted.stream),
        )
        await endpoint.background.accept(caller.tenant.name, id, stored, call)
        if not wanted.stream:
            reply.respond(200, _JSON + decoded.format.id_headers(id), queued)
            return
        event_log = endpoint.background.event_log(caller.tenant.name, id)
        assert event_log is not None  # its task has not run yet
        follow(event_log, 0, reply, decoded.format.id_headers(id))


def _kept_headers(headers: dict[bytes, bytes]) -> dict[str, str]:
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers.items()
        if name in _KEPT_HEADERS or (name.startswith(b"x-inferry-") and name != b"x-inferry-tenant")
    }
