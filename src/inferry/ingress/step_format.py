"""Formats around the client's own: the response of a step of a composed model, kept or written as the answer."""

from typing import Any

from inferry.domain.errors import GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.ingress.wire_format import EventWriter, WireFormat
from inferry.pipelines.failures import at_stage


class StepFormat(WireFormat):
    """Writes answers as the endpoint's own format does, and keeps the error of a step that fails. For one step."""

    def __init__(self, inner: WireFormat) -> None:
        self._inner = inner
        self.error: GatewayError | None = None

    def full_body(self, job: InferenceJob, answer: "bytes | dict[str, Any]") -> bytes:
        return self._inner.full_body(job, answer)

    def error_body(self, error: GatewayError, request_id: str) -> bytes:
        self.error = error
        return b""


class WrappedFormat(WireFormat):
    """Writes as another format does."""

    def __init__(self, inner: WireFormat) -> None:
        self._inner = inner

    def writer(self, job: InferenceJob, created: float) -> EventWriter | None:
        return self._inner.writer(job, created)

    def full_body(self, job: InferenceJob, answer: "bytes | dict[str, Any]") -> bytes:
        return self._inner.full_body(job, answer)

    def heartbeat(self) -> bytes:
        return self._inner.heartbeat()

    def id_headers(self, request_id: str) -> bytes:
        return self._inner.id_headers(request_id)

    def error_status(self, error: GatewayError) -> int:
        return self._inner.error_status(error)

    def error_body(self, error: GatewayError, request_id: str) -> bytes:
        return self._inner.error_body(error, request_id)

    def error_event(self, error: GatewayError) -> bytes:
        return self._inner.error_event(error)


class StageFormat(WrappedFormat):
    """Writes as the client's format does, with the stage in every error."""

    def __init__(self, inner: WireFormat, stage: str) -> None:
        super().__init__(inner)
        self._stage = stage

    def error_body(self, error: GatewayError, request_id: str) -> bytes:
        return super().error_body(at_stage(error, self._stage), request_id)

    def error_event(self, error: GatewayError) -> bytes:
        return super().error_event(at_stage(error, self._stage))
