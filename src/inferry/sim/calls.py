"""Runs of agents, the calls of their steps, and the outcome of every call."""

from math import inf
from typing import Final, Literal

from msgspec import Struct

from inferry.domain.lanes import Lane
from inferry.sim.prompts import Piece

MODEL: Final = "m"
"""The only model of a simulation."""


class Step(Struct, frozen=True, gc=False):
    """One call of a run: its prompt, its output tokens, and the tool time before the next call."""

    name: str
    prompt: tuple[Piece, ...]
    output: int
    tool_s: float = 0.0


class Run(Struct, frozen=True, kw_only=True):
    """Sequential steps, the first at `at`. The agent cancels the run after `cancel_after_s`, if that is set."""

    run_id: str
    tenant: str
    lane: Lane
    at: float
    steps: tuple[Step, ...]
    cancel_after_s: float | None = None


CallState = Literal["new", "sent", "over"]
"""The state of a call as its agent sees it. The engine may still hold a call that is over."""
Outcome = Literal["done", "failed", "cancelled", "expired"]


class CallRow(Struct, frozen=True, gc=False):
    """One call as its client saw it. Times are seconds since `at`; None: the call did not get so far.

    `late_s` is max over tokens i of (time of token i - itl_s of the lane * i), less what the lane allows for the
    uncached prompt. The call attains its SLO target if `late_s` is at most the lane's ttft_s.
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
    """One run: its duration, and whether every step was done."""

    run: str
    lane: Lane
    tenant: str
    at: float
    latency_s: float
    planned: int
    ok: bool
    cancelled: bool


class Call:
    """A call in progress, owned by the simulation.

    `produced` are the tokens of earlier attempts. `late_at`: max over tokens i so far of (time of token i - itl_s * i).
    """

    __slots__ = (
        "arrival_number",
        "at",
        "cancelled",
        "cost",
        "evicted",
        "first_at",
        "index",
        "job_id",
        "late_at",
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
        "worker_lost",
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
        self.worker_lost = False
        self.late_at = -inf
        self.state: CallState = "new"
