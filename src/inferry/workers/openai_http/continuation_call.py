"""Calls that resume a job from token ids."""

from inferry.domain.errors import ContextLengthExceeded, GatewayError
from inferry.domain.jobs import InferenceJob
from inferry.domain.ports import Emit
from inferry.domain.streams import Delta, FinishReason, Usage
from inferry.domain.values import replace
from inferry.workers.openai_http.calls import Call, CallOwner
from inferry.workers.openai_http.sse import EventScanner
from inferry.workers.openai_http.token_trace import ContinuationScanner
from inferry.workers.plan_completion import PlanCompletion
from inferry.workers.resumed_stop_strings import StopMatcher


class ContinuationCall(Call):
    """A job that resumes after a lost or preempted attempt. Its deltas carry text and token ids, no events.

    `starts_at_character`: `resume_after` was called, so the resume point is at a character boundary where that can be
    known. `stops` matches stop strings from the resume point on.
    """

    __slots__ = ("starts_at_character", "stops")

    def __init__(self, job: InferenceJob, emit: Emit, completion: PlanCompletion, worker: CallOwner) -> None:
        self.stops: StopMatcher | None = None
        super().__init__(job, emit, completion, worker)
        self._scan = self._read
        self.starts_at_character = False

    def resume_after(self, written: int, stops: StopMatcher | None = None) -> None:
        """Resume after the first `written` output ids. Later ids are part of a character and are generated again."""
        resume_point = self.job.resume_point
        assert resume_point is not None
        self.starts_at_character = True
        if written < len(resume_point.output_ids):
            self.job = replace(
                self.job, resume_point=replace(resume_point, output_ids=resume_point.output_ids[:written])
            )
        self.stops = stops
        self._scanner = self._make_scanner(trace_tokens=False)

    def _make_scanner(self, trace_tokens: bool) -> EventScanner:
        assert self.job.resume_point is not None
        return ContinuationScanner(self.job.resume_point, self.stops)

    def finish_immediately(self) -> None:
        """End a job whose earlier attempt had its last token: only text held back for stop strings is left."""
        rest = "" if self.stops is None else self.stops.finish()
        if rest:
            self._emit_text(rest, (), 0)
        self._finish(self._done(FinishReason.LENGTH))

    def _read(self, events: bytes) -> tuple[bytes, int]:
        scanner = self._scanner
        assert isinstance(scanner, ContinuationScanner)
        text, ids = scanner.read(events)
        if text or ids:
            self._emit_text(text, ids, len(ids) or 1)
        if scanner.is_stopped and self.end is None:
            # The engine does not know the stop strings: closing the connection stops it.
            self.drop()
            self._finish(self._done(FinishReason.STOP))
        return b"", 0

    def _emit_text(self, text: str, ids: tuple[int, ...], tokens: int) -> None:
        job = self.job
        self._emit_item(Delta(job.job_id, job.run_id, job.step_id, self._index, text, ids, tokens))
        self._index += 1

    def _usage(self) -> Usage:
        resume_point, scanner = self.job.resume_point, self._scanner
        assert resume_point is not None
        if scanner.usage is None and scanner.stop_reason is not None:
            return Usage(len(resume_point.prompt_ids) + len(resume_point.output_ids), 0, scanner.tokens)
        return super()._usage()

    def _refuse(self, error: GatewayError) -> None:
        if isinstance(error, ContextLengthExceeded):
            # The prompt fitted before: prompt and output have reached the end of the context.
            self.finish_immediately()
        else:
            self.fail(error)
