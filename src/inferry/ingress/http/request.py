"""One HTTP request after its head was parsed."""

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError
from inferry.domain.tracing import CallTrace
from inferry.ingress.http.body_sink import BodySink


class Request:
    """One HTTP request.

    `length` is the announced length of the body in bytes, or `request_head.CHUNKED`. `problem` is the reason why the
    body was refused; `body` is empty then. `caller` is set once the request was authenticated. `protocol_error` is
    (status, reason) where this object stands for bytes that are no valid request. `is_internal`: the gateway made the
    request itself, for a caller it knows. `sink` takes the body instead of `body`. `trace` is set while tracing is on.
    """

    __slots__ = (
        "body",
        "caller",
        "head_bytes",
        "headers",
        "is_http10",
        "is_internal",
        "keeps_alive",
        "length",
        "method",
        "problem",
        "protocol_error",
        "sink",
        "target",
        "trace",
    )

    def __init__(self, method: bytes, target: bytes, headers: dict[bytes, bytes]) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = b""
        self.length = 0
        self.head_bytes = 0
        self.caller: Caller | None = None
        self.problem: GatewayError | None = None
        self.protocol_error: tuple[int, str] | None = None
        self.sink: BodySink | None = None
        self.is_http10 = False
        self.is_internal = False
        self.keeps_alive = True
        self.trace: CallTrace | None = None
