"""Calls that are not streamed upstream: what they ask for is never streamed, or less of it."""

from inferry.adapters.workers.calls import LONGEST_EVENT, Call, Flight, Server
from inferry.adapters.workers.sse import finish_of, usage_of, whole_said
from inferry.domain.errors import WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta


class WholeCall(Call):
    """A job that is answered in one piece. Its only delta is the answer's body, as it came."""

    __slots__ = ("_parts", "_size")

    def __init__(self, job: InferenceJob, emit: Emit, flight: Flight, worker: Server) -> None:
        super().__init__(job, emit, flight, worker)
        self._parts: list[bytes] = []
        self._size = 0

    def again(self) -> None:
        super().again()
        self._parts.clear()
        self._size = 0

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            super().on_body(body)
            return
        self.heard_at = self._now()
        self._size += len(body)
        self._parts.append(body)
        if self._size > LONGEST_EVENT:
            self.fail(WorkerLost(f"worker {self._worker.name} sent an answer without an end"))

    def on_end(self) -> None:
        if self._status == 200 and self.end is None:
            self._read_whole(b"".join(self._parts))
        super().on_end()

    def _read_whole(self, body: bytes) -> None:
        scanner = self._scanner
        said = whole_said(body)
        if said is None:
            scanner.error = b"not an answer"
            return
        for choice in said.choices:
            if choice.finish_reason is not None and choice.finish_reason != "abort":
                scanner.finish = finish_of(choice.finish_reason)
        if scanner.finish is None:
            return
        if said.usage is not None:
            scanner.usage = usage_of(said.usage, 1)
            scanner.reports_cached = said.usage.prompt_tokens_details is not None
        scanner.tokens = 1  # the first token's signal: how many there were is in the usage
        job = self.job
        self._tell(Delta(job.job_id, job.run_id, job.step_id, self._index, "", (), 1, body.strip(), True))
        self._index += 1
