"""What one API of clients defines: how a request becomes a chat or completions request, and how answers are written.

`decode` turns a body into the request that workers are sent, so that every API shares one path from there on. Answers
come back as chunks or bodies of that request, or as plain text, and the API's `WireFormat` writes them.
"""

from typing import Any, Final, Protocol

import msgspec

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, UnsupportedFeature
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Delta, Done
from inferry.ingress.errors import error_body, error_event
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.openai.render import set_service_tier_in_body
from inferry.ingress.openai.request_schema import ChatCompletionRequest, CompletionRequest

COMMENT: Final = b": waiting\n\n"
"""A server-sent event without meaning. It may be written at any time."""


class EventWriter(Protocol):
    """Writes the server-sent events of one stream: one piece per delta, then the last."""

    def piece(self, delta: Delta) -> bytes: ...

    def last(self, done: Done, *, include_usage: bool) -> bytes: ...


class WireFormat:
    """Answers, errors and heartbeats as OpenAI's chat and completions APIs write them; other APIs override.

    One instance may serve all requests of an API, or one request where the answer depends on the request.
    """

    def writer(self, job: InferenceJob, created: float) -> EventWriter | None:
        """The writer of a stream. None: the first delta decides, and chunks of a worker are forwarded unchanged."""
        return None

    def full_body(self, job: InferenceJob, answer: "bytes | dict[str, Any]") -> bytes:
        """The body of a non-streaming response. `answer` is the body of a chat or completions response."""
        body = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
        tier = job.payload.service_tier
        return body if tier is None else set_service_tier_in_body(body, tier)

    def heartbeat(self) -> bytes:
        """Sent while a stream waits for its next token."""
        return COMMENT

    def id_headers(self, request_id: str) -> bytes:
        """Header lines with the id of the request."""
        return b"x-request-id: %b\r\n" % request_id.encode()

    def error_status(self, error: GatewayError) -> int:
        return error.status

    def error_body(self, error: GatewayError, request_id: str) -> bytes:
        return error_body(error)

    def error_event(self, error: GatewayError) -> bytes:
        """The error inside a stream that has begun and must not look complete."""
        return error_event(error)


OPENAI: Final = WireFormat()


class ClientRequest:
    """A decoded request: what is sent to workers (`wire` and its encoding `body`), and how to answer the client.

    `features`: (feature, parameter) for what the request uses besides the features that its fields show. `reasoning`:
    fields, each after a comma, for models whose reasoning the request may control. Other models do not get them.
    """

    def __init__(
        self,
        wire: ChatCompletionRequest | CompletionRequest,
        body: bytes,
        format: WireFormat,
        features: list[tuple[str, str]] | None = None,
        reasoning: bytes = b"",
    ) -> None:
        self.wire: Final = wire
        self.body: Final = body
        self.format: Final = format
        self.features: Final = features
        self.reasoning: Final = reasoning


class DeferredRequest:
    """A request that needs stored content before it can be translated, or that is answered in another way.

    `unprepared`: the request without what `prepare` may add; None where it cannot be served like that.
    """

    unprepared: ClientRequest | None = None

    def without_preparation(self, problem: str) -> ClientRequest:
        """The request as it is. Raises UnsupportedFeature."""
        if self.unprepared is None:
            raise UnsupportedFeature(problem)
        return self.unprepared

    async def prepare(self, request: Request, reply: Reply, caller: Caller) -> ClientRequest | None:
        """The translated request; None: `reply` is answered. Reserves memory while it waits. Raises GatewayError."""
        raise NotImplementedError


class Endpoint:
    """One inference endpoint. `format` answers requests that cannot be decoded."""

    format: WireFormat

    def decode(self, body: bytes) -> ClientRequest | DeferredRequest:
        """Validate the body and translate it. Raises InvalidRequest or UnsupportedFeature."""
        raise NotImplementedError
