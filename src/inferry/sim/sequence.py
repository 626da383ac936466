"""One call inside the simulated engine, and what the engine reports about it."""

from math import inf

from msgspec import Struct


class EngineSequence:
    """One call inside the engine. `blocks` are the chained hashes of the prompt's full blocks.

    `late_s` is how far the stream fell behind a steady pace: max over tokens i of (time of token i - itl_s * i).
    `target` is how many tokens must be computed before it decodes; it grows when a preempted sequence recomputes its
    own output. The fields below `late_s` belong to the engine.
    """

    __slots__ = (
        "aborted",
        "anchor_step",
        "arrival",
        "blocks",
        "cached_tokens",
        "computed",
        "decoding_since",
        "earliest_step",
        "ended_at",
        "first_at",
        "hashed_blocks",
        "held_blocks",
        "itl_s",
        "key",
        "late_s",
        "output",
        "preemptions",
        "priority",
        "produced",
        "prompt",
        "tag",
        "target",
    )

    def __init__(
        self,
        key: str,
        prompt: int,
        output: int,
        *,
        priority: int = 0,
        blocks: tuple[int, ...] = (),
        itl_s: float | None = None,
        tag: object = None,
    ) -> None:
        if prompt < 1 or output < 1:
            raise ValueError("a sequence has at least one prompt token and one output token")
        self.key = key
        self.prompt = prompt
        self.output = output
        self.priority = priority
        self.blocks = blocks
        self.itl_s = itl_s
        self.tag = tag
        self.computed = 0
        self.produced = 0
        self.target = prompt
        self.cached_tokens = 0
        self.preemptions = 0
        self.aborted = False
        self.first_at: float | None = None
        self.ended_at: float | None = None
        self.late_s = -inf
        self.arrival = 0
        self.earliest_step = 0
        self.held_blocks = 0
        self.hashed_blocks: list[int] = []
        self.decoding_since: int | None = None
        self.anchor_step = 0


class FirstTokenEvent(Struct, frozen=True, gc=False):
    """The sequence produced its first token; the client receives it at `delivered_at`."""

    sequence: EngineSequence
    delivered_at: float


class FinishedEvent(Struct, frozen=True, gc=False):
    """The sequence left the engine, complete or aborted. The client is told at `delivered_at`."""

    sequence: EngineSequence
    delivered_at: float


EngineEvent = FirstTokenEvent | FinishedEvent
