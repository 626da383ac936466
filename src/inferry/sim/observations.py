"""Client-side observations of an engine, the input of a calibration, and their file format.

A file of raw observations is JSON lines: the conditions first, then one observation per probe.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

T = TypeVar("T")
Kind = Literal["prefill", "decode", "context", "inject", "hit", "burst"]


class CallTiming(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One streamed call. Times are seconds since its probe began; `heard_s` has one per event with tokens.

    `output_tokens` can be more than the events: a server that falls behind puts several tokens into one.
    Calls of a probe that name the same `prefix` sent the same prompt. `cached_tokens` is as reported by the server.
    """

    sent_s: float
    heard_s: tuple[float, ...]
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: int | None = None
    cached_tokens: int | None = None

    @property
    def first_s(self) -> float:
        """From the request to the first token."""
        return self.heard_s[0] - self.sent_s

    @property
    def itl_s(self) -> float | None:
        """Mean time between two tokens of the answer."""
        if self.output_tokens < 2:
            return None
        return (self.ended_s - self.heard_s[0]) / (self.output_tokens - 1)


class Observation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One probe. Held-out probes evaluate a fit and are never part of it.

    `engine` is the growth of the engine's counters during the probe, if it has any. `client_busy` is the CPU
    utilisation of the probing process: near 1 the client was measured and not the engine.
    """

    kind: Kind
    held_out: bool
    calls: tuple[CallTiming, ...]
    engine: dict[str, float] = {}
    client_busy: float = 0.0

    @property
    def total_s(self) -> float:
        """From the first request to the last token of the last answer."""
        return max(call.ended_s for call in self.calls) - min(call.sent_s for call in self.calls)


class Flag(Struct, frozen=True):
    """A flag of the engine, and its source."""

    value: int
    source: Literal["told by the engine", "given", "inferred", "assumed"]


class Conditions(Struct, frozen=True, kw_only=True):
    """The conditions of the observations."""

    url: str
    model: str
    server: str
    date: str
    inferry: str
    seconds: float
    flags: dict[str, Flag]
    max_model_len: int | None = None
    prompts: Literal["token ids", "text"] = "token ids"
    request_fields: tuple[str, ...] = ()
    warm_up_calls: int = 0
    left_out: int = 0
    warnings: tuple[str, ...] = ()


class ObservationFormatError(Exception):
    """The file does not contain raw observations."""


def to_lines(conditions: Conditions, observations: Iterable[Observation]) -> bytes:
    return msgspec.json.Encoder().encode_lines([conditions, *observations])


def from_lines(raw: bytes) -> tuple[Conditions, Sequence[Observation]]:
    lines = [line for line in raw.splitlines() if line.strip()]
    if not lines:
        raise ObservationFormatError("it is empty")
    conditions = _decoded(lines[0], 1, Conditions)
    return conditions, [_decoded(line, number, Observation) for number, line in enumerate(lines[1:], 2)]


def _decoded(line: bytes, number: int, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise ObservationFormatError(f"line {number}: {error}") from None
