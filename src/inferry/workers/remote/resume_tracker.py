"""Token ids of a job that the owner runs, kept so that the job can be resumed when the owner is lost.

Engines in process report ids beside the text. HTTP engines report them in their events, and the owner leaves them
there (`Payload.keeps_ids`); they are removed here, before the client sees them.
"""

from collections.abc import Callable

from inferry.domain.jobs import InferenceJob, ResumeMode, ResumePoint
from inferry.domain.ports import TextAssembler
from inferry.workers.openai_http.request_bodies import is_not_resumable, requests_token_ids
from inferry.workers.openai_http.token_trace import TracingScanner

AssemblerFor = Callable[[str, tuple[str, ...]], TextAssembler | None]
"""A detokenizer for a model and stop strings; None where the model's tokenizer is not known here."""


class ResumeTracker:
    """What has arrived of one job. `restarted` begins it anew from the owner's own resume point."""

    __slots__ = ("_assembler_for", "_job", "_output_ids", "_prompt_ids", "_scanner", "is_resumed")

    def __init__(self, job: InferenceJob, assembler_for: AssemblerFor) -> None:
        self._job = job
        self._assembler_for = assembler_for
        self._scanner: TracingScanner | None = None
        self._prompt_ids = job.payload.prompt_ids
        self._output_ids: list[int] = []
        self.is_resumed = False
        if job.resume_point is not None:
            self.restarted(job.resume_point)

    def restarted(self, point: ResumePoint | None) -> None:
        """The owner runs another attempt, from this point or from the start."""
        self.is_resumed = point is not None
        self._scanner = None
        self._prompt_ids = self._job.payload.prompt_ids if point is None else point.prompt_ids
        self._output_ids = [] if point is None else list(point.output_ids)

    def add(self, raw: bytes, token_ids: tuple[int, ...]) -> bytes:
        """Record a piece; return its events without ids."""
        if token_ids:
            self._output_ids += token_ids
        if not raw:
            return raw
        if self.is_resumed or self._output_ids:
            return raw  # from before the resume point, which covers it, or with its ids beside it
        scanner = self._scanner
        if scanner is None:
            payload = self._job.payload
            scanner = self._scanner = TracingScanner(
                keeps_ids=requests_token_ids(payload.body), engine_holds_text=bool(payload.sampling.stop)
            )
        return scanner.scan(raw)[0]

    def resume_point(self) -> ResumePoint | None:
        """Where another attempt can resume; None where that is not exact."""
        job = self._job
        if is_not_resumable(job.payload.body):
            return None
        if self._scanner is not None:
            return self._scanner.resume_point()
        if self._prompt_ids is None or not self._output_ids:
            return None
        ids, stops = tuple(self._output_ids), job.payload.sampling.stop
        if not stops:
            return ResumePoint(self._prompt_ids, ids)
        assembler = self._assembler_for(job.route.model, stops)
        if assembler is None:
            return None
        for token in ids:
            assembler.push((token,))
        return ResumePoint(self._prompt_ids, ids, unsent=assembler.finish().rstrip("\ufffd"))


def tracker_for(job: InferenceJob, assembler_for: AssemblerFor) -> ResumeTracker | None:
    """A tracker where the job may resume."""
    return ResumeTracker(job, assembler_for) if job.resume is ResumeMode.CONTINUE else None
