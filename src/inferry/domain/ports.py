"""One Protocol per seam. Every implementation and every fake passes the same contract suite."""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from inferry.domain.ledger import ComposedRow, GpuTimeRow, LedgerEntry
from inferry.domain.plans import BatchPlan
from inferry.domain.routes import GENERATES, Task
from inferry.domain.streams import Item
from inferry.domain.workers import WorkerView

Emit = Callable[[Item], None]


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model as its worker describes it. `features` are the request features the worker supports.

    `default_output_tokens` is the output limit of a call that sets none; None leaves it to the engine. `can_resume`:
    the worker continues a job from token ids and reports the ids of a job that it loses. `can_resume_seeded`: a
    continued job with a seed samples the same tokens as an uninterrupted one. `can_resume_constrained`: a continued
    job meets the constraint of its output as a whole. `can_resume_logprobs`: its log probabilities continue those of
    the earlier attempt. `parent`: the base model of a LoRA adapter; None for a model. `media_tokens`: assumed prompt
    tokens of one image, audio, video or file. `tasks`: what the model does. `fields`: the only request fields that the
    worker gives effect to, where it would ignore others.
    """

    name: str
    context_tokens: int | None = None
    vocab_size: int | None = None
    default_output_tokens: int | None = None
    can_resume: bool = False
    can_resume_seeded: bool = False
    can_resume_constrained: bool = False
    can_resume_logprobs: bool = False
    features: frozenset[str] = frozenset()
    fields: frozenset[str] | None = None
    tasks: frozenset[Task] = GENERATES
    created: int = 0
    parent: str | None = None
    media_tokens: int = 0


class Worker(Protocol):
    """Runs plans. All methods are called on one event loop.

    `run` pushes items into `emit` on that loop and returns after every job of the plan has had exactly one end. If it
    raises, the caller ends the remaining jobs. The deltas of a job have contiguous indexes from 0 and precede its end.

    A job with a `resume_point` continues from it: its prompt is the prompt ids followed by the output ids, its output
    limit is reduced by the latter, its deltas carry only new text and token ids (with log probabilities: events of
    these, without the first and the last of a stream), and its usage is that of this attempt. If a job with `resume`
    CONTINUE is lost or cancelled, its end carries `Failed.resume_point` with all output delivered so far, earlier
    attempts included, provided that is exact.

    A pooled job has one delta without tokens, whose `raw` is its answer (`domain.pooling`), and then its end.
    """

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Return once the worker can generate. Raise if it never will."""

    def view(self) -> WorkerView: ...

    def cards(self) -> Sequence[ModelCard]: ...

    async def run(self, plan: BatchPlan, emit: Emit) -> None: ...

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        """Abort jobs. Returns those that are confirmed to hold no engine resources."""

    async def close(self) -> None:
        """Release all resources. Running jobs end with an error."""


@runtime_checkable
class TokenCounter(Protocol):
    """A worker that can count the tokens of a prompt as its engine would."""

    async def count_tokens(self, body: bytes) -> int | None:
        """Prompt tokens of a chat request; None where the engine cannot count them."""


@runtime_checkable
class SendGuard(Protocol):
    """A worker that may wait before it sends a job of a plan. It asks `may_send` right before the first byte."""

    may_send: Callable[[], bool]


@runtime_checkable
class RunKeeper(Protocol):
    """A worker that keeps state of a run between its calls."""

    def end_run(self, tenant: str, run_id: str) -> None:
        """The run is over, by its agent's word or cancelled: nothing is kept for its next call."""


@runtime_checkable
class AdapterHost(Worker, Protocol):
    """A worker that loads LoRA adapters while it runs. Each one is served as a model of its name."""

    def may_load(self, path: str) -> bool:
        """Whether the operator allows adapters from this path."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Return once calls may use the adapter. Raises GatewayError."""

    def unload_adapter(self, name: str) -> Coroutine[Any, Any, None]:
        """Serve the name no longer, before this returns. To be awaited: it ends when the calls that use the adapter
        have ended and it is freed.
        """


class TokenDecoder(Protocol):
    def decode(self, token_ids: Sequence[int]) -> str: ...


class Tokenizer(Protocol):
    """Converts text to token ids and back. Thread-safe."""

    longest_token_bytes: int
    """Upper bound of a token's text in bytes. A prompt of more than this times the context cannot fit."""
    fingerprint: str
    """Equal for tokenizers that make the same token ids of every prompt."""

    def encode(self, text: str) -> list[int]: ...

    def render_chat(self, messages: Sequence[dict[str, object]]) -> str:
        """The prompt that the model's chat template renders."""

    def encode_chat(
        self,
        messages: Sequence[dict[str, object]],
        *,
        continues_last: bool = False,
        tools: Sequence[dict[str, object]] = (),
    ) -> list[int]:
        """`continues_last`: the answer continues the last message instead of beginning another. `tools`: functions
        that the model may call, in OpenAI's form.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens omitted."""


@runtime_checkable
class PairTokenizer(Protocol):
    """A tokenizer that joins two texts to one sequence, for models that score pairs. Thread-safe."""

    def encode_pair(self, text: str, other: str) -> list[int]: ...


class TextAssembler(Protocol):
    """Incremental detokenizer of one job. Emits whole characters only and nothing after a stop string."""

    @property
    def matched(self) -> str | None:
        """The stop string that ended the output."""

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Text that is final, and whether a stop string ended the output."""

    def finish(self) -> str:
        """Text that was held back, at the end of the output."""


class Ledger(Protocol):
    """Stores entries. Called from one thread at a time, never from the event loop."""

    def append(self, entries: Sequence[LedgerEntry]) -> None: ...

    def append_gpu_time(self, rows: Sequence[GpuTimeRow]) -> None: ...

    def append_composed(self, rows: Sequence[ComposedRow]) -> None: ...

    def close(self) -> None: ...
