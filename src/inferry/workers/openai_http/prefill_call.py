"""Calls that have a prefill worker compute a prompt, for another worker to decode."""

from inferry.domain.errors import ClientClosed, NoWorker, Prefilled, WorkerLost, WorkerTimeout, WorkerUnreachable
from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import Emit
from inferry.domain.streams import Done, Failed, Usage
from inferry.domain.values import replace
from inferry.workers.openai_http.calls import CallOwner
from inferry.workers.openai_http.non_streaming_calls import NonStreamingCall
from inferry.workers.openai_http.request_bodies import kv_transfer_of
from inferry.workers.plan_completion import PlanCompletion


class PrefillCall(NonStreamingCall):
    """A prompt. The one token of the response is discarded, and the attempt ends with `Prefilled`.

    Any other end but a cancel may be retried: whatever a prefill worker refuses, another worker may compute.
    """

    __slots__ = ("_kv_transfer",)

    def __init__(self, job: InferenceJob, emit: Emit, completion: PlanCompletion, worker: CallOwner) -> None:
        super().__init__(job, emit, completion, worker)
        self._kv_transfer: bytes | None = None

    def _deliver(self, body: bytes) -> None:
        self._kv_transfer = kv_transfer_of(body)

    def _finish(self, end: Done | Failed) -> None:
        if isinstance(end, Done):
            ready = Prefilled("the prompt was computed")
            ready.kv_transfer = self._kv_transfer
            end = Failed(end.job_id, ready, Usage(end.usage.prompt_tokens, end.usage.cached_tokens))
        elif not isinstance(end.error, ClientClosed | WorkerLost | WorkerTimeout | WorkerUnreachable):
            refusal = NoWorker(f"worker {self._worker.name} refused a prefill: {end.error.code}")
            end = replace(end, error=refusal)
        super()._finish(end)
