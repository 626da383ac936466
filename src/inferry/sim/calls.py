"""What agents do: runs of steps, each step a call; and what became of every call."""

from typing import Literal

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.sim.prompts import Piece


class Step(Struct, frozen=True, gc=False):
    """One call of a run: what it sends, what it gets, and how long the tool takes before the next."""

    name: str
    prompt: tuple[Piece, ...]
    output: int
    tool_s: float = 0.0


class Run(Struct, frozen=True, kw_only=True):
    """Steps one after the other, the first at `at`. After `cancel_after_s` the agent walks away, if it does."""

    run_id: str
    tenant: str
    lane: Lane
    at: float
    steps: tuple[Step, ...]
    cancel_after_s: float | None = None


CallState = Literal["new", "sent", "over"]
"""Over is over for its agent; the engine may still have to be rid of it."""
Outcome = Literal["done", "failed", "cancelled", "expired"]


class CallRow(Struct, frozen=True, gc=False):
    """One call as its client saw it. Times are seconds since `at`; None: it never got so far.

    `late_s` is max over tokens i of (time of token i - gap of the lane * i): the promise is kept if that is no more
    than the lane's first-token time.
    """

    run: str
    step: str
    tenant: str
    lane: Lane
    prompt: int
    output: int
    at: float
    ttft_s: float | None
    end_s: float
    late_s: float | None
    outcome: Outcome
    produced: int = 0
    cached: int = 0
    sent_s: float | None = None
    worker: int | None = None


class RunRow(Struct, frozen=True, gc=False):
    """One run: how long it took, and whether every step of it was done."""

    run: str
    lane: Lane
    tenant: str
    at: float
    latency_s: float
    planned: int
    ok: bool
    cancelled: bool


class Call:
    """A call under way; the world owns it."""

    __slots__ = (
        "arrival_number",
        "at",
        "cancelled",
        "cost",
        "evicted",
        "first_at",
        "index",
        "job_id",
        "lost",
        "produced",
        "prompt",
        "run",
        "sent_at",
        "sequence",
        "server_turns",
        "state",
        "step",
        "worker",
    )

    def __init__(self, job_id: str, arrival_number: int, run: Run, index: int, prompt: int, at: float) -> None:
        self.job_id = job_id
        self.arrival_number = arrival_number
        self.run = run
        self.index = index
        self.step = run.steps[index]
        self.prompt = prompt
        self.at = at
        self.sent_at: float | None = None
        self.first_at: float | None = None
        self.worker: int | None = None
        self.sequence: object = None
        self.cost = 0
        self.server_turns = 1
        self.produced = 0
        self.cancelled = False
        self.evicted = False
        self.lost = False
        self.state: CallState = "new"
