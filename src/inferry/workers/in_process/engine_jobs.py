"""One job that an engine process holds: its tokens, its text and where it can be resumed."""

from collections.abc import Callable

from inferry.domain.jobs import InferenceJob, ResumeMode, ResumePoint
from inferry.domain.ports import Emit, TextAssembler
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Done, Failed, Usage
from inferry.domain.values import replace
from inferry.engine.messages import Account
from inferry.workers.in_process.logprobs_writer import LogprobEntries, LogprobsWriter
from inferry.workers.in_process.tool_calls import ToolCallWriter
from inferry.workers.plan_completion import PlanCompletion
from inferry.workers.resumed_stop_strings import held_back_chars


class LiveJob:
    """A job that the engine holds. `earlier_ids` are from earlier attempts, `output_ids` from this one.

    `stop_index` is the number of output ids at which a stop string was found. `events` writes the output of a job that
    may call tools or asks for log probabilities, and `logprobs` makes the entries of the latter.
    """

    __slots__ = (
        "assembler",
        "cancelled",
        "completion",
        "earlier_ids",
        "emit",
        "events",
        "index",
        "job",
        "key",
        "logprobs",
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
        self.events: ToolCallWriter | LogprobsWriter | None = None
        self.logprobs: LogprobEntries | None = None
        resume_point = job.resume_point
        self.prompt_ids = resume_point.prompt_ids if resume_point is not None else job.payload.prompt_ids or ()
        self.earlier_ids = () if resume_point is None else resume_point.output_ids
        self.output_ids: list[int] = []
        self.index = 0
        self.stop_index: int | None = None
        self.cancelled = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output."""
        return None if self.assembler is None else self.assembler.matched

    def resume_point(self, make_assembler: Callable[[tuple[str, ...]], TextAssembler]) -> ResumePoint | None:
        """Where another attempt can resume; None where it cannot.

        That is after the last token at a character boundary, because engines that detokenise themselves cannot resume
        within a character. With stop strings it is after the last token, with the text held back for them. With log
        probabilities it is there too: every token has its entry already, and such a job resumes in this kind of engine.
        """
        if self.job.resume is not ResumeMode.CONTINUE or not (self.earlier_ids or self.output_ids):
            return None
        written = (*self.earlier_ids, *self.output_ids)
        if self.job.payload.sampling.stop:
            assembler = make_assembler(self.job.payload.sampling.stop)
            replay(assembler, written)
            return ResumePoint(self.prompt_ids, written, unsent=assembler.finish().rstrip("\ufffd"))
        if self.logprobs is not None:
            return ResumePoint(self.prompt_ids, written)
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
    """Bring an assembler to the state it had at the resume point; return the replayed text.

    The client has that text already (but see `undelivered_text`); a character or a stop string may continue after it.
    The text held back may depend on how tokens were split into pushes, so the last ones are pushed singly as before.
    """
    older, latest = earlier_ids[:-_REPLAYED_SINGLY], earlier_ids[-_REPLAYED_SINGLY:]
    texts = [assembler.push(older)[0]] if older else []
    texts += [assembler.push((token,))[0] for token in latest]
    return "".join(texts)


def undelivered_text(resume_point: ResumePoint, replayed: str, held: str, stops: tuple[str, ...]) -> str:
    """The part of the replayed text that the client does not have: other engines hold back more text.

    `held` is the text that the assembler holds back. A resume point without `unsent` and `tail` is from an engine of
    this kind, which holds back the same text.
    """
    if resume_point.unsent is None and resume_point.tail is None:
        return ""
    if resume_point.unsent is None and resume_point.tail == "":
        return replayed  # no text was delivered
    text = replayed + held
    unsent = held_back_chars(stops, includes_stop=False) if resume_point.unsent is None else len(resume_point.unsent)
    return replayed[max(0, len(text) - unsent) :]


def engine_sampling(sampling: Sampling, remaining: int) -> Sampling:
    """Sampling for the remaining tokens, without stop strings: the engine has no text, so the worker matches them."""
    if remaining == sampling.max_tokens and not sampling.stop:
        return sampling
    return replace(sampling, max_tokens=remaining, stop=())


def to_usage(live: LiveJob, account: Account) -> Usage:
    """Tokens as delivered, time as measured: tokens after a stop string cost time but are not counted."""
    return Usage(account.prompt_tokens, account.cached_tokens, len(live.output_ids), account.gpu_seconds)
