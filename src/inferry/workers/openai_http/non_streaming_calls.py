"""Calls that are not streamed upstream, because the API does not stream all of the requested output."""

from inferry.domain.errors import WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta
from inferry.workers.openai_http.calls import MAX_EVENT_BYTES, Call, CallOwner
from inferry.workers.openai_http.sse import decode_response, to_finish_reason, to_usage
from inferry.workers.plan_completion import PlanCompletion


class NonStreamingCall(Call):
    """A job with a non-streaming response. Its only delta is the response body, unchanged."""

    __slots__ = ("_max_bytes", "_parts", "_size")

    def __init__(self, job: InferenceJob, emit: Emit, completion: PlanCompletion, worker: CallOwner) -> None:
        super().__init__(job, emit, completion, worker)
        self._parts: list[bytes] = []
        self._size = 0
        self._max_bytes = MAX_EVENT_BYTES

    def reset(self) -> None:
        super().reset()
        self._parts.clear()
        self._size = 0

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            super().on_body(body)
            return
        self.last_activity_at = self._now()
        self._size += len(body)
        self._parts.append(body)
        if self._size > self._max_bytes:
            self.fail(WorkerLost(f"worker {self._worker.name} sent a response of more than {self._max_bytes} bytes"))

    def on_end(self) -> None:
        if self._status == 200 and self.end is None:
            self._read_response(b"".join(self._parts))
        super().on_end()

    def _read_response(self, body: bytes) -> None:
        scanner = self._scanner
        decoded = decode_response(body)
        if decoded is None:
            scanner.error = b"invalid response"
            return
        response, body = decoded
        for choice in response.choices:
            if choice.finish_reason is not None and choice.finish_reason != "abort":
                scanner.finish = to_finish_reason(choice.finish_reason)
        if scanner.finish is None:
            return
        if response.usage is not None:
            scanner.usage = to_usage(response.usage, 1)
            scanner.reports_cached = response.usage.prompt_tokens_details is not None
        scanner.tokens = 1  # signals the first token: the usage has the number
        self._deliver(body.strip())

    def _deliver(self, body: bytes) -> None:
        job = self.job
        self._emit_item(Delta(job.job_id, job.run_id, job.step_id, self._index, "", (), 1, body, True))
        self._index += 1
