"""One deadline, divided between the stages of a run. Pure: time is an argument."""

from collections.abc import Mapping, Sequence

_WEIGHT = 0.1
"""Weight of the newest duration in the average of a stage."""


class StageDurations:
    """Average durations of stages, in seconds, queueing included. Shared by all runs of a pipeline."""

    def __init__(self) -> None:
        self._average: dict[str, float] = {}

    def observe(self, stage: str, seconds: float) -> None:
        before = self._average.get(stage, seconds)
        self._average[stage] = before + _WEIGHT * (seconds - before)

    def predict(self, stages: Sequence[str]) -> dict[str, float]:
        """The duration of each stage. One that has not run yet counts as the average of the others."""
        known = [self._average[stage] for stage in stages if stage in self._average]
        unknown = sum(known) / len(known) if known else 1.0
        return {stage: self._average.get(stage, unknown) for stage in stages}


def times_after(needs: Mapping[str, Sequence[str]], durations: Mapping[str, float]) -> dict[str, float]:
    """The longest predicted time from the end of each stage to the end of the graph.

    `needs` has the stages in the order of their dependencies.
    """
    after = dict.fromkeys(needs, 0.0)
    for stage in reversed(list(needs)):
        for needed in needs[stage]:
            after[needed] = max(after[needed], durations[stage] + after[stage])
    return after


def stage_deadline(now: float, deadline: float, duration: float, after: float) -> float:
    """The deadline of a stage that starts now: its part of the time left, along the critical path.

    Every stage on that path gets the same multiple of its predicted duration. Time that earlier stages did not use is
    divided again when a later one starts. The last stage has the deadline of the run.
    """
    left = max(0.0, deadline - now)
    return deadline if after <= 0 else now + left * (duration / (duration + after) if duration > 0 else 0.5)
