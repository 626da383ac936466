"""What a worker keeps of each job that its engine holds, and of each plan."""

import asyncio
from collections.abc import Callable

from inferry.adapters.workers.stops import held_back
from inferry.domain.jobs import InferenceJob, Resume, SoFar
from inferry.domain.ports import Emit, TextAssembler
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Done, Failed, Usage
from inferry.domain.values import replace
from inferry.engine.messages import Account


class Crowd:
    """The jobs of one plan; `gone` is done when all have ended."""

    def __init__(self, jobs: int) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = jobs

    def one_ended(self) -> None:
        self._left -= 1
        if self._left == 0 and not self.gone.done():
            self.gone.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.gone.done():
            self.gone.set_exception(error)


class LiveJob:
    """A job that the engine holds. `earlier_ids` is what earlier attempts delivered, `output_ids` what this one did."""

    __slots__ = (
        "assembler",
        "cancelled",
        "crowd",
        "earlier_ids",
        "emit",
        "index",
        "job",
        "key",
        "output_ids",
        "prompt_ids",
        "stopped_at",
    )

    def __init__(self, key: int, job: InferenceJob, emit: Emit, crowd: Crowd) -> None:
        self.key = key
        self.job = job
        self.emit = emit
        self.crowd = crowd
        self.assembler: TextAssembler | None = None
        so_far = job.so_far
        self.prompt_ids = so_far.prompt_ids if so_far is not None else job.payload.prompt_ids or ()
        self.earlier_ids = () if so_far is None else so_far.output_ids
        self.output_ids: list[int] = []
        self.index = 0
        self.stopped_at: int | None = None
        self.cancelled = False

    def so_far(self, make_assembler: Callable[[tuple[str, ...]], TextAssembler]) -> SoFar | None:
        """Where another attempt can go on: after the last token whose text is out, all of it, because engines that make
        their own text cannot go on from half a character. Where there are stop strings: after the last token, with the
        text that is held back for them.
        """
        if self.job.resume is not Resume.CONTINUE or not (self.earlier_ids or self.output_ids):
            return None
        written = (*self.earlier_ids, *self.output_ids)
        if self.job.payload.sampling.stop:
            assembler = make_assembler(self.job.payload.sampling.stop)
            catch_up(assembler, written)
            return SoFar(self.prompt_ids, written, unsent=assembler.finish().rstrip("\ufffd"))
        for end in range(len(written), max(0, len(written) - _REPLAYED_ONE_BY_ONE), -1):
            assembler = make_assembler(self.job.payload.sampling.stop)
            catch_up(assembler, written[:end])
            if not assembler.finish():
                return SoFar(self.prompt_ids, written[:end])
        return SoFar(self.prompt_ids, () if len(written) <= _REPLAYED_ONE_BY_ONE else written)

    def end(self, end: Done | Failed) -> None:
        try:
            self.emit(end)
        except Exception as error:
            self.crowd.fail(error)
        self.crowd.one_ended()


_REPLAYED_ONE_BY_ONE = 64


def catch_up(assembler: TextAssembler, earlier_ids: tuple[int, ...]) -> str:
    """Bring an assembler to where the text was when the job broke off. Its reader has what comes out of this already
    (but see `undelivered`), but a character or a stop string may go on across the seam.

    What is held back may hang on how the tokens came in, so the last of them are replayed as they did.
    """
    older, latest = earlier_ids[:-_REPLAYED_ONE_BY_ONE], earlier_ids[-_REPLAYED_ONE_BY_ONE:]
    texts = [assembler.push(older)[0]] if older else []
    texts += [assembler.push((token,))[0] for token in latest]
    return "".join(texts)


def undelivered(so_far: SoFar, caught_up: str, held: str, stops: tuple[str, ...]) -> str:
    """What of the text that an assembler gives out its reader does not have: other engines hold back more of it.

    `held` is what the assembler holds back itself. One that says nothing about its text was an engine of this kind.
    """
    if so_far.unsent is None and so_far.tail is None:
        return ""
    whole = caught_up + held
    unsent = held_back(stops, includes=False) if so_far.unsent is None else len(so_far.unsent)
    return caught_up[max(0, len(whole) - unsent) :]


def for_engine(sampling: Sampling, left: int) -> Sampling:
    """What is left to write. Stop strings are text and the engine knows none: they are found here."""
    if left == sampling.max_tokens and not sampling.stop:
        return sampling
    return replace(sampling, max_tokens=left, stop=())


def usage_of(live: LiveJob, account: Account) -> Usage:
    """Tokens as delivered, time as measured: what was computed past a stop string is paid for but not counted."""
    return Usage(account.prompt_tokens, account.cached_tokens, len(live.output_ids), account.gpu_seconds)
