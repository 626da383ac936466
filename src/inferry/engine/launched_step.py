"""A step between its launch and its results."""

from inferry.engine.planner import NO_PADDING, StepPlan
from inferry.engine.sequences import Sequence


class LaunchedStep:
    """`ends`: by piece, the tokens of its sequence that are computed then. `sampled`: sequences that get a token, and
    its place. `weights`: modelled seconds by piece. `padding` is computed beside the work, in rows of `longest` tokens,
    for the `members` of a pass.
    """

    __slots__ = ("ends", "longest", "members", "padding", "pooled", "sampled", "started", "weights", "work")

    def __init__(self, plan: StepPlan, members: list[Sequence], weights: list[float], started: float) -> None:
        self.work = plan.work
        self.padding = plan.padding
        self.members = [] if plan.padding == NO_PADDING else list(members)
        self.longest = max((len(sequence.tokens) for sequence in self.members), default=0)
        self.weights = weights
        self.started = started
        self.ends: list[int] = []
        self.sampled: list[tuple[Sequence, int]] = []
        self.pooled: list[Sequence] = []
