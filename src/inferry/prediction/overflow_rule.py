"""Whether a job would miss its deadline or its lane's TTFT target on own workers, by its predicted wait.

Subscribes to `first_token` and `ended`, to learn how long own and hosted workers take once a job is sent.
"""

from collections.abc import Mapping
from typing import Final

from inferry.domain.attempts import Attempt
from inferry.domain.decisions import MISSES_DEADLINE, MISSES_TARGET
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.prediction.wait_model import FLOOR_S

_WEIGHT: Final = 0.05
"""Weight of the latest job in the moving means."""


class OverflowRule:
    """Predicts the first token and the end of a job from its wait and from what workers took for the lane's jobs."""

    def __init__(self, lanes: Mapping[Lane, LanePolicy]) -> None:
        self._lanes = lanes
        self._own = _ServiceTimes()
        self._hosted = _ServiceTimes()

    def missed(self, job: InferenceJob, wait_s: float, now: float) -> str | None:
        """What the job would miss after this wait, or None.

        After a wait too short to matter a job misses no target, and a deadline only if the answer itself takes own
        workers too long and hosted ones not.
        """
        has_to_wait = wait_s > FLOOR_S
        deadline = job.deadline
        if (
            deadline is not None
            and now < deadline < self._own.end(job, now + wait_s)
            and (has_to_wait or self._hosted.end(job, now) <= deadline)
        ):
            return MISSES_DEADLINE
        ttft_ms = self._lanes[job.lane].ttft_ms
        if has_to_wait and ttft_ms is not None:
            target_at = job.arrived_at + job.ttft_allowance_s + ttft_ms / 1000
            if now + wait_s + self._own.first_token_s[job.lane] > target_at:
                return MISSES_TARGET
        return None

    # -- events ------------------------------------------------------------------------------------------------------

    def first_token(self, attempt: Attempt, now: float) -> None:
        if attempt.sent_at is not None:
            _learn(self._times(attempt).first_token_s, attempt.job.lane, now - attempt.sent_at)

    def ended(self, attempt: Attempt, now: float) -> None:
        first_at, output_tokens = attempt.first_token_at, attempt.output_tokens
        if first_at is not None and output_tokens > 1:
            seconds = (now - first_at) / (output_tokens - 1)
            _learn(self._times(attempt).output_token_s, attempt.job.lane, seconds)

    def _times(self, attempt: Attempt) -> "_ServiceTimes":
        return self._own if attempt.job.overflow is None else self._hosted


class _ServiceTimes:
    """Moving means by lane, in seconds: from sending to the first token, and for each further token. 0: none so far."""

    def __init__(self) -> None:
        self.first_token_s = [0.0 for _ in Lane]
        self.output_token_s = [0.0 for _ in Lane]

    def end(self, job: InferenceJob, sent_at: float) -> float:
        """When a job that is sent then is expected to have its whole answer."""
        lane = job.lane
        return sent_at + self.first_token_s[lane] + self.output_token_s[lane] * job.footprint.output.expected


def _learn(means: list[float], lane: Lane, seconds: float) -> None:
    mean = means[lane]
    means[lane] = mean + _WEIGHT * (seconds - mean) if mean else seconds
