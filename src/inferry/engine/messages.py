"""What gateway and engine process say to each other: length-prefixed msgpack over a socket pair.

A `key` is an int that the sender picks and never uses twice. Every `Add`ed key gets tokens in steps and then exactly
one of: an end in a step, a place in `Aborted.freed`, a `Rejected`. Abort calls are answered in the order they came.
"""

import struct
from pathlib import Path

import msgspec
from msgspec import Struct

from inferry.domain.sampling import Sampling
from inferry.engine.config import EngineConfig

_LENGTH = struct.Struct("<I")


class Setup(Struct, frozen=True, tag=0, array_like=True):
    """The first message to an engine process."""

    model_dir: str
    config: EngineConfig


class Request(Struct, frozen=True, array_like=True):
    key: int
    prompt_ids: list[int]
    sampling: Sampling
    lane: int
    salt: str | None = None
    """What a prefix cache keeps it apart by from others; an engine without such a cache ignores it."""

    def __repr__(self) -> str:
        return f"Request(key={self.key}, {len(self.prompt_ids)} tokens)"


class Add(Struct, frozen=True, tag=1, array_like=True):
    requests: list[Request]


class Abort(Struct, frozen=True, tag=2, array_like=True):
    call: int
    keys: list[int]


class Shutdown(Struct, frozen=True, tag=3, array_like=True):
    pass


ToEngine = Setup | Add | Abort | Shutdown


class Stats(Struct, frozen=True, array_like=True, gc=False):
    """After a step: how many steps so far, who is there, what of the KV cache they hold, and what the step was."""

    steps: int
    running: int
    waiting: int
    kv_tokens: int
    free_blocks: int
    preemptions: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0


class Ready(Struct, frozen=True, tag=10, array_like=True):
    context_tokens: int
    kv_tokens: int
    block_tokens: int
    vocab_size: int
    eos_ids: list[int]
    threads: int


class Account(Struct, frozen=True, array_like=True, gc=False):
    """What one sequence used, told once, when it is gone."""

    key: int
    prompt_tokens: int
    output_tokens: int
    gpu_seconds: float
    cached_tokens: int = 0


class End(Struct, frozen=True, array_like=True, gc=False):
    """`stopped` says that a stop token ended it; else it reached its length."""

    account: Account
    stopped: bool


class StepDone(Struct, frozen=True, tag=11, array_like=True):
    """All new tokens of one step as (key, token id), who ended with it, and how things stand."""

    tokens: list[tuple[int, int]]
    ends: list[End]
    stats: Stats


class Aborted(Struct, frozen=True, tag=12, array_like=True):
    """Keys of that call hold nothing any more: `freed` were there until now, the others had ended before."""

    call: int
    freed: list[Account]
    stats: Stats


class Rejected(Struct, frozen=True, tag=13, array_like=True):
    """`too_long` tells a prompt that can never fit from one that is wrong in itself."""

    key: int
    too_long: bool
    message: str


class Fatal(Struct, frozen=True, tag=14, array_like=True):
    """The engine cannot go on; `message` never holds what a user wrote."""

    message: str


class Heartbeat(Struct, frozen=True, tag=15, array_like=True):
    """Every `HEARTBEAT_INTERVAL_S` seconds, whatever the engine does: its process runs."""


HEARTBEAT_INTERVAL_S = 0.5

FromEngine = Ready | StepDone | Aborted | Rejected | Fatal | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def setup(model_dir: Path, config: EngineConfig) -> Setup:
    return Setup(str(model_dir), config)


def frame(message: Struct) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Bytes as they come in, whole messages out."""

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
