"""The seams, one Protocol each. Every implementation and every fake passes the same contract suite."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from inferry.domain.ledger import LedgerEntry
from inferry.domain.plans import BatchPlan
from inferry.domain.streams import Item
from inferry.domain.workers import WorkerView

Emit = Callable[[Item], None]


class ModelCard(Struct, frozen=True, kw_only=True):
    """What a worker says of one model it serves. `features` are the request features it can honour.

    `default_output_tokens` is what a call gets that names no limit; None leaves that to the engine. `can_resume` says
    that a plain job can go on from token ids here, and that one which breaks off here says how far it got;
    `can_resume_seeded` that one with a seed then goes on as it would have.
    """

    name: str
    context_tokens: int | None = None
    vocab_size: int | None = None
    default_output_tokens: int | None = None
    can_resume: bool = False
    can_resume_seeded: bool = False
    features: frozenset[str] = frozenset()
    created: int = 0


class Worker(Protocol):
    """Something that runs plans. All methods belong to one event loop.

    `run` pushes items into `emit` from that loop and returns once every job of the plan has had exactly one end; it
    raises only when it cannot go on, and then the caller ends what has not ended. Each job's deltas come with
    contiguous indexes from 0 and before its end.

    A job with `resume_point` goes on from there: its prompt is the ids of both, its limit is what is left of it, and
    its deltas carry text and token ids of what is new, never raw events. Its usage is that of this attempt alone. A job
    whose `resume` is CONTINUE and that breaks off, or is cancelled, ends with `Failed.resume_point`, where that is
    exact: all that was delivered, in earlier attempts too.
    """

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Return once the worker can be asked to generate; raise if it never will be."""

    def view(self) -> WorkerView: ...

    def cards(self) -> Sequence[ModelCard]: ...

    async def run(self, plan: BatchPlan, emit: Emit) -> None: ...

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        """Abort what is running; return the jobs that are confirmed to hold nothing any more."""

    async def close(self) -> None:
        """Free everything. Jobs still running end with an error."""


class Tokenizer(Protocol):
    """Text to token ids and back, for models whose tokenizer is at hand. Thread-safe."""

    longest_token_bytes: int
    """No token stands for more bytes of text: what is longer than that many times a context cannot fit it."""

    def encode(self, text: str) -> list[int]: ...

    def render_chat(self, messages: Sequence[dict[str, object]]) -> str:
        """The prompt text that the model's chat template makes of the messages."""

    def encode_chat(self, messages: Sequence[dict[str, object]]) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids with special tokens left out."""


class TextAssembler(Protocol):
    """Token ids in, text out, one per job: never half a character, never past a stop string."""

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string has ended the output."""

    def finish(self) -> str:
        """What was held back, at the end of the output."""


class Ledger(Protocol):
    """Where entries are kept. Called from one thread at a time, never from the event loop."""

    def append(self, entries: Sequence[LedgerEntry]) -> None: ...

    def close(self) -> None: ...
