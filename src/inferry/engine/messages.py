"""Messages between gateway and engine process: length-prefixed msgpack over a socket pair.

A `key` is an int that the gateway chooses and never reuses. Every added key gets tokens in steps and then exactly one
of: an end in a step, an entry in `Aborted.freed`, a `Rejected`. Aborts are answered in their order.
"""

import struct
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from inferry.domain.sampling import Sampling
from inferry.domain.workers import KvBlocks
from inferry.engine.config import EngineConfig

_LENGTH = struct.Struct("<I")

MAX_TOP_LOGPROBS = 20
"""The most that `Sampling.logprobs` may be."""


class Setup(Struct, frozen=True, tag=0, array_like=True):
    """The first message to an engine process."""

    model_dir: str
    config: EngineConfig


class FunctionSetup(Struct, frozen=True, tag=7, array_like=True):
    """The first message to the process of a Python function: `package.module:name`, found in `directory` too."""

    function: str
    task: str
    max_batch: int
    directory: str


class AddInputs(Struct, frozen=True, tag=8, array_like=True):
    """Inputs of a Python function, by key. Each is returned in a `Returned`, or freed by an abort."""

    inputs: list[tuple[int, Any]]

    def __repr__(self) -> str:
        return f"AddInputs({len(self.inputs)} inputs)"


class Request(Struct, frozen=True, array_like=True):
    key: int
    prompt_ids: list[int]
    sampling: Sampling
    lane: int
    salt: str | None = None
    """Isolates the prefix cache: only prompts with the same salt share blocks."""
    pooled: bool = False
    """The prompt has one result, and no token is sampled."""
    run: str | None = None
    """The run whose next call will start with this prompt and its output; None if there is none."""
    kv_quotas: tuple[tuple[str, int], ...] = ()
    """Names of its tenant and its run, each with the KV tokens that its sequences may hold at the same time."""
    batch: int = 0
    """Requests with different numbers never share a padded pass."""
    output_ids: int = 0
    """How many of the last `prompt_ids` are output of an earlier attempt. The constraint covers them."""
    adapter: int = 0
    """The number of a loaded LoRA adapter; 0 for none."""
    is_batch: bool = False
    """No client waits for its first token: its lane has no TTFT target."""

    def __repr__(self) -> str:
        return f"Request(key={self.key}, {len(self.prompt_ids)} tokens)"


class Add(Struct, frozen=True, tag=1, array_like=True):
    requests: list[Request]


class Abort(Struct, frozen=True, tag=2, array_like=True):
    call: int
    keys: list[int]


class EndRun(Struct, frozen=True, tag=4, array_like=True):
    """The run is over: nothing is kept for its next call."""

    run: str


class Shutdown(Struct, frozen=True, tag=3, array_like=True):
    pass


class LoadAdapter(Struct, frozen=True, tag=5, array_like=True):
    """Load a LoRA adapter under a number that is never used again. Answered by `AdapterChanged`."""

    adapter: int
    directory: str


class UnloadAdapter(Struct, frozen=True, tag=6, array_like=True):
    """Unload an adapter. Answered by `AdapterChanged` once no sequence uses it; later requests for it are rejected."""

    adapter: int


ToEngine = Setup | FunctionSetup | AddInputs | Add | Abort | EndRun | LoadAdapter | UnloadAdapter | Shutdown


class Stats(Struct, frozen=True, array_like=True, gc=False):
    """State after a step: steps so far, sequences, KV cache, the tokens and seconds of the step, and the seconds of all
    steps. `kv_blocks`: None where the engine does not tell.

    All steps so far computed `prompt_tokens` of prompts and `decode_rows` single tokens, and beside them
    `padding_tokens` that padded prompts and `padding_rows` that took the place of decodes.
    """

    steps: int
    running: int
    waiting: int
    kv_tokens: int
    free_blocks: int
    preemptions: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0
    busy_seconds: float = 0.0
    prompt_tokens: int = 0
    decode_rows: int = 0
    padding_tokens: int = 0
    padding_rows: int = 0
    kv_blocks: KvBlocks | None = None


class Ready(Struct, frozen=True, tag=10, array_like=True):
    context_tokens: int
    kv_tokens: int
    block_tokens: int
    vocab_size: int
    eos_ids: list[int]
    threads: int
    tasks: tuple[str, ...] = ("generate",)
    """What the model does, by the names of `domain.routes.Task`."""
    features: tuple[str, ...] = ()
    """Features of calls that the model supports."""
    labels: tuple[str, ...] = ()
    """Names of the labels of a classification head."""


class Account(Struct, frozen=True, array_like=True, gc=False):
    """Usage of one sequence, sent once, at its end."""

    key: int
    prompt_tokens: int
    output_tokens: int
    gpu_seconds: float
    cached_tokens: int = 0


class End(Struct, frozen=True, array_like=True, gc=False):
    """The end of a sequence. `stopped`: by a stop token or the end of its grammar; else by its length limit.

    `error`: why its constraint cannot be met. It may quote the constraint, and is for the caller only. `is_busy`: the
    constraint was not compiled because others were.
    """

    account: Account
    stopped: bool
    error: str | None = None
    is_busy: bool = False


class TokenLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """The log probability of the new token of a sequence, and the most likely tokens in its place with theirs."""

    key: int
    logprob: float
    top: list[tuple[int, float]]


class StepDone(Struct, frozen=True, tag=11, array_like=True):
    """One step: its new tokens as (key, token id), the sequences that ended, and the state.

    `pooled`: the results of pooled sequences that ended, as float32 values: a vector, one score, or the probabilities
    of all labels. `logprobs`: of the new tokens, for sequences that ask for them.
    """

    tokens: list[tuple[int, int]]
    ends: list[End]
    stats: Stats
    pooled: list[tuple[int, bytes]] = []
    logprobs: list[TokenLogprobs] = []


class Aborted(Struct, frozen=True, tag=12, array_like=True):
    """The keys of an abort are freed. `freed` are those that had not ended before."""

    call: int
    freed: list[Account]
    stats: Stats


class Rejected(Struct, frozen=True, tag=13, array_like=True):
    """A refused request. `too_long`: the prompt exceeds the context; else it is invalid."""

    key: int
    too_long: bool
    message: str


class AdapterChanged(Struct, frozen=True, tag=16, array_like=True):
    """The adapter was loaded or unloaded. `error`: why it was not."""

    adapter: int
    error: str | None = None


class Returned(Struct, frozen=True, tag=18, array_like=True):
    """One call of a Python function: the results by key, the errors by key, and how long it took.

    A result is a text in UTF-8, or a vector or one score as native float32 values. An error names types and never
    quotes an input; its flag says that the function has not returned what it must, whatever the input is.
    """

    results: list[tuple[int, bytes]]
    errors: list[tuple[int, str, bool]]
    seconds: float

    def __repr__(self) -> str:
        return f"Returned({len(self.results)} results, {len(self.errors)} errors)"


class Fatal(Struct, frozen=True, tag=14, array_like=True):
    """The engine has failed. `message` never contains user data."""

    message: str


class Heartbeat(Struct, frozen=True, tag=15, array_like=True):
    """Sent every `HEARTBEAT_INTERVAL_S` seconds, also during a step: the process runs."""


class Draining(Struct, frozen=True, tag=17, array_like=True):
    """The engine's host is being removed: the engine takes no more requests and completes those that it has."""


HEARTBEAT_INTERVAL_S = 0.5

FromEngine = Ready | StepDone | Returned | Aborted | Rejected | AdapterChanged | Fatal | Heartbeat | Draining

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def setup(model_dir: Path, config: EngineConfig) -> Setup:
    return Setup(str(model_dir), config)


def frame(message: Struct) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Splits received bytes into complete messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        at = 0
        while len(buffer) - at >= 4:
            (length,) = _LENGTH.unpack_from(buffer, at)
            end = at + 4 + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[at + 4 : end]))
            at = end
        if at:
            del buffer[:at]
        return bodies


def decode_to_engine(body: bytes) -> ToEngine:
    return _to_engine.decode(body)


def decode_from_engine(body: bytes) -> FromEngine:
    return _from_engine.decode(body)
