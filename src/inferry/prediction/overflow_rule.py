"""Whether a job would miss its deadline or its lane's TTFT target on own workers, by its predicted wait.

Subscribes to `first_token` and `ended`, to learn how long own workers take once a job is sent.
"""

from collections.abc import Mapping

from inferry.domain.attempts import Attempt
from inferry.domain.decisions import MISSES_DEADLINE, MISSES_TARGET
from inferry.domain.jobs import InferenceJob
from inferry.domain.lanes import Lane, LanePolicy
from inferry.prediction.wait_model import FLOOR_S

_WEIGHT = 0.05
"""Weight of the latest job in the moving means."""


class OverflowRule:
    """Predicts the first token and the end of a job from its wait and from moving means by lane, in seconds."""

    def __init__(self, lanes: Mapping[Lane, LanePolicy]) -> None:
        self._lanes = lanes
        self._first_token_s = [0.0 for _ in Lane]
        self._output_token_s = [0.0 for _ in Lane]

    def missed(self, job: InferenceJob, wait_s: float, now: float) -> str | None:
        """What the job would miss after this wait, or None. A wait too short to matter misses nothing."""
        if wait_s <= FLOOR_S:
            return None
        lane = job.lane
        first_at = now + wait_s + self._first_token_s[lane]
        if job.deadline is not None:
            ended_at = first_at + self._output_token_s[lane] * job.footprint.output.expected
            if job.deadline > now and ended_at > job.deadline:
                return MISSES_DEADLINE
        ttft_ms = self._lanes[lane].ttft_ms
        if ttft_ms is not None and first_at > job.arrived_at + job.ttft_allowance_s + ttft_ms / 1000:
            return MISSES_TARGET
        return None

    # -- events ------------------------------------------------------------------------------------------------------

    def first_token(self, attempt: Attempt, now: float) -> None:
        if attempt.sent_at is not None and attempt.job.overflow is None:
            _learn(self._first_token_s, attempt.job.lane, now - attempt.sent_at)

    def ended(self, attempt: Attempt, now: float) -> None:
        first_at, output_tokens = attempt.first_token_at, attempt.output_tokens
        if first_at is not None and output_tokens > 1 and attempt.job.overflow is None:
            _learn(self._output_token_s, attempt.job.lane, (now - first_at) / (output_tokens - 1))


def _learn(means: list[float], lane: Lane, seconds: float) -> None:
    mean = means[lane]
    means[lane] = mean + _WEIGHT * (seconds - mean) if mean else seconds
