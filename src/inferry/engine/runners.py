"""What computes steps: a runner that computes a step at once, or one that computes it while the next is planned."""

from collections.abc import Sequence as Ordered
from typing import Protocol, runtime_checkable

from msgspec.structs import replace

from inferry.engine.planner import StepPlan, Work


class Runner(Protocol):
    """Executes planned work on the model. Token ids must be below `vocab_size`."""

    @property
    def context_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def execute(self, work: Ordered[Work]) -> list[int]:
        """Compute the work; return one sampled token for each item that reaches its sequence's end, in order. A pooled
        sequence has no token: at its end its `result` is set. The `logprobs` of a sequence that asks are set.
        """


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """Computes a launched step while the next one is planned. Steps are computed and collected in order."""

    def launch(self, work: Ordered[Work]) -> None:
        """Start to compute the work. A pending token `UNKNOWN` is the one that the step before it samples."""

    def collect(self) -> list[int]:
        """Wait for the oldest step in flight; return its tokens as `execute` does."""


UNKNOWN = -1
"""Stands for a token that is being sampled."""


def without_awaiting(plan: StepPlan) -> StepPlan:
    """The plan without sequences with a grammar whose last token is being sampled: their next token depends on it."""
    work = tuple(piece for piece in plan.work if piece.sequence.matcher is None or piece.sequence.tokens[-1] != UNKNOWN)
    if len(work) == len(plan.work):
        return plan
    return replace(plan, work=work) if work else StepPlan()


class BlockingSteps:
    """Launches steps of a runner that computes them at once."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._sampled: list[int] = []

    def launch(self, work: Ordered[Work]) -> None:
        self._sampled = self._runner.execute(work)

    def collect(self) -> list[int]:
        return self._sampled
