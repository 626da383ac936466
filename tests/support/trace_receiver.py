"""An OTLP/HTTP receiver that decodes the official protobufs."""

import gzip
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

TIMEOUT_S = 120.0


class ReceivedSpan(NamedTuple):
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    started_ns: int
    ended_ns: int
    status: int
    error: str
    attributes: dict[str, Any]


class TraceReceiver:
    """Use it with `with`. `spans` are those received; `answer_status` is what it answers."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.resources: list[dict[str, Any]] = []
        self.answer_status = 200
        self._changed = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver._received(body, {name.lower(): value for name, value in self.headers.items()})
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(receiver.answer_status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def wait_for(self, enough: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """The spans, once there are enough."""
        with self._changed:
            assert self._changed.wait_for(lambda: enough(self.spans), TIMEOUT_S), [span.name for span in self.spans]
            return list(self.spans)

    def wait_for_request(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.bodies), TIMEOUT_S)

    def _received(self, body: bytes, headers: dict[str, str]) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.bodies.append(body)
            self.headers.append(headers)
            for resource in request.resource_spans:
                self.resources.append(_attributes(resource.resource.attributes))
                if self.answer_status == 200:
                    self.spans += [_span(span) for scope in resource.scope_spans for span in scope.spans]
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _span(span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_state,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code,
        span.status.message,
        _attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
