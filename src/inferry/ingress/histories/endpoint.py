"""When the history of a chat is replaced by a summary: Chat Completions, Messages and Responses.

A request is translated to chat first, and its chat is shortened.
"""

import asyncio

import msgspec
from msgspec import Raw

from inferry.dispatch.gateway import Gateway
from inferry.domain.callers import Caller
from inferry.domain.errors import ModelNotFound
from inferry.ingress.headers import int_header
from inferry.ingress.histories.conversation import HistorySettings, Summary, prefix_ids, with_summary
from inferry.ingress.histories.summaries import OPT_OUT, Summaries
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.job_parser import find_card
from inferry.ingress.openai.decode import ChatEndpoint
from inferry.ingress.openai.request_schema import ChatCompletionRequest
from inferry.ingress.step_format import WrappedFormat
from inferry.ingress.wire_format import ClientRequest, DeferredRequest, Endpoint, WireFormat

MIN_BYTES = 4096
"""A shorter body is far from the end of any context."""
_DEADLINE = b"x-inferry-deadline-ms"
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_chat = ChatEndpoint()
_messages_decoder = msgspec.json.Decoder(list[Raw])


class HistoryFormat(WrappedFormat):
    """As the client's, with a header that names the summary that was used."""

    def __init__(self, inner: WireFormat, id: str) -> None:
        super().__init__(inner)
        self._header = b"x-inferry-history: %b\r\n" % id.encode()

    def id_headers(self, request_id: str) -> bytes:
        return super().id_headers(request_id) + self._header


class HistoryEndpoint(Endpoint):
    """An endpoint whose long chats are shortened. `inner` translates requests to chat."""

    def __init__(self, inner: Endpoint, gateway: Gateway, summaries: Summaries, min_bytes: int = MIN_BYTES) -> None:
        self.format = inner.format
        self._inner = inner
        self._gateway = gateway
        self._summaries = summaries
        self._min_bytes = min_bytes

    def decode(self, body: bytes) -> ClientRequest | DeferredRequest:
        decoded = self._inner.decode(body)
        # A request that refers to stored items is longer than its body.
        is_short = isinstance(decoded, ClientRequest) and len(body) < self._min_bytes
        return decoded if is_short else LongChat(decoded, self._gateway, self._summaries)


class LongChat(DeferredRequest):
    """A chat that may be long enough for a summary."""

    def __init__(self, decoded: ClientRequest | DeferredRequest, gateway: Gateway, summaries: Summaries) -> None:
        self._decoded = decoded
        self.unprepared = decoded if isinstance(decoded, ClientRequest) else decoded.unprepared
        self._gateway = gateway
        self._summaries = summaries

    async def prepare(self, request: Request, reply: Reply, caller: Caller) -> ClientRequest | None:
        decoded = self._decoded
        if isinstance(decoded, DeferredRequest):
            prepared = await decoded.prepare(request, reply, caller)
            if prepared is None:
                return None
            decoded = prepared
        wire = decoded.wire
        assert isinstance(wire, ChatCompletionRequest)
        try:
            card = find_card(wire.model, self._gateway.models, caller)
        except ModelNotFound:
            return decoded  # it may be a composed model
        settings = self._summaries.settings_of(card.name, caller.tenant.name)
        context = None if settings is None else settings.context_tokens or card.context_tokens
        if settings is None or context is None or request.headers.get(OPT_OUT) == b"off":
            return decoded
        fields = _fields_decoder.decode(decoded.body)
        messages = _messages_decoder.decode(fields["messages"])
        ids = prefix_ids(caller.tenant.name, card.name, messages)
        summary = await self._summaries.find(ids, caller.tenant.name)
        body = decoded.body if summary is None else _rewritten(fields, messages, summary)
        tokens = self._tokens(body, card.name, caller)
        if tokens >= settings.threshold * context:
            task = self._summaries.begin(messages, ids, summary, card.name, caller, request)
            limit = wire.max_completion_tokens or wire.max_tokens or 0
            if task is not None and tokens + limit > context:
                with self._gateway.reserved_bytes(len(body)):
                    summary = await _wait(task, settings, request) or summary
        if summary is None:
            return decoded
        return _shortened(decoded, wire, _rewritten(fields, messages, summary), summary)

    def _tokens(self, body: bytes, model: str, caller: Caller) -> int:
        return self._gateway.models.estimate_prompt(caller.tenant.name, model, None, len(body)).expected


def _shortened(decoded: ClientRequest, wire: ChatCompletionRequest, body: bytes, summary: Summary) -> ClientRequest:
    """The request with another body. What the body does not show of the client's request stays."""
    short = _chat.decode(body).wire
    assert isinstance(short, ChatCompletionRequest)
    wire = msgspec.structs.replace(wire, messages=short.messages)
    return ClientRequest(wire, body, HistoryFormat(decoded.format, summary.id), decoded.features, decoded.reasoning)


async def _wait(task: "asyncio.Task[Summary | None]", settings: HistorySettings, request: Request) -> Summary | None:
    """The summary, within the call's deadline, which is shorter afterwards; None where it comes too late."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    deadline_ms = int_header(request.headers, _DEADLINE)
    wait_s = settings.wait_s if deadline_ms is None else min(settings.wait_s, deadline_ms / 1000)
    await asyncio.wait({task}, timeout=wait_s)
    if deadline_ms is not None:
        left_ms = max(1, deadline_ms - int(1000 * (loop.time() - began_at)))
        request.headers = {**request.headers, _DEADLINE: str(left_ms).encode()}
    return task.result() if task.done() and not task.cancelled() and task.exception() is None else None


def _rewritten(fields: dict[str, Raw], messages: list[Raw], summary: Summary) -> bytes:
    return msgspec.json.encode({**fields, "messages": with_summary(messages, summary)})
