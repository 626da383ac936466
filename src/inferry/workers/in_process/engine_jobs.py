"""What a worker keeps of each job that its engine holds, and of each plan."""

import asyncio
from collections.abc import Callable

from inferry.domain.jobs import InferenceJob, ResumeMode, ResumePoint
from inferry.domain.ports import Emit, TextAssembler
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Done, Failed, Usage
from inferry.domain.values import replace
from inferry.engine.messages import Account
from inferry.workers.stop_strings import held_back_chars


class PlanCompletion:
    """The jobs of one plan; `finished` is done when all have ended."""

    def __init__(self, jobs: int) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._remaining = jobs

    def job_ended(self) -> None:
        self._remaining -= 1
        if self._remaining == 0 and not self.finished.done():
            self.finished.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)


class LiveJob:
    """A job that the engine holds. `earlier_ids` is what earlier attempts delivered, `output_ids` what this one did."""

    __slots__ = (
        "assembler",
        "cancelled",
        "completion",
        "earlier_ids",
        "emit",
        "index",
        "job",
        "key",
        "output_ids",
        "prompt_ids",
        "stop_index",
    )

    def __init__(self, key: int, job: InferenceJob, emit: Emit, completion: PlanCompletion) -> None:
        self.key = key
        self.job = job
        self.emit = emit
        self.completion = completion
        self.assembler: TextAssembler | None = None
        resume_point = job.resume_point
        self.prompt_ids = resume_point.prompt_ids if resume_point is not None else job.payload.prompt_ids or ()
        self.earlier_ids = () if resume_point is None else resume_point.output_ids
        self.output_ids: list[int] = []
        self.index = 0
        self.stop_index: int | None = None
        self.cancelled = False

    def resume_point(self, make_assembler: Callable[[tuple[str, ...]], TextAssembler]) -> ResumePoint | None:
        """Where another attempt can go on: after the last token whose text is out, all of it, because engines that make
        their own text cannot go on from half a character. Where there are stop strings: after the last token, with the
        text that is held back for them.
        """
        if self.job.resume is not ResumeMode.CONTINUE or not (self.earlier_ids or self.output_ids):
            return None
        written = (*self.earlier_ids, *self.output_ids)
        if self.job.payload.sampling.stop:
            assembler = make_assembler(self.job.payload.sampling.stop)
            replay(assembler, written)
            return ResumePoint(self.prompt_ids, written, unsent=assembler.finish().rstrip("\ufffd"))
        for end in range(len(written), max(0, len(written) - _REPLAYED_SINGLY), -1):
            assembler = make_assembler(self.job.payload.sampling.stop)
            replay(assembler, written[:end])
            if not assembler.finish():
                return ResumePoint(self.prompt_ids, written[:end])
        return ResumePoint(self.prompt_ids, () if len(written) <= _REPLAYED_SINGLY else written)

    def end(self, end: Done | Failed) -> None:
        try:
            self.emit(end)
        except Exception as error:
            self.completion.fail(error)
        self.completion.job_ended()


_REPLAYED_SINGLY = 64


def replay(assembler: TextAssembler, earlier_ids: tuple[int, ...]) -> str:
    """Bring an assembler to where the text was when the job broke off. Its reader has what comes out of this already
    (but see `undelivered_text`), but a character or a stop string may go on across the seam.

    What is held back may hang on how the tokens came in, so the last of them are replayed as they did.
    """
    older, latest = earlier_ids[:-_REPLAYED_SINGLY], earlier_ids[-_REPLAYED_SINGLY:]
    texts = [assembler.push(older)[0]] if older else []
    texts += [assembler.push((token,))[0] for token in latest]
    return "".join(texts)


def undelivered_text(resume_point: ResumePoint, replayed: str, held: str, stops: tuple[str, ...]) -> str:
    """What of the text that an assembler gives out its reader does not have: other engines hold back more of it.

    `held` is what the assembler holds back itself. One that says nothing about its text was an engine of this kind.
    """
    if resume_point.unsent is None and resume_point.tail is None:
        return ""
    text = replayed + held
    unsent = held_back_chars(stops, includes_stop=False) if resume_point.unsent is None else len(resume_point.unsent)
    return replayed[max(0, len(text) - unsent) :]


def engine_sampling(sampling: Sampling, remaining: int) -> Sampling:
    """What is left to write. Stop strings are text and the engine knows none: they are found here."""
    if remaining == sampling.max_tokens and not sampling.stop:
        return sampling
    return replace(sampling, max_tokens=remaining, stop=())


def to_usage(live: LiveJob, account: Account) -> Usage:
    """Tokens as delivered, time as measured: what was computed past a stop string is paid for but not counted."""
    return Usage(account.prompt_tokens, account.cached_tokens, len(live.output_ids), account.gpu_seconds)
